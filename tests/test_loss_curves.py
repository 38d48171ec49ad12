"""experiments/loss_curves.py against a log written by hand."""

import json
import sys

import numpy as np
import pytest
from by_hand import lines_of, refused, saved_figures

from experiments import loss_curves

STEPS = [0, 10, 20, 30, 40]
VALIDATION = [[3.0, 3.1], [2.5, 2.4], [2.0, 2.1], [1.9, 1.8], [1.8, 1.7]]


def write_log(folder, validation, training=()) -> None:
    folder.mkdir(exist_ok=True)
    entries = [
        {"step": step, "val_losses": losses}
        for step, losses in zip(STEPS, validation, strict=True)
    ]
    text = "".join(json.dumps(entry) + "\n" for entry in [*entries, *training])
    (folder / "log.jsonl").write_text(text)


def training_entries() -> list[dict]:
    """Losses 8/step in pass 1; from step 3 pass 2 as well, 6, 6, then under it."""
    entries = []
    for step in range(1, 5):
        losses = [8.0 / step, 6.0] if step >= 3 else [8.0 / step]
        entries.append({"step": step, "passes": len(losses), "losses": losses})
    for step in (5, 6):
        entries.append({"step": step, "passes": 2, "losses": [2.0, 1.0]})
    return entries


def test_an_average_stands_in_the_middle_of_its_steps():
    entries = [{"step": step, "losses": [2.0, 2.0 - step]} for step in range(10, 80, 10)]
    points = loss_curves.curve(entries, "losses", 2, smooth=5)
    assert points.steps.tolist() == [30, 40, 50]
    assert points.gaps.tolist() == pytest.approx([-30, -40, -50])  # exact on a straight line


def test_crossing_is_where_pass_2_stays_under():
    steps = np.array(STEPS)
    assert loss_curves.crossing(steps, np.array([0.1, -0.1, 0.1, -0.1, -0.1])) == 30
    assert loss_curves.crossing(steps[:3], np.array([0.1, -0.1, 0.0])) is None
    assert loss_curves.crossing(steps, np.full(5, -0.1)) == 0
    assert loss_curves.crossing(steps[:0], steps[:0]) is None  # a plain model


def test_the_log_is_drawn(tmp_path, monkeypatch, capsys):
    figures = saved_figures(monkeypatch)
    write_log(tmp_path, VALIDATION, training_entries())
    words = [str(tmp_path), "--smooth=2"]
    monkeypatch.setattr(sys, "argv", ["loss_curves.py", *words])
    assert loss_curves.main(words) == 0
    left, right = figures[0].axes
    losses = lines_of(left)
    gaps = lines_of(right)
    assert losses["pass 1, validation"] == (STEPS, [3.0, 2.5, 2.0, 1.9, 1.8])
    assert losses["pass 2, validation"] == (STEPS, [3.1, 2.4, 2.1, 1.8, 1.7])
    steps_1, smooth_1 = losses["pass 1, training"]
    assert steps_1 == [2, 3, 4, 5, 6]  # each at the later of the two that it averages
    assert smooth_1[:2] == pytest.approx([(8 + 4) / 2, (4 + 8 / 3) / 2])
    assert losses["pass 2, training"][0] == [4, 5, 6]
    assert losses["pass 2, training"][1] == pytest.approx([6, (6 + 1) / 2, 1])
    assert gaps["pass 2, validation"][1] == pytest.approx([0.1, -0.1, 0.1, -0.1, -0.1])
    expected = [((6 - 8 / 3) + (6 - 2)) / 2, ((6 - 2) + (1 - 2)) / 2, -1]
    assert gaps["pass 2, training"][1] == pytest.approx(expected)
    assert "plain, validation" not in losses
    assert (tmp_path / "loss.png").is_file()
    numbers = json.loads((tmp_path / "loss.json").read_text())
    assert numbers["command"] == f"python -m experiments.loss_curves {tmp_path} --smooth=2"
    assert numbers["settings"] == {"smooth": 2, "out": ""} and "device" not in numbers
    assert numbers["commit"] and len(numbers["date"]) == 10
    assert numbers["crossing"] == 6 and numbers["evaluations"][1]["val_losses"] == [2.5, 2.4]
    assert "under pass 1 from step 6 on" in capsys.readouterr().out


def test_a_plain_run_is_the_baseline(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    write_log(tmp_path / "plain", [[2.9], [2.4], [1.95], [1.7], [1.65]])
    write_log(tmp_path / "full", VALIDATION, training_entries())
    words = [str(tmp_path / "plain"), str(tmp_path / "full"), f"--out={tmp_path}/a.png"]
    assert loss_curves.main(words) == 0
    left, right = figures[0].axes
    plain = lines_of(left)["plain, validation"]
    assert plain == (STEPS, [2.9, 2.4, 1.95, 1.7, 1.65])
    minus = lines_of(right)["plain, validation"]
    assert minus[0] == STEPS
    assert minus[1] == pytest.approx([-0.1, -0.1, -0.05, -0.2, -0.15])
    assert lines_of(left)["pass 2, validation"][1][0] == 3.1  # the last run named is drawn
    assert (tmp_path / "a.png").is_file()
    assert len(json.loads((tmp_path / "a.json").read_text())["plain"]) == 5


def test_curves_of_a_run(tiny_run, plain_run, tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    for folder, n_passes in ((tiny_run, 3), (plain_run, 1)):
        loss_curves.main([folder, f"--out={tmp_path}/loss.png"])
        drawn = lines_of(figures[-1].axes[0])
        for k in (1, 2, 3):
            assert (f"pass {k}, validation" in drawn) == (k <= n_passes)


def test_it_says_when_there_is_nothing_to_compare(plain_run, tiny_run, tmp_path, capsys):
    for words in ([plain_run], [tiny_run, "--smooth=1000"]):
        loss_curves.main([*words, f"--out={tmp_path}/loss.png"])
        assert "not logged often enough" in capsys.readouterr().out


def test_mistakes_are_named(tmp_path):
    folder = str(tmp_path)
    assert "one run's folder" in refused(loss_curves)
    assert str(tmp_path / "log.jsonl") in refused(loss_curves, folder)
    assert "--smooth=0" in refused(loss_curves, folder, "--smooth=0")
    write_log(tmp_path, VALIDATION)
    for out in (f"{folder}/log.jsonl/a.png", f"{folder}/a.xyz"):
        assert f"--out={out}" in refused(loss_curves, folder, f"--out={out}")
    (tmp_path / "log.jsonl").write_text("garbage\n")
    assert "'garbage' is n" in refused(loss_curves, folder)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "passes": 1, "losses": [2.0]}\n')
    assert "--eval_iters" in refused(loss_curves, folder)
