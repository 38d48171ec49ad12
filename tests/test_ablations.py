"""experiments/ablations: sweeps, runs, statistics, against hand numbers and loops written here."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import QUICK, SHAPE

import train as train_script
from experiments.ablations import __main__ as ablations
from experiments.ablations import arms, compare, pictures, published, runs
from experiments.ablations import spec as specs
from experiments.ablations.shapes import equal_depth, equal_hidden, n_parameters
from experiments.ablations.spec import Spec
from experiments.ablations.sweeps import EQUAL_ARM, PLAIN_ARM, SWEEPS
from harness.configurator import UserError, build, parse
from harness.data import load_meta, load_tokens
from harness.runlog import locked
from model import GPT, FusionKind, GPTConfig
from train import TrainConfig, evaluate

ROOT = Path(__file__).parents[1]
SMALL = ["--preset=quick", "--max_iters=3", "--n_windows=4", "--device=cpu"]


def spec(corpus: str, out, **settings) -> Spec:
    """A run of seconds, with settings of either config, or of the Spec."""
    config = QUICK | {"max_iters": 12, "eval_interval": 4, "data_dir": corpus, "out_dir": str(out)}
    shape = dict(SHAPE)
    how = {"n_windows": 6, "n_passes": 4}
    for name, value in settings.items():
        if name in Spec.__dataclass_fields__:
            how[name] = value
        elif name in GPTConfig.__dataclass_fields__:
            shape[name] = value
        else:
            config[name] = value
    return Spec(build(TrainConfig, config), build(GPTConfig, shape), **how)


def stop_at(monkeypatch, step: int, number: int = signal.SIGINT) -> None:
    """Makes the next training of this process get a signal in one of its steps."""
    whole = train_script.Run.train_step
    done = []

    def train_step(run):
        entry = whole(run)
        if entry["step"] == step and not done:
            done.append(step)
            os.kill(os.getpid(), number)
        return entry

    monkeypatch.setattr(train_script.Run, "train_step", train_step)


# Sweeps


def test_every_sweep_has_the_plain_models_and_its_arms():
    names = {"detach", "warmup", "interleave", "fusion", "jitter", "passes", "mixin"}
    assert set(SWEEPS) == names | {"lambda", "depth", "window"}
    for name in SWEEPS.keys() - {"depth", "window"}:
        assert SWEEPS[name].arms[PLAIN_ARM] == {"fusion": "none", "pass_mix": (1.0,)}
        assert SWEEPS[name].arms[EQUAL_ARM]["equal_parameters"]
    kinds = [kind for kind in get_args(FusionKind) if kind != "none"]
    fusion = [arm for arm in SWEEPS["fusion"].arms if arm[0]]
    assert fusion == [
        (series, kind)
        for series in ("lambda 1, 3 passes", "lambda 4, 3 passes", "lambda 4, 5 passes")
        for kind in kinds
    ]
    five = SWEEPS["fusion"].arms["lambda 4, 5 passes", "residual"]
    assert five == {"pass_mix": (0.0, 0.0, 0.0, 0.0, 1.0), "lam": 4.0, "fusion": "residual"}
    lambdas = [(kind, lam) for kind in ("gated", "residual") for lam in (0.3, 1.0, 4.0, 12.0)]
    assert [arm for arm in SWEEPS["lambda"].arms if arm[0]] == lambdas
    assert {x for _, x in SWEEPS["depth"].arms} == {1, 2, 4, 8}
    assert {series for series, _ in SWEEPS["depth"].arms} == {
        "plain", "plain, equal parameters", "gated", "residual"
    }  # fmt: skip
    windows = {x: arm["window"] for (_, x), arm in SWEEPS["window"].arms.items()}
    assert windows == {1: 1, 4: 4, 16: 16, "all": 0}
    detached = SWEEPS["detach"].arms["detached", 0.75]
    assert detached == {"pass_mix": (0.75, 0.0, 0.25), "detach": True}
    warmup = SWEEPS["warmup"].arms
    equal = [warmup["equal computation", x]["steps"] for x in (0.0, 0.25, 0.5, 0.75, "plain")]
    assert equal == pytest.approx([1, 3 / 2.5, 3 / 2, 3 / 1.5, 3])  # three passes cost three steps
    assert [arm.get("jitter") for arm in SWEEPS["jitter"].arms.values()] == [None] * 2 + [
        0.02, 0.0, 0.1
    ]  # fmt: skip
    mixes = SWEEPS["passes"].arms
    assert mixes["", "2 and 3 (22:3)"]["pass_mix"] == pytest.approx((0, 22 / 25, 3 / 25))


def test_what_an_arm_is_compared_with():
    assert SWEEPS["detach"].control_of(("detached", 0.5)) == ("not detached", 0.5)
    assert SWEEPS["detach"].control_of(("not detached", 0.5)) is None
    assert SWEEPS["lambda"].control_of(("residual", 4.0)) == ("gated", 4.0)
    fusion = SWEEPS["fusion"]
    assert fusion.control_of(("lambda 4, 5 passes", "add")) == ("lambda 4, 5 passes", "gated")
    assert fusion.control_of(("lambda 4, 5 passes", "gated")) is None
    assert fusion.control_of(PLAIN_ARM) is None
    assert fusion.baseline_of(("lambda 1, 3 passes", "add")) == EQUAL_ARM
    depth = SWEEPS["depth"]
    assert depth.baseline_of(("gated", 8)) == ("plain, equal parameters", 8)
    assert depth.baseline_of(("plain", 8)) == ("plain, equal parameters", 8)
    assert depth.control_of(("residual", 8)) == ("gated", 8)
    window = SWEEPS["window"]
    assert window.baseline_of(("gated", 4)) == ("plain, equal parameters", 4)
    assert window.control_of(("residual", "all")) == ("gated", "all")
    warmup = SWEEPS["warmup"]
    assert warmup.baseline_of(("equal steps", 0.5)) == EQUAL_ARM
    at_equal_computation = ("equal computation", "plain, equal parameters")
    assert warmup.baseline_of(("equal computation", 0.5)) == at_equal_computation
    assert warmup.baseline_of(("equal computation", "plain")) == at_equal_computation
    assert warmup.unit_of(("equal computation", 0.5)) == EQUAL_ARM  # computation 3 of its 1
    assert warmup.control_of(("equal computation", "plain")) is None
    assert warmup.control_of(("equal computation", 0.5)) == ("equal computation", 0.0)


def real_parameters(shape: GPTConfig) -> int:
    return sum(weight.numel() for weight in GPT(shape).parameters())


@pytest.mark.parametrize("file, hidden", [("ablation_laptop.toml", 288), ("demo.toml", 539)])
def test_a_plain_model_of_equal_parameters(file, hidden):
    _, shape, _ = parse([str(ROOT / "config" / file)], TrainConfig, GPTConfig)
    shape = replace(shape, vocab_size=96)
    assert equal_hidden(shape) == hidden
    gated = real_parameters(replace(shape, fusion="gated"))
    plain = real_parameters(replace(shape, fusion="none", n_hidden=hidden))
    one_channel = 3 * shape.n_embd * shape.n_layer
    assert abs(gated - plain) <= one_channel / 2
    assert n_parameters(replace(shape, fusion="gated")) == gated


@pytest.mark.parametrize("n_layer", [1, 4, 8])
def test_depths_have_equal_parameters(n_layer):
    shape = GPTConfig(vocab_size=96, n_layer=2, n_embd=96)
    changes = equal_depth(shape, n_layer)
    assert changes["n_layer"] == n_layer and changes["n_embd"] % 8 == 0
    gated = real_parameters(replace(shape, fusion="gated"))
    deeper = real_parameters(replace(shape, fusion="gated", **changes))
    assert abs(deeper - gated) <= 3 * changes["n_embd"] * n_layer / 2
    # The MLP stays within a third of the usual 8/3 of the width.
    assert 2 / 3 < changes["n_hidden"] / (changes["n_embd"] * 8 / 3) < 4 / 3
    assert equal_depth(shape, 2) == {}


# Specs and folders


@pytest.fixture
def manual(monkeypatch):
    """The metadata of the Python manual's text that the published runs were trained on."""
    sha = "0018e29f63f11d0d9adc8fe55c8b6cc2b3dc834bec6f004efc814eec1be5a774"
    for module in (arms, runs):
        monkeypatch.setattr(module, "load_meta", lambda folder: {"sha256": sha, "vocab_size": 96})


def test_finished_runs_are_found_again(manual):
    """The folders of runs that took hours: neither a name nor a hash may change."""
    settings = arms.TrainingSettings()
    fusion = SWEEPS["fusion"].arms
    made = [
        (fusion["lambda 1, 3 passes", "gated"], 1, "base-a6af7849"),
        (fusion["lambda 1, 3 passes", "gated"], 2, "seed=2-fd8d2fcb"),
        (fusion[PLAIN_ARM], 1, "fusion=none,pass_mix=1-6ffd7cde"),
        (fusion[EQUAL_ARM], 2, "fusion=none,n_hidden=288,pass_mix=1,seed=2-25c68d1f"),
        (fusion["lambda 1, 3 passes", "residual"], 1, "fusion=residual-9d70eb75"),
        (fusion["lambda 4, 5 passes", "gated"], 1, "lam=4.0,pass_mix=0-0-0-0-1-0ccf912d"),
        (SWEEPS["lambda"].arms["residual", 0.3], 3, "fusion=residual,lam=0.3,seed=3-f96d1db3"),
        (SWEEPS["depth"].arms["gated", 2], 1, "base-a6af7849"),
        (SWEEPS["depth"].arms["plain, equal parameters", 2], 1,
         "fusion=none,n_hidden=288,pass_mix=1-5a98beaa"),
    ]  # fmt: skip
    for arm, seed, folder in made:
        out = arms.spec_of(arm, seed, settings).train.out_dir
        assert out == f"out/ablations/laptop/{folder}"


def test_a_run_is_identified_by_what_decides_its_numbers(corpus, tmp_path):
    one = spec(corpus, tmp_path)
    same = ({"eval_interval": 7}, {"log_interval": 3}, {"device": "auto"}, {"recompute": True})
    for settings in same:
        assert runs.identity(spec(corpus, tmp_path, **settings)) == runs.identity(one)
    assert runs.identity(replace(one, keep=True)) == runs.identity(one)
    other = ({"seed": 2}, {"lam": 2.0}, {"n_embd": 16}, {"n_windows": 5}, {"patience": 2},
             {"init_from": "somewhere/base-12345678"})  # fmt: skip
    for settings in other:
        assert runs.identity(spec(corpus, tmp_path, **settings)) != runs.identity(one)
    patient = spec(corpus, tmp_path, patience=2)  # then the evaluations are the numbers
    often = spec(corpus, tmp_path, patience=2, eval_interval=7)
    assert runs.identity(patient) != runs.identity(often)


def test_every_arm_is_a_run_of_its_own_and_equal_arms_are_one(data, tmp_path):
    settings = build(
        arms.TrainingSettings, {"data_dir": data, "out_dir": str(tmp_path), "preset": "quick"}
    )
    made = {}
    for name in SWEEPS:
        for arm, changes in SWEEPS[name].arms.items():
            made[name, arm] = arms.spec_of(changes, 2, settings)
    base = made["detach", ("not detached", 0.0)]
    assert base.train.pass_mix == (0, 0, 1)
    assert base.train.seed == 2 and base.train.max_iters == 200
    same = [
        ("warmup", ("equal steps", 0.0)), ("warmup", ("equal computation", 0.0)),
        ("fusion", ("lambda 1, 3 passes", "gated")), ("jitter", ("", "0.02")),
        ("passes", ("", "3")), ("mixin", ("", "0")), ("lambda", ("gated", 1.0)),
        ("depth", ("gated", 2)), ("window", ("gated", "all")),
    ]  # fmt: skip
    assert all(made[arm] == base for arm in same)
    # 2 plain ones; 8 of detach; of warmup 5 more at equal computation; 2 interleaved; 14 more
    # fusions; 2 jitters; 4 mixes of passes; 2 shares of mixin; 4 more lambdas (1 and 4 are among
    # the fusions); 3 more depths of 4 kinds; 3 windows of 4 kinds
    folders = {spec.train.out_dir for spec in made.values()}
    assert len(folders) == 2 + 8 + 5 + 2 + 14 + 2 + 4 + 2 + 4 + 12 + 12
    assert made["warmup", ("equal computation", 0.5)].train.max_iters == 300
    assert "detach=true" in made["detach", ("detached", 0.5)].train.out_dir
    shutil.copytree(data, tmp_path / "same")
    moved = arms.spec_of({}, 2, replace(settings, data_dir=str(tmp_path / "same")))
    assert moved.train.out_dir == base.train.out_dir
    other = tmp_path / "other/pydocs"
    shutil.copytree(Path(data) / "pydocs", other)
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"sha256": "0" * 64}))
    changed = arms.spec_of({}, 2, replace(settings, data_dir=str(tmp_path / "other")))
    assert changed.train.out_dir != base.train.out_dir


# Statistics


def test_holm_by_hand():
    # in order 0.005 <= 0.05/4, 0.01 <= 0.05/3, but 0.03 > 0.05/2, so 0.04 stays too
    assert compare.holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert compare.holm([0.04, 0.01]) == [True, True]
    assert compare.holm([]) == []
    assert compare.holm([math.nan, 0.5, 0.001]) == [False, False, True]
    assert compare.holm([math.nan, math.nan]) == [False, False]


def run_of(losses, **modes) -> dict:
    return {"losses": losses, "compute_tokens": 10} | modes


def test_paired_differences_by_hand():
    numbers = compare.difference([1.0, 2.0], [0.5, 1.0])
    # two pairs, 0.5 and 1.0: half of Student's interval is 12.706 * 0.3536 / sqrt(2)
    assert numbers["mean"] == pytest.approx(0.75)
    assert numbers["interval"] == pytest.approx(12.7062 * 0.25, rel=1e-4)
    # t = 0.75 / 0.25 = 3 with one degree of freedom: p = 1 - 2 atan(3) / pi
    assert numbers["p"] == pytest.approx(1 - 2 * np.arctan(3) / np.pi, rel=1e-6)
    alone = compare.difference([1.0], [0.5])
    assert alone["interval"] is None and alone["p"] is None and alone["mean"] == 0.5
    equal = compare.difference([1.0, 2.0], [0.5, 1.5])  # not a single one: certain, as far as told
    assert equal == {"mean": 0.5, "interval": 0.0, "p": 0.0, "seeds": 2}
    nothing = compare.difference([1.0, 2.0], [1.0, 2.0])
    assert nothing == {"mean": 0.0, "interval": 0.0, "p": 1.0, "seeds": 2}
    ours = {1: run_of([1.0], standard=3.0), 3: run_of([1.0], standard=5.0)}
    theirs = {2: run_of([1.0], standard=9.0), 3: run_of([1.0], standard=4.0)}
    common = compare.paired(ours, theirs, "Soft")  # a plain model's Soft is its Standard
    assert common["mean"] == 1.0 and common["seeds"] == 1
    assert compare.paired({1: ours[1]}, {2: theirs[2]}, "Soft") is None


def test_a_single_seed_needs_no_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert compare.difference([1.0], [0.5])["mean"] == 0.5
    with pytest.raises(ImportError):
        compare.difference([1.0, 2.0], [0.5, 1.0])


def test_computation_is_a_ratio_of_means():
    ours = {1: {"compute_tokens": 10}, 2: {"compute_tokens": 30}}
    plain = {1: {"compute_tokens": 4}, 3: {"compute_tokens": 12}}
    assert compare.computation(ours, plain) == 20 / 8
    assert compare.computation(ours, {}) is None


def test_a_runs_losses_by_name():
    many = run_of([float(k) for k in range(101)], standard=0.1, soft=0.2, fused=0.3)
    losses = compare.losses_of(many)
    assert [losses[name] for name in ("pass 1", "pass 2", "pass 4")] == [0, 1, 3]
    assert losses["32 feedback passes"] == 32
    assert [losses[mode] for mode in ("Standard", "Soft", "Fused")] == [0.1, 0.2, 0.3]
    plain = compare.losses_of(run_of([7.0], standard=0.5))
    assert plain["32 feedback passes"] == 7 and plain["Fused"] == 0.5


def test_marks_are_over_the_table():
    differences = [{"p": 0.02}, None, {"p": 0.04}, {"p": None}]
    assert compare.mark_survivors(differences) == 2
    assert [numbers["holm"] for numbers in differences if numbers] == [True, True, False]
    assert compare.mark_survivors([{"p": 0.03}, {"p": 0.04}]) == 2


def test_start_penalty_by_hand():
    soft = [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]
    plain = [1.0, 1.0, 1.0, 1.0, 1.5, 1.1]
    ours = {1: {"by_position": {"soft": soft}}}
    theirs = {1: {"by_position": {"standard": plain}}}
    numbers = compare.start_penalty(ours, theirs)
    assert numbers == {"start": pytest.approx(1.0), "rest": pytest.approx(-0.3)}
    assert compare.start_penalty(ours, {2: theirs[1]}) == {}
    assert compare.start_penalty({1: {}}, theirs) == {}


def test_cells_of_differences():
    numbers = {"mean": -0.05, "interval": 0.0123, "holm": True}
    assert compare.cell(numbers) == "-0.050 ± 0.012*"
    assert compare.cell(numbers | {"interval": None, "holm": False}) == "-0.050"
    assert compare.cell(None) == ""


# A whole sweep


def cells_of(line: str) -> list[str]:
    """The cells of a printed table's row."""
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


@pytest.fixture
def words(data, tmp_path, small_preset) -> list[str]:
    folders = [f"--data_dir={data}", f"--out_dir={tmp_path}/out"]
    return [*SMALL, *folders, f"--results_dir={tmp_path}/results", "--jobs=1"]


def test_a_sweep_ends_in_tables_json_and_picture(words, tmp_path, capsys, monkeypatch):
    assert ablations.main(["mixin", *words, "--seeds=2"]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "results/ablations/mixin.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "results/ablations/mixin.json").read_text())
    results = {arm["x"]: arm for arm in result["arms"]}
    assert list(results) == ["plain", "plain, equal parameters", "0", "0.5", "1"]
    folders = sorted(Path(tmp_path, "out/quick").iterdir())
    by_arm = {"plain, equal parameters": "n_hidden", "1": "prefix_mixin=1"}
    for arm, part in by_arm.items():
        by_arm[arm] = [
            json.loads((folder / "measured.json").read_text())
            for folder in sorted(folders, key=lambda folder: "seed=2" in folder.name)
            if part in folder.name
        ]
    ours, plain = by_arm["1"], by_arm["plain, equal parameters"]
    assert len(ours) == 2 and len(plain) == 2
    assert len(ours[0]["losses"]) == 101 and len(plain[0]["losses"]) == 1
    arm = results["1"]
    assert arm["means"]["Soft"] == pytest.approx(np.mean([run["soft"] for run in ours]))
    assert arm["losses"][5] == pytest.approx(np.mean([run["losses"][5] for run in ours]))
    pairs = [run["soft"] - theirs["standard"] for run, theirs in zip(ours, plain, strict=True)]
    numbers = arm["to plain, equal parameters"]["Soft"]
    assert numbers["mean"] == pytest.approx(np.mean(pairs))
    half = 12.7062 * abs(pairs[0] - pairs[1]) / 2
    assert numbers["interval"] == pytest.approx(half, rel=1e-4)
    assert f"{numbers['mean']:+.3f} ± {numbers['interval']:.3f}" in out
    minus_control = arm["means"]["Soft"] - results["0"]["means"]["Soft"]
    assert arm["to the control"]["Soft"]["mean"] == pytest.approx(minus_control)
    assert arm["computation"] == pytest.approx(3) and results["plain"]["computation"] == 1
    assert "| 3.00 " in out and "not corrected" in out and "Holm" in out
    assert results["plain, equal parameters"]["to plain, equal parameters"] == {}
    assert result["tested"] == 2 + 9 + 2 - 1  # plain: once; 3 arms by mode; 2 to their control

    def refuse(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(runs, "train", refuse)
    monkeypatch.setattr(ablations, "draw", lambda *_: None)  # a second picture shows nothing new
    assert ablations.main(["mixin", *words, "--seeds=2"]) == 0  # all runs are there
    again = json.loads((tmp_path / "results/ablations/mixin.json").read_text())
    assert again["arms"] == result["arms"]
    assert not list(Path(tmp_path, "out").rglob("ckpt.pt"))
    first = {}
    for folder in folders:
        lines = (folder / "log.jsonl").read_text().splitlines()
        first[folder.name] = json.loads(lines[0])["val_losses"][0]
    mixins = {loss for name, loss in first.items() if "seed=2" in name and "n_hidden" not in name}
    assert len(mixins) == 1  # a seed: the same initial weights but the fusion's


def test_a_control_with_fewer_seeds_is_told(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ablations, "draw", lambda *_: None)
    assert ablations.main(["mixin", *words, "--seeds=2"]) == 0
    folders = Path(tmp_path, "out/quick").iterdir()
    shutil.rmtree(next(found for found in folders if re.fullmatch(r"seed=2-\w+", found.name)))
    capsys.readouterr()
    assert ablations.main(["mixin", *words, "--seeds=2", "--train=false"]) == 0
    rows = {row[0]: row for row in map(cells_of, capsys.readouterr().out.splitlines()) if row}
    assert rows["1"][1] == "2" and rows["1"][5].endswith(" (1 seeds)")


def test_published_runs_are_not_trained_again(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ablations, "draw", lambda *_: None)  # pictures take a second each
    assert ablations.main(["jitter", *words, "--seeds=1"]) == 0
    first = json.loads((tmp_path / "results/ablations/jitter.json").read_text())
    files = sorted((tmp_path / "results/ablations/runs").iterdir())
    assert [file.stem for file in files] == sorted(
        folder.name for folder in Path(tmp_path, "out/quick").iterdir()
    )
    no_jitter = next(file for file in files if file.name.startswith("jitter=0"))
    no_jitter.unlink()

    trained = []
    train = runs.train

    def counted(config, shape):
        trained.append(config.jitter)
        return train(config, shape)

    monkeypatch.setattr(runs, "train", counted)
    monkeypatch.setattr(
        ablations, "take", lambda specs: published.take(specs, tmp_path / "results")
    )
    shutil.rmtree(tmp_path / "out")
    capsys.readouterr()
    assert ablations.main(["jitter", *words, "--seeds=1", "--published"]) == 0
    assert "4 of 5 runs are taken" in capsys.readouterr().err
    assert trained == [0.0]
    again = json.loads((tmp_path / "results/ablations/jitter.json").read_text())
    assert [arm["means"] for arm in again["arms"]] == [
        pytest.approx(arm["means"], abs=1e-5) for arm in first["arms"]
    ]
    assert no_jitter.exists()  # published again

    # A run with another setting is not taken for a published one.
    shutil.rmtree(tmp_path / "out")
    trained.clear()
    shorter = [word.replace("--max_iters=3", "--max_iters=2") for word in words]
    ablations.main(["jitter", *shorter, "--seeds=1", "--published"])
    assert "0 of 5 runs are taken" in capsys.readouterr().err
    assert len(trained) == 5


def test_published_runs_are_looked_for_in_the_project():
    assert published.take.__defaults__ == (ROOT / "results",)
    spec = Spec(replace(TrainConfig(), out_dir="out/a/NAME"), GPTConfig(), 4, 4)
    assert published.place(spec, ROOT / "results") == ROOT / "results/ablations/runs/NAME.json"


def test_numbers_are_published_with_seven_digits():
    numbers = {"losses": [1.23456789123, 2.5], "step": 800, "by_position": {"soft": [1e-9 / 3]}}
    short = {"losses": [1.234568, 2.5], "step": 800, "by_position": {"soft": [3.333333e-10]}}
    assert published.shortened(numbers) == short


def test_what_is_finished_is_reported_without_training(words, tmp_path, capsys, monkeypatch):
    with pytest.raises(UserError, match="jitter: no finished run .* leave out --train=false"):
        ablations.main(["jitter", *words, "--train=false"])
    settings, _ = parse(words, arms.TrainingSettings, positional="sweep")
    jitter = SWEEPS["jitter"].arms
    some = [(EQUAL_ARM, 1), (EQUAL_ARM, 2), (("", "0.02"), 2), (("", "0.0"), 1)]
    for arm, seed in some:
        runs.do_run(arms.spec_of(jitter[arm], seed, settings))
    monkeypatch.setattr(runs, "train", None)
    capsys.readouterr()
    assert ablations.main(["jitter", *words, "--train=false"]) == 0
    assert "no finished run yet: plain; 0.1" in capsys.readouterr().out
    result = json.loads((tmp_path / "results/ablations/jitter.json").read_text())
    assert [arm["seeds"] for arm in result["arms"]] == [[1, 2], [2], [1]]
    no_jitter = result["arms"][2]
    assert no_jitter["to the control"]["Soft"] is None  # no seed in common
    assert no_jitter["to plain, equal parameters"]["Soft"]["seeds"] == 1


def test_a_sweep_that_fails_does_not_cost_the_others_theirs(words, tmp_path, monkeypatch):
    do_runs = runs.do_runs

    def fails_for_mixin(all_specs, jobs):
        if any(one.train.prefix_mixin for one in all_specs):
            raise UserError("a bad run")
        return do_runs(all_specs, jobs)

    monkeypatch.setattr(arms, "do_runs", fails_for_mixin)
    with pytest.raises(UserError, match="mixin: a bad run"):
        ablations.main(["mixin", "jitter", *words, "--seeds=1"])
    assert (tmp_path / "results/ablations/jitter.json").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name a sweep: detach"),
        (["fusoin"], "did you mean fusion"),
        (["fusion", "--seeds=0"], "--seeds=0"),
        (["fusion", "--preset=larg"], "'larg' is not one of quick, laptop, gpu"),
        (["fusion", "--jobs=0"], "--jobs=0"),
        (["fusion", "--max_iters=-1"], "--max_iters=-1"),
        (["fusion", "--data_dir=nowhere"], "python prepare.py pydocs"),
        (["fusion", "--device=gpu"], "--device=gpu: this machine has"),
    ],
)
def test_mistakes_are_named(words, message, data, tmp_path):
    if not any(word.startswith("--data_dir") for word in words):
        words = [*words, f"--data_dir={data}"]
    with pytest.raises(UserError, match=message):
        ablations.main([*words, f"--out_dir={tmp_path}"])


def test_the_package_speaks_under_its_own_name():
    def said(*words):
        command = [sys.executable, "-m", "experiments.ablations", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    mistake = said("fusoin")
    assert mistake.stderr.startswith("experiments.ablations: unknown sweep 'fusoin'")
    assert said("--help").stdout.startswith("usage: python -m experiments.ablations [-h]")


# Pictures


def result_of(loss: float, half: float | None, plain: bool = False) -> dict:
    names = ("Standard", "Soft", "Fused")
    pairs = {name: {"mean": loss + k, "interval": half} for k, name in enumerate(names)}
    return {
        "to plain, equal parameters": pairs,
        "means": {name: loss + k for k, name in enumerate(names)},
        "losses": [loss] if plain else [loss, loss + 1],
    }


@pytest.mark.parametrize("half", [0.25, None])
def test_the_dots_are_differences_with_their_intervals(half):
    from matplotlib.figure import Figure

    sweep = SWEEPS["interleave"]
    results = {}
    for number, arm in enumerate(sweep.arms):
        results[arm] = result_of(number, half, plain=arm in (PLAIN_ARM, EQUAL_ARM))
    figure = Figure()
    pictures.draw(figure, sweep, results)
    dots, staged, interleaved = figure.axes
    labels = [text.get_text() for text in dots.get_yticklabels()]
    assert labels[:3] == ["plain", "plain, equal parameters", "staged, 0.5"]
    bars = {}
    for container in dots.containers:
        x, y = container.lines[0].get_xydata()[0]
        assert container.lines[0].get_linestyle() == "None"  # no lines between categories
        bars.setdefault(round(y), []).append((x, container))
    assert [x for x, _ in bars[0]] == [0]  # plain: one point
    assert [x for x, _ in bars[1]] == [0]
    assert [x for x, _ in bars[3]] == [3, 4, 5]
    if half:
        (segments,) = bars[3][1][1].lines[2]
        assert segments.get_segments()[0][:, 0].tolist() == [3.75, 4.25]
    assert len(staged.lines) == 2 + 2 and len(interleaved.lines) == 2 + 2
    assert staged.get_title() == "staged"


def test_a_series_of_equal_computation_has_its_own_plain_levels():
    from matplotlib.figure import Figure

    sweep = SWEEPS["warmup"]
    results = {}
    for number, arm in enumerate(sweep.arms):
        results[arm] = result_of(number, 0.1, plain="plain" in str(arm[1]))
    own = ("equal computation", "plain, equal parameters")
    results[own]["to plain, equal parameters"] = {}
    figure = Figure()
    pictures.draw(figure, sweep, results)
    dots, equal_steps, equal_computation = figure.axes

    def levels(panel):
        return {line.get_linestyle(): line.get_ydata()[0] for line in panel.lines[-2:]}

    assert levels(equal_steps) == {":": 0, "--": 1}
    assert levels(equal_computation) == {":": len(results) - 2, "--": len(results) - 1}
    last = dots.containers[-1].lines[0].get_xydata()[0]
    assert last.tolist() == [0, len(results) - 1]  # that baseline's own point


def test_the_frontier_and_the_lines_are_drawn_against_numbers():
    from matplotlib.figure import Figure

    sweep = SWEEPS["lambda"]
    results = {arm: result_of(1.0, None, plain=not arm[0]) for arm in sweep.arms}
    results["gated", 12.0] = result_of(2.0, None)
    figure = Figure()
    pictures.draw(figure, sweep, results)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines["gated: Soft"].get_xydata().tolist() == [[1, 2]] * 3 + [[2, 3]]
    assert lines["plain, equal parameters"].get_xydata().tolist() == [[1, 1]]
    sweep = SWEEPS["depth"]
    results = {arm: result_of(arm[1], 0.5, plain="plain" in arm[0]) for arm in sweep.arms}
    figure = Figure()
    pictures.draw(figure, sweep, results)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines["residual: Soft"].get_xydata().tolist() == [[0, 2], [1, 3], [2, 5], [3, 9]]
    assert lines["plain"].get_xydata().tolist() == [[0, 1], [1, 2], [2, 4], [3, 8]]
    figure.canvas.draw()
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["1", "2", "4", "8"]


# What is measured of a run


def test_measured_losses_and_modes_of_a_run(corpus, tmp_path, monkeypatch):
    kept = {}
    load_model = specs.load_model

    def load_and_keep(*args):
        return kept.setdefault("model", load_model(*args))

    monkeypatch.setattr(specs, "load_model", load_and_keep)
    numbers = runs.do_run(spec(corpus, tmp_path / "run", n_windows=3, n_passes=3))
    model = kept["model"][0]
    folder = Path(corpus) / "tiny"
    tokens = load_tokens(folder, "val", load_meta(folder))
    assert numbers["losses"] == pytest.approx(evaluate(model, tokens, 3, 4, batch_size=2), rel=1e-5)
    starts = [0, (len(tokens) - 17) // 2, len(tokens) - 17]
    rows = torch.tensor([tokens[start : start + 17].astype(int).tolist() for start in starts])
    idx, targets = rows[:, :-1], rows[:, 1:]
    for mode in ("standard", "soft", "fused"):
        losses = losses_after_half(model, idx, targets, mode)
        assert numbers["by_position"][mode] == pytest.approx(losses, rel=1e-4)
        assert numbers[mode] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    plain = runs.do_run(spec(corpus, tmp_path / "plain", fusion="none", pass_mix=(1.0,)))
    assert len(plain["losses"]) == 1 and "standard" in plain
    assert not {"soft", "share"} & set(plain) and set(plain["by_position"]) == {"standard"}


@torch.no_grad()
def losses_after_half(model: GPT, idx, targets, mode: str) -> list[float]:
    """A mode's loss at positions 8 to 15, token by token and without a cache."""
    e = model.embed(idx)
    u = [e[:, t] for t in range(8)]
    h = model.stack(torch.stack(u, 1))
    if mode == "fused":
        for t in range(1, 8):
            u[t] = model.fusion(h[:, t - 1], e[:, t], model.input_norm(e[:, t]))
        h = model.stack(torch.stack(u, 1))
    state = h[:, -1]
    losses = []
    for t in range(8, 16):
        fused = model.fusion(state, e[:, t], model.input_norm(e[:, t]))
        u.append(e[:, t] if mode == "standard" else fused)
        state = model.stack(torch.stack(u, 1))[:, -1]
        losses.append(float(F.cross_entropy(model.head(state), targets[:, t])))
    return losses


@pytest.mark.parametrize("kind", ["gated", "add"])
def test_state_share_by_loops(kind):
    torch.manual_seed(0)
    model = GPT(build(GPTConfig, SHAPE | {"fusion": kind, "vocab_size": 5})).eval()
    rows = torch.randint(4, (3, 9))  # one symbol never occurs
    idx, targets = rows[:, :-1], rows[:, 1:]
    numbers = specs.state_share(model, idx, targets)
    with torch.no_grad():
        e = model.embed(idx)
        norm_e = model.input_norm(e)
        h = model.stack(e)
        u = {}
        for row in range(3):
            for t in range(1, 8):
                u[row, t] = model.fusion(h[row, t - 1], e[row, t], norm_e[row, t])

        def spread(places):
            centre = sum(u[place] for place in places) / len(places)
            return sum(float((u[place] - centre) @ (u[place] - centre)) for place in places)

        within = 0.0
        for token in range(4):
            within += spread([place for place in u if idx[place] == token])
        assert numbers["share"] == pytest.approx(within / spread(list(u)), rel=1e-4)
        mean = sum(h[row, t] for row in range(3) for t in range(8)) / 24
        inputs = e.clone()
        for row in range(3):
            for t in range(1, 8):
                inputs[row, t] = model.fusion(mean, e[row, t], norm_e[row, t])
        logits = model.head(model.stack(inputs)).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten())
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


def test_a_run_of_an_old_default_is_not_taken_for_one_of_the_new(corpus, tmp_path):
    one = spec(corpus, tmp_path / "run")
    numbers = runs.do_run(one)
    kept = json.loads((tmp_path / "run/measured.json").read_text())
    assert kept["settings"]["pass_mix"] == list(one.train.pass_mix)
    assert kept["settings"]["rope_base"] == one.model.rope_base
    assert "out_dir" not in kept["settings"]
    free = replace(one, train=replace(one.train, log_interval=3, recompute=True))
    assert runs.numbers_of(free) == numbers
    for name, value in (("weight_decay", 0.5), ("rope_base", 5.0), ("pass_mix", [0.5, 0.5])):
        kept["settings"][name] = value
        (tmp_path / "run/measured.json").write_text(json.dumps(kept))
        with pytest.raises(UserError) as caught:
            runs.do_runs([one], 1)
        message = str(caught.value)
        assert f"run was trained with {name}={value}," in message and "delete" in message
        del kept["settings"][name]  # a setting that did not exist yet
    kept["settings"]["abandoned"] = 1
    (tmp_path / "run/measured.json").write_text(json.dumps(kept))
    runs.do_runs([one], 1)
    assert runs.numbers_of(one) == kept


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("data", {"sha256": "", "tokenizer": {}, "train_tokens": 1, "val_tokens": 2}, "data="),
        ("precision", "bfloat16", "precision=bfloat16, and it is float32 now"),
        ("measured_as", 0, "measured_as=0, and it is 1 now"),
    ],
)
def test_a_run_made_otherwise_is_neither_reported_nor_taken(
    name, value, message, corpus, tmp_path
):
    one = spec(corpus, tmp_path / "run")
    numbers = runs.do_run(one)
    assert numbers["settings"]["precision"] == "float32"
    assert numbers["settings"]["data"]["train_tokens"] == 18_000
    published.publish(one, numbers, tmp_path / "results")
    (tmp_path / "run/measured.json").unlink()
    assert published.take([one], tmp_path / "results") == 1
    assert runs.numbers_of(one)["losses"] == pytest.approx(numbers["losses"], rel=1e-6)
    numbers["settings"][name] = value
    runs.keep_numbers(one, numbers)
    with pytest.raises(UserError, match=message):
        runs.numbers_of(one)
    published.publish(one, numbers, tmp_path / "results")
    (tmp_path / "run/measured.json").unlink()
    assert published.take([one], tmp_path / "results") == 0
    assert runs.numbers_of(one) is None


# Many runs


def test_an_interrupted_run_continues_and_ends_as_if_never_stopped(corpus, tmp_path, monkeypatch):
    whole = runs.do_run(spec(corpus, tmp_path / "whole"))
    part = spec(corpus, tmp_path / "part")
    stop_at(monkeypatch, 5)
    assert runs.do_run(part) is None and (tmp_path / "part/ckpt.pt").exists()
    assert runs.numbers_of(part) is None
    assert runs.do_run(part)["losses"] == whole["losses"]
    assert runs.numbers_of(part)["step"] == 12
    killed = tmp_path / "killed"  # before its first checkpoint
    killed.mkdir()
    (killed / "log.jsonl").write_text('{"step": 1, "losses": [1.0]}\n')
    assert runs.do_run(spec(corpus, killed))["losses"] == whole["losses"]


def test_runs_side_by_side_and_a_failure_that_waits_for_the_others(corpus, tmp_path, capsys):
    good = []
    for name, seed in (("a", 1), ("b", 2)):
        good.append(spec(corpus, tmp_path / name, max_iters=2, seed=seed))
    bad = spec(corpus, tmp_path / "bad", max_iters=2, learning_rate=1e30, warmup_iters=0)
    message = "1 of the runs failed, the first: .*/bad: .*not finite"
    with pytest.raises(UserError, match=message):
        runs.do_runs([bad, *good, good[0]], 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[-1].endswith("(runs to go: 0)")
    assert any("/bad: " in line for line in lines)
    runs.do_runs(good, 2)
    assert [runs.numbers_of(one)["step"] for one in good] == [2, 2]
    assert "step" in (tmp_path / "a/output.txt").read_text()
    alone = replace(good[0], train=replace(good[0].train, out_dir=str(tmp_path / "alone")))
    assert runs.do_run(alone)["losses"] == runs.numbers_of(good[0])["losses"]


def test_a_failure_in_this_process_waits_for_the_others_too(corpus, tmp_path):
    bad = spec(corpus, tmp_path / "bad", max_iters=2, learning_rate=1e30, warmup_iters=0)
    with pytest.raises(UserError, match="1 of the runs failed, the first: .*not finite"):
        runs.do_runs([bad, spec(corpus, tmp_path / "good", max_iters=2)], 1)
    assert (tmp_path / "good/measured.json").exists()


def test_one_process_at_a_time_works_in_a_folder(corpus, tmp_path):
    one = spec(corpus, tmp_path / "run", max_iters=2)
    holder = (
        "import sys; from pathlib import Path; from harness.runlog import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "run")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another process"):
        runs.do_run(one)
    assert not (tmp_path / "run/log.jsonl").exists()
    process.communicate("")
    with locked(tmp_path / "run"):
        pass
    assert runs.do_run(one)["step"] == 2


@pytest.mark.parametrize("given", [None, "3"])
def test_threads_are_divided_unless_their_number_is_given(corpus, tmp_path, monkeypatch, given):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    asked = []

    def ask(one, threads):
        asked.append(threads)
        raise ZeroDivisionError

    monkeypatch.setattr(runs, "start_beside", ask)
    with pytest.raises(ZeroDivisionError):
        runs.do_runs([spec(corpus, tmp_path / "run")], 2)
    assert asked == [given or str(max(1, (os.cpu_count() or 1) // 2))]


def test_nothing_continues_unseen_after_an_error(corpus, tmp_path, monkeypatch):
    started = []
    start = runs.start_beside

    def second_fails(one, threads):
        if started:
            raise RuntimeError("no more processes")
        started.append(start(one, threads))
        return started[0]

    monkeypatch.setattr(runs, "start_beside", second_fails)
    with pytest.raises(RuntimeError):
        runs.do_runs([spec(corpus, tmp_path / name, max_iters=10_000) for name in "ab"], 2)
    assert started[0].poll() is not None


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_folder_that_cannot_be_written_is_named(corpus, tmp_path, jobs):
    (tmp_path / "file").write_text("in the way")
    message = "--out_dir=.*/file/run: .*name a folder that can be written"
    with pytest.raises(UserError, match=message):
        runs.do_runs([spec(corpus, tmp_path / "file/run")], jobs)


def test_ctrl_c_saves_what_runs(data, tmp_path):
    command = [sys.executable, "experiments/ablations", "interleave", "--preset=quick"]
    command += ["--max_iters=4000", "--jobs=2", "--seeds=1", "--device=cpu"]
    command += [f"--data_dir={data}", f"--out_dir={tmp_path}", f"--results_dir={tmp_path}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )

    def training() -> int:
        logs = tmp_path.glob("quick/*/log.jsonl")
        return sum('"losses"' in log.read_text() for log in logs)

    until = time.time() + 100
    while training() < 2 and time.time() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and "Traceback" not in process.stderr.read()
    outputs = [file.read_text() for file in tmp_path.glob("quick/*/output.txt")]
    assert len(outputs) == 2 and all("stopped at step" in text for text in outputs)
    assert len(list(tmp_path.glob("quick/*/ckpt.pt"))) == 2


def test_the_single_run_command_needs_a_spec(tmp_path):
    with pytest.raises(UserError, match="name the folder of a run"):
        runs.main([str(tmp_path)])
    for text in ("{", "[]", '{"train": {}}'):
        (tmp_path / "spec.json").write_text(text)
        with pytest.raises(UserError, match="does not describe a run"):
            runs.main([str(tmp_path)])
