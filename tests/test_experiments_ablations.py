"""experiments: sweeps, runs and ablations, against hand numbers and loops written here."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness.configurator import UserError, build
from conftest import QUICK, SHAPE
from experiments.ablations import __main__ as ablations
from experiments.ablations import runs
from experiments.ablations import spec as specs
from experiments.ablations.spec import Spec
from experiments.ablations.sweeps import SWEEPS, equivalents, first_tokens
from model import GPT, GPTConfig
from harness.data import load_meta, load_tokens
from train import TrainConfig, evaluate

HERE = Path(__file__).parents[1]
SMALL = ["--preset=quick", "--max_iters=3", "--n_windows=4", "--device=cpu"]


@pytest.fixture(scope="module")
def data(corpus, tmp_path_factory) -> str:
    """A data_dir whose pydocs is the tiny corpus, 18,000 characters to train on."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(Path(corpus) / "tiny", folder / "pydocs")
    return str(folder)


def spec(corpus: str, out, **settings) -> Spec:
    """A run of seconds, with settings of either config, or of the Spec."""
    shape = SHAPE | {name: value for name, value in settings.items() if name in GPTConfig.__dataclass_fields__}
    how = {name: settings[name] for name in ("n_windows", "n_passes", "patience") if name in settings}
    rest = {name: value for name, value in settings.items() if name not in shape and name not in how}
    config = build(TrainConfig, QUICK | {"max_iters": 12, "eval_interval": 4, "data_dir": corpus} | rest)
    return Spec(replace(config, out_dir=str(out)), build(GPTConfig, shape), **({"n_windows": 6, "n_passes": 4} | how))


def test_sweeps_are_the_papers():
    assert set(SWEEPS) == {"detach", "warmup", "interleave", "fusion", "jitter", "passes", "mixin", "data"}
    arms = {name: sweep.arms for name, sweep in SWEEPS.items()}
    assert arms["detach"]["detached", 0.75] == {"pass_mix": (0.75, 0.0, 0.25), "detach": True}
    assert len(arms["detach"]) == 8 and len(arms["warmup"]) == 10 and len(arms["interleave"]) == 4
    steps = [arms["warmup"]["equal computation", ratio]["steps"] for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert steps == pytest.approx([1, 3 / 2.5, 3 / 2, 3 / 1.5, 3])  # three passes cost three plain steps
    assert not any("steps" in arm for (series, _), arm in arms["warmup"].items() if series == "equal steps")
    assert [arm["fusion"] for arm in arms["fusion"].values()] == ["gated", "add", "concat", "none"]
    assert [arm["jitter"] for arm in arms["jitter"].values()] == [0.02, 0.0, 0.1]
    assert arms["passes"]["", "2 and 3 (22:3)"]["pass_mix"] == pytest.approx((0, 22 / 25, 3 / 25))
    assert [arm["prefix_mixin"] for arm in arms["mixin"].values()] == [0, 0.5, 1]
    assert [x for series, x in arms["data"] if series == "full-bandwidth"] == [0.1, 0.3, 1]


def test_what_an_arm_is_compared_with():
    assert SWEEPS["warmup"].base("equal computation", 1.0) == ("equal steps", 0.0)
    assert SWEEPS["detach"].base("detached", 0.5) == ("not detached", 0.5)
    assert SWEEPS["detach"].base("not detached", 0.5) == ("not detached", 0.0)
    assert SWEEPS["data"].base("full-bandwidth", 1.0) == ("plain", 1.0)
    for sweep in SWEEPS.values():
        assert {sweep.base(*arm) for arm in sweep.arms} <= set(sweep.arms)


def test_every_arm_is_a_run_of_its_own_and_equal_arms_are_one(data, tmp_path):
    settings = build(ablations.Settings, {"data_dir": data, "out_dir": str(tmp_path), "preset": "quick"})
    made = {}
    for name in ("detach", "warmup", "interleave", "fusion", "jitter", "passes", "mixin"):
        for arm, changes in SWEEPS[name].arms.items():
            made[name, arm] = ablations.spec_of(changes, 2, settings)
    base = made["detach", ("not detached", 0.0)]
    assert base.train.pass_mix == (0, 0, 1) and base.train.seed == 2 and base.train.max_iters == 200
    same = [("warmup", ("equal steps", 0.0)), ("warmup", ("equal computation", 0.0)), ("fusion", ("", "gated")),
            ("jitter", ("", "0.02")), ("passes", ("", "3")), ("mixin", ("", 0.0))]
    assert all(made[arm] == base for arm in same)
    # 8 of detach; of warmup the plain one and four at equal computation; two interleaved; two fusions, two jitters,
    # three mixes of passes, two shares of mixin
    folders = {spec.train.out_dir for spec in made.values()}
    assert len(folders) == 8 + 5 + 2 + 2 + 2 + 3 + 2
    assert made["warmup", ("equal computation", 0.5)].train.max_iters == 300
    assert "detach=true" in made["detach", ("detached", 0.5)].train.out_dir
    assert made["fusion", ("", "none")].model.fusion == "none"
    other_data = tmp_path / "other"
    shutil.copytree(data, other_data)
    meta = json.loads((other_data / "pydocs/meta.json").read_text())
    (other_data / "pydocs/meta.json").write_text(json.dumps(meta | {"sha256": "0" * 64}))
    moved = ablations.spec_of({}, 2, replace(settings, data_dir=str(other_data)))
    assert moved.train.out_dir != base.train.out_dir
    shutil.copytree(data, tmp_path / "same")
    assert ablations.spec_of({}, 2, replace(settings, data_dir=str(tmp_path / "same"))).train.out_dir == \
        base.train.out_dir


def test_a_sweep_ends_in_table_json_and_figure_with_paired_differences(data, tmp_path, capsys, monkeypatch,
                                                                       small_preset):
    words = [*SMALL, f"--data_dir={data}", f"--out_dir={tmp_path}/out", f"--results_dir={tmp_path}/results", "--jobs=1"]
    assert ablations.main(["fusion", "mixin", *words, "--seeds=2"]) == 0
    out = capsys.readouterr().out
    for name in ("fusion", "mixin"):
        assert (tmp_path / f"results/ablations/{name}.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "results/ablations/fusion.json").read_text())
    assert result["command"].startswith("python -m experiments.ablations ")
    arms = {arm["fusion"]: arm for arm in result["arms"]}
    assert list(arms) == ["gated", "add", "concat", "none"] and all(len(arm["runs"]) == 2 for arm in arms.values())
    whole = {}
    for kind, part in (("gated", ""), ("add", "fusion=add"), ("concat", "fusion=concat"), ("none", "fusion=none")):
        folders = [folder for folder in Path(tmp_path, "out/quick").iterdir()
                   if ((part or "fusion") in folder.name) == bool(part) and "mixin" not in folder.name]
        whole[kind] = [json.loads((folder / "measured.json").read_text())
                       for folder in sorted(folders, key=lambda folder: "seed=2" in folder.name)]
    measured = {kind: [run["losses"] for run in two] for kind, two in whole.items()}
    assert len(measured["add"][0]) == 101 and len(measured["none"][0]) == 1 and len(measured["gated"]) == 2
    for kind, name, k in (("add", "pass 2", 1), ("concat", "32 passes", 32), ("none", "32 passes", 0)):
        values = [losses[k] for losses in measured[kind]]
        pairs = [value - theirs[max(k, 32 * (kind == "none"))] for value, theirs in zip(values, measured["gated"])]
        numbers = arms[kind]["summary"][name]
        assert numbers["mean"] == pytest.approx(sum(values) / 2)
        assert numbers["difference"] == pytest.approx(sum(pairs) / 2)
        # two values: their deviation is half of what they are apart times sqrt(2); Student's t for one degree is 12.706
        assert numbers["difference_interval"] == pytest.approx(12.7062 * abs(pairs[0] - pairs[1]) / 2, rel=1e-4)
    assert f"{arms['add']['summary']['pass 2']['difference']:+.3f} ±" in out and "share" in out and "soft" in out
    assert arms["gated"]["soft"] == pytest.approx(np.mean([run["soft"] for run in whole["gated"]]))
    assert arms["add"]["losses"][5] == pytest.approx(np.mean([losses[5] for losses in measured["add"]]))
    assert arms["add"]["runs"][1]["pass 2"] == measured["add"][1][1]

    def refuse(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(runs, "train", refuse)
    assert ablations.main(["fusion", *words, "--seeds=2"]) == 0  # all runs are there
    again = json.loads((tmp_path / "results/ablations/fusion.json").read_text())
    assert again["arms"] == result["arms"]
    assert not list(Path(tmp_path, "out").rglob("ckpt.pt"))
    logs = {folder.name: [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            for folder in Path(tmp_path, "out/quick").iterdir()}
    first = {name: lines[0]["val_losses"][0] for name, lines in logs.items() if "seed=2" not in name}
    assert len(first) == 6 and len(set(first.values())) == 1  # one seed: the same initial weights but the fusion's


def test_one_seed_has_no_interval_and_the_data_sweep_says_how_much_text_is_needed(data, tmp_path, capsys, small_preset):
    words = [*SMALL, f"--data_dir={data}", f"--out_dir={tmp_path}/out", f"--results_dir={tmp_path}", "--jobs=1"]
    assert ablations.main(["data", *words, "--seeds=1", "--max_iters=1"]) == 0
    out = capsys.readouterr().out
    assert " ± " not in out.split("\n| ", 1)[1] and out.count(" at 0.1: ") == 3
    arms = json.loads((tmp_path / "ablations/data.json").read_text())["arms"]
    assert [arm["settings"]["data"] for arm in arms] == [0.1, 0.3, 1, 2, 0.1, 0.3, 1]
    assert [arm["base"] for arm in arms][-2:] == [["plain", 0.3], ["plain", 1.0]]
    gap = arms[-1]["summary"]["pass 2"]["mean"] - arms[2]["summary"]["pass 2"]["mean"]
    assert arms[-1]["summary"]["pass 2"]["difference"] == pytest.approx(gap)
    assert all(len(arm["losses"]) == (1 if arm["series"] == "plain" else 9) for arm in arms)
    sizes = {meta["train_tokens"] for meta in (json.loads(file.read_text())
                                               for file in Path(tmp_path, "out/quick/data").glob("*/meta.json"))}
    assert sizes == {100, 300, 1000, 2000}


def test_equivalents_by_hand():
    def arm(*seeds):
        return {"runs": [dict(zip(ablations.METRICS, losses)) for losses in seeds],
                "summary": {name: {} for name in ablations.METRICS}}

    results = {("plain", 0.1): arm([2.0], [4.0]), ("plain", 1.0): arm([1.0], [2.0]),
               ("plain", 0.3): arm([2.0], [5.0]),  # more text and no better: not a point of the line
               ("full", 0.1): arm([2.0, 1.5, 0.9], [4.5, 3.0, 2.0])}
    lines = equivalents(results, 2)
    needs = [numbers["plain_needs"] for numbers in results["full", 0.1]["summary"].values()]
    half_way = (0.1 * 1.0) ** 0.5 / 0.1
    assert needs == [[pytest.approx(1), None], [pytest.approx(half_way)] * 2, [None, pytest.approx(10)]]
    assert len(lines) == 3 and lines[1].endswith("by seed: 3.16 3.16") and lines[2].endswith("outside 10.00")


def test_first_tokens_are_the_first(data, tmp_path):
    name = first_tokens(data, "pydocs", 1000, tmp_path)
    meta, whole = load_meta(tmp_path / name), load_meta(Path(data) / "pydocs")
    assert name == "pydocs_1000" and meta["sha256"] != whole["sha256"]
    train, everything = load_tokens(tmp_path / name, "train", meta), load_tokens(Path(data) / "pydocs", "train", whole)
    assert train.tolist() == everything[:1000].tolist()
    assert (tmp_path / name / "val.bin").read_bytes() == Path(data, "pydocs/val.bin").read_bytes()
    with pytest.raises(UserError, match="18000 tokens to train on, and 18001 .* leave out"):
        first_tokens(data, "pydocs", 18001, tmp_path)


@pytest.mark.parametrize("losses, patience, expected", [
    ([[3, 3], [2, 2], [2.1, 2.2], [2.2, 2.1]], 2, True),
    ([[3, 3], [2, 2], [2.1, 2.2], [2.2, 1.9]], 2, False),  # the second pass still improves
    ([[3, 3], [2, 2], [2.1, 2.2]], 2, False), ([], 1, False)])
def test_no_better_waits_for_every_pass(tmp_path, losses, patience, expected):
    lines = [{"step": step, "val_losses": pair} for step, pair in enumerate(losses)] + [{"step": 9, "losses": [0.0]}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert runs.no_better(tmp_path / "log.jsonl", patience) is expected


def test_patience_ends_a_run_and_its_best_evaluations_count(corpus, tmp_path):
    one = spec(corpus, tmp_path / "run", max_iters=400, learning_rate=0.1, eval_interval=2, eval_passes=2, patience=3)
    numbers = runs.do(one)
    evaluations = [json.loads(line)["val_losses"] for line in (tmp_path / "run/log.jsonl").read_text().splitlines()
                   if "val_losses" in line]
    assert numbers["step"] < 400 and not numbers["finished"] and numbers["commit"]
    last_best = max(int(np.argmin([pair[k] for pair in evaluations])) for k in (0, 1))
    assert len(evaluations) - 1 - last_best == 3
    assert numbers["losses"] == [min(pair[k] for pair in evaluations) for k in (0, 1)]


def test_an_interrupted_run_goes_on_and_ends_as_if_never_stopped(corpus, tmp_path, monkeypatch):
    whole = runs.do(spec(corpus, tmp_path / "whole"))
    part, train = spec(corpus, tmp_path / "part"), runs.train
    monkeypatch.setattr(runs, "train", lambda config, shape, stop: train(config, shape, lambda step: step == 5))
    assert runs.do(part) is None and (tmp_path / "part/ckpt.pt").exists()
    monkeypatch.setattr(runs, "train", train)
    assert runs.do(part)["losses"] == whole["losses"] and runs.numbers_of(part)["step"] == 12
    killed = tmp_path / "killed"  # before its first checkpoint
    killed.mkdir()
    (killed / "log.jsonl").write_text('{"step": 1, "losses": [1.0]}\n')
    assert runs.do(spec(corpus, killed))["losses"] == whole["losses"]


def test_measured_losses_and_modes_of_a_run(corpus, tmp_path, monkeypatch):
    kept = {}
    monkeypatch.setattr(specs, "load_model", lambda *args, load=specs.load_model: kept.setdefault("model", load(*args)))
    numbers = runs.do(spec(corpus, tmp_path / "run", n_windows=3, n_passes=3))
    model, tokens = kept["model"][0], load_tokens(Path(corpus) / "tiny", "val", load_meta(Path(corpus) / "tiny"))
    assert numbers["losses"] == pytest.approx(evaluate(model, tokens, 3, 4), rel=1e-5)
    rows = torch.from_numpy(tokens[np.array([0, (len(tokens) - 17) // 2, len(tokens) - 17])[:, None]
                                   + np.arange(17)].astype(np.int64))
    idx, targets, naive = rows[:, :-1], rows[:, 1:], {}
    with torch.no_grad():
        e = model.embed(idx)
        for mode in ("standard", "soft", "fused"):
            u = [e[:, t] for t in range(8)]
            h = model.stack(torch.stack(u, 1))
            if mode == "fused":
                u = [u[0], *(model.fusion(h[:, t - 1], model.input_norm(e[:, t])) for t in range(1, 8))]
                h = model.stack(torch.stack(u, 1))
            state, losses = h[:, -1], []
            for t in range(8, 16):
                u.append(e[:, t] if mode == "standard" else model.fusion(state, model.input_norm(e[:, t])))
                state = model.stack(torch.stack(u, 1))[:, -1]
                losses.append(F.cross_entropy(model.head(state), targets[:, t]))
            naive[mode] = float(sum(losses) / len(losses))
    assert {mode: numbers[mode] for mode in naive} == pytest.approx(naive, rel=1e-5)
    plain = runs.do(spec(corpus, tmp_path / "plain", fusion="none", pass_mix=(1.0,)))
    assert len(plain["losses"]) == 1 and "standard" in plain and not {"soft", "share"} & set(plain)


@pytest.mark.parametrize("kind", ["gated", "add"])
def test_state_share_by_loops(kind):
    torch.manual_seed(0)
    model = GPT(build(GPTConfig, SHAPE | {"fusion": kind, "vocab_size": 5})).eval()
    rows = torch.randint(4, (3, 9))  # one symbol never occurs
    idx, targets = rows[:, :-1], rows[:, 1:]
    numbers = specs.state_share(model, idx, targets)
    with torch.no_grad():
        e, h = model.embed(idx), model.stack(model.embed(idx))
        u = {(row, t): model.fusion(h[row, t - 1], model.input_norm(e[row, t]))
             for row in range(3) for t in range(1, 8)}

        def spread(places):
            centre = sum(u[place] for place in places) / len(places)
            return sum(float((u[place] - centre) @ (u[place] - centre)) for place in places)

        by_token = [[place for place in u if idx[place] == token] for token in range(4)]
        assert numbers["share"] == pytest.approx(sum(map(spread, by_token)) / spread(list(u)), rel=1e-4)
        mean = sum(h[row, t] for row in range(3) for t in range(8)) / 24
        inputs = torch.stack([torch.stack([e[row, 0], *(model.fusion(mean, model.input_norm(e[row, t]))
                                                         for t in range(1, 8))]) for row in range(3)])
        loss = F.cross_entropy(model.head(model.stack(inputs)).flatten(0, 1), targets.flatten())
        assert numbers["mean_state"] == pytest.approx(loss.item(), rel=1e-5)
        if kind == "add":  # a model that takes the shortcut, and one that ignores the tokens
            share = {}
            for name in ("W_H", "W_G"):
                weight = getattr(model.fusion, name).weight
                kept = weight.clone()
                weight.zero_()
                share[name] = specs.state_share(model, idx, targets)["share"]
                weight.copy_(kept)
            assert share["W_H"] == pytest.approx(0, abs=1e-9) and share["W_G"] > 0.5


def test_runs_side_by_side_and_a_failure_that_waits_for_the_others(corpus, tmp_path, capsys):
    good = [spec(corpus, tmp_path / name, max_iters=2, seed=seed) for name, seed in (("a", 1), ("b", 2))]
    bad = spec(corpus, tmp_path / "bad", max_iters=2, learning_rate=1e30, warmup_iters=0)
    with pytest.raises(UserError, match=r"1 of the runs failed, the first: .*/bad: .*no number"):
        runs.do_all([bad, *good, good[0]], 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[-1].endswith("(runs to go: 0)") and any("/bad: " in line for line in lines)
    assert [numbers["step"] for numbers in runs.do_all(good, 2)] == [2, 2]
    assert "step" in (tmp_path / "a/output.txt").read_text()
    alone = runs.do(replace(good[0], train=replace(good[0].train, out_dir=str(tmp_path / "alone"))))
    assert alone["losses"] == runs.numbers_of(good[0])["losses"]


def test_a_failure_in_this_process_waits_for_the_others_too(corpus, tmp_path):
    bad = spec(corpus, tmp_path / "bad", max_iters=2, learning_rate=1e30, warmup_iters=0)
    with pytest.raises(UserError, match="1 of the runs failed, the first: .*no number"):
        runs.do_all([bad, spec(corpus, tmp_path / "good", max_iters=2)], 1)
    assert (tmp_path / "good/measured.json").exists()


def test_one_process_at_a_time_works_in_a_folder(corpus, tmp_path):
    import fcntl

    (tmp_path / "run").mkdir()
    with open(tmp_path / "run/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process works in"):
            runs.do(spec(corpus, tmp_path / "run", max_iters=2))
        assert not (tmp_path / "run/log.jsonl").exists()
    assert runs.do(spec(corpus, tmp_path / "run", max_iters=2))["step"] == 2


@pytest.mark.parametrize("given, expected", [(None, str(max(1, (os.cpu_count() or 1) // 2))), ("3", "3")])
def test_threads_are_divided_unless_their_number_is_given(corpus, tmp_path, monkeypatch, given, expected):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    asked = []
    monkeypatch.setattr(runs, "start_beside", lambda one, threads: asked.append(threads) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.do_all([spec(corpus, tmp_path / "run")], 2)
    assert asked == [expected]


def test_nothing_goes_on_unseen_after_an_error(corpus, tmp_path, monkeypatch):
    started, start = [], runs.start_beside

    def second_fails(one, threads):
        if started:
            raise RuntimeError("no more processes")
        started.append(start(one, threads))
        return started[0]

    monkeypatch.setattr(runs, "start_beside", second_fails)
    with pytest.raises(RuntimeError):
        runs.do_all([spec(corpus, tmp_path / name, max_iters=10_000) for name in "ab"], 2)
    assert started[0].poll() is not None


def test_a_sweep_that_fails_does_not_cost_the_others_theirs(data, tmp_path, small_preset, monkeypatch):
    do_all = runs.do_all

    def fails_for_mixin(specs_, jobs):
        if any(one.train.prefix_mixin for one in specs_):
            raise UserError("a bad run")
        return do_all(specs_, jobs)

    monkeypatch.setattr(ablations, "do_all", fails_for_mixin)
    with pytest.raises(UserError, match="mixin: a bad run"):
        ablations.main(["mixin", "jitter", *SMALL, f"--data_dir={data}", f"--out_dir={tmp_path}/out", "--seeds=1",
                        f"--results_dir={tmp_path}/results", "--jobs=1"])
    assert (tmp_path / "results/ablations/jitter.json").exists()


def test_the_figure_shows_each_arm_with_its_interval(monkeypatch):
    from matplotlib.figure import Figure

    def arm(loss, half):
        return {"summary": {name: {"mean": loss + k, "interval": half} for k, name in enumerate(ablations.METRICS)},
                "losses": [loss, loss + 1]}

    sweep = SWEEPS["interleave"]
    results = {place: arm(number + 1.0, 0.25) for number, place in enumerate(sweep.arms)}
    figure = Figure()
    ablations.draw(figure, sweep, results)
    left, right = figure.axes
    assert left.get_xlabel() == "share of single-pass steps" and len(right.lines) == 4
    bars = {container.get_label(): container for container in left.containers}
    line, _, (segments,) = bars["interleaved, pass 2"]
    assert line.get_xydata().tolist() == [[0.5, 4.0], [0.75, 5.0]]
    assert [part[:, 1].tolist() for part in segments.get_segments()] == [[3.75, 4.25], [4.75, 5.25]]
    ablations.draw(Figure(), sweep, {place: arm(1.0, None) for place in sweep.arms})  # a single seed


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_folder_that_cannot_be_written_is_named(corpus, tmp_path, jobs):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="--out_dir=.*/file/run: .*name a folder that can be written"):
        runs.do_all([spec(corpus, tmp_path / "file/run")], jobs)


def test_ctrl_c_saves_what_runs(data, tmp_path):
    command = [sys.executable, "-m", "experiments.ablations", "interleave", *SMALL[:1], "--max_iters=4000", "--jobs=2",
               "--seeds=1", f"--data_dir={data}", f"--out_dir={tmp_path}", f"--results_dir={tmp_path}", "--device=cpu"]
    process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    until = time.time() + 60
    while len(list(tmp_path.glob("quick/*/log.jsonl"))) < 2 and time.time() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and "Traceback" not in process.stderr.read()
    outputs = [file.read_text() for file in tmp_path.glob("quick/*/output.txt")]
    assert len(outputs) == 2 and all("stopped at step" in text for text in outputs)
    assert len(list(tmp_path.glob("quick/*/ckpt.pt"))) == 2


@pytest.mark.parametrize("words, message", [
    ([], "name a sweep: detach"), (["fusoin"], "did you mean fusion"), (["fusion", "--seeds=0"], "seeds=0"),
    (["fusion", "--preset=larg"], "did you mean gpu|none of quick"), (["fusion", "--jobs=0"], "jobs=0"),
    (["fusion", "--data_dir=nowhere"], "run: python prepare.py pydocs"),
    (["fusion", "--device=gpu"], "--device=gpu: this machine has")])
def test_mistakes_are_named(words, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ablations.main([*words, f"--out_dir={tmp_path}"])


def test_the_single_run_command_needs_a_spec(tmp_path):
    with pytest.raises(UserError, match="name the folder of a run"):
        runs.main([str(tmp_path)])
    for text in ("{", "[]", '{"train": {}}'):
        (tmp_path / "spec.json").write_text(text)
        with pytest.raises(UserError, match="describes no run"):
            runs.main([str(tmp_path)])
