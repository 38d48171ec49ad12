"""experiments/report.py: tables, windows, groups, and results that outlive their picture."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from by_hand import refused, run_experiment, validation, window_rows

from experiments import (
    decoding_modes,
    fixed_point,
    fusion_spectrum,
    gaps,
    loss_curves,
    prefill_passes,
    pretrained,
    probe,
    report,
    retrofit,
    state_tracking,
    written_looks,
)
from harness.checkpoint import load_checkpoint, load_model
from harness.configurator import UserError

ROOT = Path(__file__).parents[1]


def test_table_by_hand():
    assert report.table(["run", "loss"], [["a", 1.23456], ["longer", ""], ["c", 12]]) == (
        "| run    | loss  |\n"
        "|--------|-------|\n"
        "| a      | 1.235 |\n"
        "| longer |       |\n"
        "| c      | 12    |"
    )


def test_held_out_windows_are_even_and_hold_each_next_token(corpus, tiny_run):
    model, _ = load_model(tiny_run)
    tokens = validation(corpus)
    idx, targets = report.held_out(model, tokens, 7)
    expected = window_rows(tokens, 7)
    assert idx.tolist() == expected[:, :-1].tolist()
    assert targets.tolist() == expected[:, 1:].tolist()


def test_a_run_that_was_stopped_early_is_named(corpus, tiny_run, tmp_path, capsys):
    settings = report.Settings(data_dir=corpus)
    report.load(tiny_run, settings)
    assert capsys.readouterr().err == ""
    checkpoint = load_checkpoint(tiny_run)
    torch.save(checkpoint | {"step": 19}, tmp_path / "ckpt.pt")
    report.load(str(tmp_path), settings)
    assert capsys.readouterr().err == f"{tmp_path}: trained for 19 of its 20 steps\n"


def test_labels_are_folder_names_unless_two_are_the_same(tmp_path):
    for name in ("one/run", "two/run", "two/other"):
        (tmp_path / name).mkdir(parents=True)
    first = str(tmp_path / "one/run")
    second = str(tmp_path / "two/run")
    other = str(tmp_path / "two/other")
    assert report.labels([first, f"{other}/ckpt.pt"]) == ["run", "other"]
    assert report.labels([first, second]) == [first, second]


def settings_of(seed=1, fusion="gated", max_iters=10, out_dir="a", init_from="") -> dict:
    """What `groups` reads of a checkpoint."""
    train = {"seed": seed, "max_iters": max_iters, "out_dir": out_dir, "init_from": init_from}
    return {"model_config": {"fusion": fusion}, "train_config": train}


def test_groups_are_of_runs_that_differ_in_their_seed_alone():
    checkpoints = [
        settings_of(1, "none"),
        settings_of(1),
        settings_of(2, out_dir="b"),
        settings_of(2, "none"),
        settings_of(1, max_iters=20),
    ]
    names = ["plain_1", "full_1", "full_2", "plain_2", "long"]
    grouped = report.groups(names, checkpoints)
    assert grouped == {"plain": [0, 3], "full": [1, 2], "long": [4]}
    two = [settings_of(1), settings_of(2), settings_of(1, "add"), settings_of(2, "add")]
    assert report.groups(["x_1", "x_2", "x_3", "x_4"], two) == {"x": [0, 1], "x'": [2, 3]}


def test_runs_that_began_from_others_are_a_group_of_their_own():
    staged = [settings_of(1, init_from="out/a_1"), settings_of(2, init_from="out/a_2")]
    names = ["staged_1", "staged_2", "full_3"]
    grouped = report.groups(names, [*staged, settings_of(3)])
    assert grouped == {"staged": [0, 1], "full_3": [2]}
    other = settings_of(1, init_from="out/b_1")  # the same seed and last stage, another beginning
    grouped = report.groups(["staged_1", "staged_2", "other_1"], [*staged, other])
    assert grouped == {"staged": [0, 1], "other_1": [2]}


def test_a_group_has_each_seed_once():
    message = "^full_1 and again have the same settings and the same seed=1; name each training"
    twice = [settings_of(1), settings_of(2), settings_of(1, out_dir="b")]
    with pytest.raises(UserError, match=message):
        report.groups(["full_1", "full_2", "again"], twice)


def test_groups_are_named_by_what_their_runs_share():
    assert report.group_name(["tasks_1", "tasks_2"]) == "tasks"
    assert report.group_name(["tasks_plain_seed1", "tasks_plain_seed12"]) == "tasks_plain"
    assert report.group_name(["tasks_1"]) == "tasks_1"
    assert report.group_name(["a", "b"]) == "a"


@pytest.mark.parametrize("experiment", [decoding_modes, probe, state_tracking, written_looks])
def test_naming_a_run_twice_is_refused_before_any_work(
    experiment, corpus, tiny_run, tmp_path, monkeypatch
):
    monkeypatch.setattr(state_tracking, "need_games", lambda *_: None)
    monkeypatch.setattr(probe, "check", lambda *_: None)
    monkeypatch.setattr(experiment, "measure", None, raising=False)
    monkeypatch.setattr(probe, "probe_training", None)
    place = (f"--data_dir={corpus}", f"--results_dir={tmp_path}/none")
    message = refused(experiment, tiny_run, tiny_run, *place)
    assert f"{tiny_run} and {tiny_run} have the same settings" in message


def test_students_interval_by_hand():
    # t of 2 degrees of freedom at 0.975 is 4.303; the values' standard deviation is 1.
    assert report.student([1, 2, 3]) == pytest.approx(4.3027 / 3**0.5, abs=1e-4)
    assert report.student([1.5]) is None


def test_numbers_are_kept_until_model_key_or_code_change(tmp_path, tiny_run, plain_run):
    code = tmp_path / "code.py"
    other = tmp_path / "other.py"
    computed = []

    def numbers(model, key, sources=(code, other)) -> int:
        def compute() -> dict:
            computed.append(key)
            return {"number": len(computed)}

        return report.cached(f"{tmp_path}/kept", model, [key], list(sources), compute)["number"]

    code.write_text("a = 1\n")
    other.write_text("b = 1\n")
    model, _ = load_model(tiny_run)
    plain, _ = load_model(plain_run)
    assert [numbers(model, "x"), numbers(model, "x")] == [1, 1]
    assert [numbers(model, "y"), numbers(plain, "x"), numbers(model, "x")] == [2, 3, 1]
    other.write_text("b = 2\n")
    assert [numbers(model, "x"), numbers(model, "x")] == [4, 4]
    other.write_text("b = 1\n")
    assert numbers(model, "x") == 1
    with torch.no_grad():
        model.embedding.weight[0, 0] += 1
    assert numbers(model, "x") == 5
    assert all(source.is_file() for source in probe.SOURCES)
    names = {source.name for source in probe.SOURCES}
    assert names == {"model.py", "tasks.py", "probe.py"}


def test_json_says_how_it_came_about(corpus, tiny_run, tmp_path, monkeypatch):
    words = [tiny_run, "--feedback_passes=1", "--device=cpu"]
    monkeypatch.setattr(sys, "argv", ["prefill_passes.py", *words])
    numbers = run_experiment(prefill_passes, corpus, tmp_path, *words)
    flags = "--feedback_passes=1 --device=cpu"
    command = f"python -m experiments.prefill_passes {tiny_run} {flags}"
    assert numbers["command"] == command
    assert numbers["settings"]["feedback_passes"] == 1
    assert numbers["settings"]["n_windows"] == 120
    assert numbers["device"] == "cpu" and numbers["torch"] == torch.__version__
    assert len(numbers["date"]) == 10


def test_lists_of_numbers_stand_on_one_line(tmp_path):
    """And a string that looks like one keeps what it says."""
    nested = [{"n": []}, [[1], [2, 3]]]
    numbers = {"loss": [1.5, -2e-05, None, True], "of": nested, "text": "[\n 1 ]"}
    report.write_json(tmp_path / "new" / "n.json", numbers)
    text = (tmp_path / "new" / "n.json").read_text()
    assert json.loads(text) == numbers
    assert text.splitlines() == [
        "{",
        ' "loss": [1.5, -2e-05, null, true],',
        ' "of": [',
        "  {",
        '   "n": []',
        "  },",
        "  [",
        "   [1],",
        "   [2, 3]",
        "  ]",
        " ],",
        ' "text": "[\\n 1 ]"',
        "}",
    ]


def test_seconds_since_the_start(monkeypatch):
    """By a clock of its own: a fast machine takes 0.0 of the seconds that JSON has."""
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: 112.34))
    how = report.origin("prefill_passes", report.Settings(), began=100.0)
    assert how["seconds"] == 12.3


def test_the_command_can_be_pasted_and_git_may_be_missing(
    corpus, tiny_run, tmp_path, monkeypatch
):
    words = [tiny_run, "--stop=\n x", "--n_samples=1", "--n_windows=1", "--max_new_tokens=4"]
    monkeypatch.setattr(sys, "argv", ["decoding_modes.py", *words])
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    numbers = run_experiment(decoding_modes, corpus, tmp_path, *words)
    assert numbers["commit"] == "unknown"
    pasted = shlex.split(numbers["command"])
    assert pasted == ["python", "-m", "experiments.decoding_modes", *words]
    git = tmp_path / "bin/git"
    git.write_text("#!/bin/sh\necho 1a2b3c-dirty\n")
    git.chmod(0o755)
    assert report.commit() == "1a2b3c-dirty"
    git.write_text("#!/bin/sh\necho not a repository >&2\nexit 128\n")
    assert report.commit() == "unknown"


def test_a_results_dir_that_cannot_be_is_named(corpus, tiny_run, tmp_path):
    (tmp_path / "file").write_text("")
    bad = f"--results_dir={tmp_path}/file/x"
    words = (tiny_run, "--n_windows=1", f"--data_dir={corpus}", bad)
    assert bad in refused(prefill_passes, *words)


def test_a_home_folder_is_expanded(corpus, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").symlink_to(tiny_run)
    (tmp_path / "data").symlink_to(corpus)
    words = ["~/run", "--n_windows=1", "--data_dir=~/data", "--results_dir=~/r"]
    assert prefill_passes.main(words) == 0
    assert (tmp_path / "r/prefill_passes.json").exists()
    assert loss_curves.main(["~/run", "--out=~/curves/loss.png"]) == 0
    assert (tmp_path / "curves/loss.json").exists()
    assert f"no model at {tmp_path}/nothing" in refused(pretrained, "~/nothing")
    assert not Path("~").exists()


@pytest.mark.parametrize(
    "experiment, flag",
    [
        (fixed_point, "seed"),
        (fusion_spectrum, "seed"),
        (prefill_passes, "seed"),
        (retrofit, "seed"),
        (retrofit, "n_windows"),
        (retrofit, "data_dir"),
        (retrofit, "device"),
        (gaps, "data_dir"),
        (probe, "n_windows"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(experiment, flag):
    assert f"--{flag}=2" in refused(experiment, f"--{flag}=2")


def test_another_text_is_refused(tiny_run, tmp_path):
    import prepare

    (tmp_path / "tiny.txt").write_text("another text " * 200)
    prepare.main([f"--input={tmp_path}/tiny.txt", f"--data_dir={tmp_path}"])
    words = (tiny_run, f"--data_dir={tmp_path}", f"--results_dir={tmp_path}/r")
    assert "another text" in refused(prefill_passes, *words)
    assert "another text" in refused(decoding_modes, *words)
    assert not (tmp_path / "r").exists()


def test_a_picture_that_fails_costs_only_itself(tmp_path, capsys):
    def broken(figure):
        assert json.loads((tmp_path / "x.json").read_text())["loss"] == 2.5  # already there
        raise RuntimeError("no\nink")

    report.save("x", report.Settings(results_dir=str(tmp_path)), 0.0, {"loss": 2.5}, broken)
    printed = capsys.readouterr()
    assert json.loads((tmp_path / "x.json").read_text())["loss"] == 2.5
    assert printed.err == f"no picture {tmp_path}/x.png (RuntimeError: no ink)\n"
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_letters_are_legible_whatever_draw_asks_for(tmp_path, monkeypatch):
    kept = []

    def small(figure):
        kept.append(figure)
        figure.set_size_inches(14, 3)
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], label="a")
        axes.set_title("large", fontsize=40)
        axes.set_xlabel("small", fontsize=4)
        axes.legend(fontsize=5)

    assert report.draw_picture(tmp_path / "a.png", small)
    (axes,) = kept[0].axes
    sizes = [axes.xaxis.label, axes.get_legend().texts[0], *axes.get_xticklabels()]
    assert {text.get_fontsize() for text in sizes} == {18}  # 9 points of 7 inches, twice as wide
    assert axes.title.get_fontsize() == 40


def test_scripts_run_by_their_file_without_a_notebooks_backend(tmp_path, corpus, tiny_run):
    environment = os.environ | {"MPLBACKEND": "module://not_there.backend"}
    script = ROOT / "experiments/prefill_passes.py"
    words = [tiny_run, "--n_windows=1", f"--data_dir={corpus}", f"--results_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, str(script), *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "prefill_passes.png").read_bytes().startswith(b"\x89PNG")


SCRIPTS = [
    file for file in sorted((ROOT / "experiments").glob("*.py"))
    if file.read_text().endswith("    run(main)\n")
]  # fmt: skip


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.stem)
def test_every_script_has_the_preamble(file):
    lines = file.read_text().splitlines()
    place = lines.index('if __package__ in (None, ""):')
    path = "    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
    assert lines[place + 1] == path
    names = "from corpora", "from experiments", "from harness", "from model", "from train"
    ours = (*names, "import prepare", "import train")
    before = [line for line in lines[:place] if line.startswith(ours)]
    assert before == []


def test_a_mistake_is_one_line_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.decoding_modes", "--temprature=1"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "--temprature" in done.stderr and "temperature" in done.stderr
