"""experiments/gaps.py: arms of equal computation, texts, runs that are not repeated, the table."""

import json
import signal
import tomllib

import numpy as np
import pytest
from by_hand import lines_of, refused, run_experiment, saved_figures, table_rows

import train
from experiments import gaps
from harness.checkpoint import load_checkpoint
from harness.configurator import UserError

TINY = """
block_size = 16
n_layer = 1
n_head = 2
n_embd = 16
batch_size = 2
eval_interval = 0
eval_iters = 0
device = "cpu"
"""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A project whose config/cups.toml is tiny and whose train.py is the real one."""
    (tmp_path / "root/config").mkdir(parents=True)
    (tmp_path / "root/config/cups.toml").write_text(TINY)
    (tmp_path / "root/train.py").symlink_to(gaps.ROOT / "train.py")
    monkeypatch.setattr(gaps, "ROOT", tmp_path / "root")
    monkeypatch.setattr(gaps, "N_CHARS", 3000)


class OneByOne:
    """Stands in for a pool of threads: signals, which training listens to, need the first one."""

    def __init__(self, jobs):
        assert jobs == 2

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    map = staticmethod(map)


@pytest.fixture
def in_this_process(monkeypatch) -> list[list[str]]:
    """Runs commands of train.py here, which is faster; the list keeps their words."""
    commands = []

    def call(command, output):
        commands.append(command)
        return train.main(command[2:])

    monkeypatch.setattr(gaps, "run_beside", call)
    monkeypatch.setattr(gaps, "ThreadPoolExecutor", OneByOne)
    return commands


def passes_of(words: list[str]) -> float:
    """Passes over a batch in all steps of an arm."""
    flags = dict(word.lstrip("-").split("=") for word in words)
    mix = [float(share) for share in flags["pass_mix"].split(",")]
    per_step = sum(k * share for k, share in enumerate(mix, start=1))
    return int(flags["max_iters"]) * per_step


def test_arms_cost_the_same_and_staged_ones_begin_plain():
    arms = gaps.arms(4500)
    for words in arms.values():
        assert passes_of(words) == pytest.approx(4500)
    assert "--max_iters=4500" in arms["plain"] and "--fusion=none" in arms["plain"]
    assert "--max_iters=1500" in arms["gated"] and "--fusion=gated" in arms["gated"]
    assert "--max_iters=2500" in arms["residual, staged"]
    assert "--pass_mix=0.6,0,0.4" in arms["residual, staged"]
    assert "--fusion=residual" in arms["residual, staged"]


def test_every_arm_at_every_gap_with_every_seed_has_a_folder_of_its_own():
    settings = gaps.Settings(gaps=(4, 12), seeds=2, seed=5)
    runs = gaps.all_arms(settings)
    assert len(runs) == len({run.folder for run in runs}) == 2 * 2 * 5
    assert {(run.gap, run.seed) for run in runs} == {(4, 5), (4, 6), (12, 5), (12, 6)}
    for run in runs:
        assert f"--seed={run.seed}" in run.command
        assert f"--dataset=cups_{run.gap}_20000000" in run.command


def test_a_text_is_several_times_what_a_run_reads():
    settings = gaps.Settings()
    config = tomllib.loads((gaps.ROOT / "config/cups.toml").read_text())
    assert gaps.N_CHARS > 4 * settings.passes * config["batch_size"] * config["block_size"]


def test_texts_have_their_gaps_and_are_made_once(small, tmp_path, monkeypatch):
    for gap in (4, 12):
        gaps.make_text(gap, tmp_path)
        tokens = np.fromfile(tmp_path / f"cups_{gap}_3000/train.bin", dtype="uint16")
        n_looks = (tokens < 5).sum()
        assert len(tokens) == 2700
        assert (len(tokens) - n_looks) / n_looks == pytest.approx(gap, rel=0.2)
    before = (tmp_path / "cups_4_3000/meta.json").stat().st_mtime_ns
    gaps.make_text(4, tmp_path)
    assert (tmp_path / "cups_4_3000/meta.json").stat().st_mtime_ns == before
    monkeypatch.setattr(gaps, "N_CHARS", 4000)  # one of another length is another text
    gaps.make_text(4, tmp_path)
    assert (tmp_path / "cups_4_4000/train.bin").stat().st_size == 2 * 3600


def test_the_experiment_trains_and_measures_each_run_once(
    small, in_this_process, tmp_path, monkeypatch, capsys
):
    figures = saved_figures(monkeypatch)
    out = tmp_path / "runs"
    words = ("--gaps=4", "--seeds=1", "--passes=9", "--n_windows=20", f"--out_dir={out}")
    numbers = run_experiment(gaps, "", tmp_path, *words, "--device=cpu")
    arms = ["plain", "gated", "gated, staged", "residual", "residual, staged"]
    assert [run["arm"] for run in numbers["runs"]] == arms
    assert [run["mode"] for run in numbers["runs"]] == ["standard"] + ["soft"] * 4
    assert {run["compute_tokens"] for run in numbers["runs"]} == {9 * 32}
    assert len(numbers["runs"][0]["accuracy"]) == 128
    header, *rows = table_rows(capsys.readouterr().out)
    moves = ["after 1 moves", "after 32 moves", "after 128 moves"]
    assert header == ["mean gap", "arm", "seeds", *moves]
    assert [row[1] for row in rows] == arms
    gated = numbers["runs"][1]["accuracy"]
    assert rows[1][2:] == ["1"] + [f"{gated[n - 1]:.2f}" for n in (1, 32, 128)]
    (panel,) = figures[0].axes
    assert panel.get_title() == "mean gap 4 in training"
    moves, accuracy = lines_of(panel)["gated"]
    assert list(moves) == list(range(1, 129)) and list(accuracy) == gated
    assert lines_of(panel).keys() == {*arms, "chance"}

    assert len(in_this_process) == 5
    trained = []
    monkeypatch.setattr(train.Run, "train_step", lambda run: trained.append(run))
    again = run_experiment(gaps, "", tmp_path, *words, "--device=cpu")
    assert len(in_this_process) == 10 and again["runs"] == numbers["runs"]
    assert not trained  # each was resumed, and was at its end

    # A run of other settings is not taken for this one.
    monkeypatch.setattr(gaps, "STAGED", 0.5)
    problems = []
    for arm in gaps.all_arms(gaps.Settings(gaps=(4,), seeds=1, passes=9, out_dir=str(out))):
        try:
            gaps.train_arm(arm)
        except UserError as error:
            problems.append((arm.name, str(error)))
    assert [name for name, _ in problems] == ["gated, staged", "residual, staged"]
    assert "pass_mix" in problems[0][1]


def test_a_failed_run_leaves_the_others_their_table(
    small, in_this_process, tmp_path, monkeypatch, capsys
):
    def run_beside(command, output):
        if "--fusion=gated" in command:
            output.write_text("Traceback\nno memory\n")
            return 1
        return train.main(command[2:])

    monkeypatch.setattr(gaps, "run_beside", run_beside)
    place = (f"--out_dir={tmp_path}/runs", f"--results_dir={tmp_path}", "--device=cpu")
    words = ("--gaps=4", "--seeds=1", "--passes=9", "--n_windows=2", *place)
    assert gaps.main([*words]) == 1
    printed = capsys.readouterr()
    _, *rows = table_rows(printed.out)
    assert [row[1] for row in rows] == ["plain", "residual", "residual, staged"]
    numbers = json.loads((tmp_path / "gaps.json").read_text())
    folder = f"{tmp_path}/runs/cups_4_3000_gated"
    failures = [f"{folder}_9_1: no memory", f"{folder}_staged_9_1: no memory"]
    assert numbers["failures"] == failures and len(numbers["runs"]) == 3
    assert f"a run failed: {failures[0]}\n" in printed.err
    assert (tmp_path / "gaps.png").exists()


def test_an_interrupted_run_continues(small, in_this_process, tmp_path, monkeypatch):
    gaps.make_text(4, tmp_path / "data")
    settings = gaps.Settings(gaps=(4,), seeds=1, passes=9, out_dir=str(tmp_path), device="cpu")
    run = gaps.all_arms(settings)[1]
    train_step = train.Run.train_step

    def interrupted(self):
        entry = train_step(self)
        if entry["step"] == 2:
            signal.raise_signal(signal.SIGTERM)
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "train_step", interrupted)
        assert train.main(run.command[2:]) == 130
    assert load_checkpoint(run.folder)["step"] == 2
    gaps.train_arm(run)
    assert [command[-1] for command in in_this_process] == ["--resume"]
    assert load_checkpoint(run.folder)["step"] == 3


def test_a_failing_run_is_named_with_what_it_said(small, tmp_path):
    settings = gaps.Settings(gaps=(4,), seeds=1, passes=9, out_dir=str(tmp_path), device="cpu")
    run = gaps.all_arms(settings)[1]
    with pytest.raises(UserError, match=f"{run.folder}.*no prepared data"):
        gaps.train_arm(run)


def test_the_table_gives_mean_and_range_over_seeds():
    runs = []
    for seed, accuracy in ((1, 0.5), (2, 1.0)):
        numbers = np.full(128, accuracy).tolist()
        runs.append({"arm": "plain", "gap": 8, "seed": seed, "accuracy": numbers})
    (row,) = gaps.rows_of(runs, ["plain"], (8,))
    assert row == [8, "plain", 2, *["0.75 (0.50 to 1.00)"] * 3]


def test_mistakes_are_named():
    assert "flags alone" in refused(gaps, "out/cups")
    for word in ("--seeds=0", "--passes=8", "--jobs=0"):
        assert word in refused(gaps, word)
    assert "--gaps=(0,)" in refused(gaps, "--gaps=0")
