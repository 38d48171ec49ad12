"""experiments/data_efficiency.py: patience, the curve and its inversion, against hand numbers."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import configs

import train as train_script
from experiments import data_efficiency as efficiency
from experiments.ablations import patient, runs
from experiments.ablations.spec import Spec
from harness.configurator import UserError
from harness.data import load_meta, load_tokens

# Patience


@pytest.mark.parametrize(
    "losses, patience, expected",
    [
        ([[3, 3], [2, 2], [2.1, 2.2], [2.2, 2.1]], 2, True),
        ([[3, 3], [2, 2], [2.1, 2.2], [2.2, 1.9]], 2, False),  # the second pass still improves
        ([[3, 3], [2, 2], [2.1, 2.2]], 2, False),
        ([], 1, False),
    ],
)
def test_no_better_waits_for_every_pass(losses, patience, expected):
    assert patient.no_better(losses, patience) is expected


def patient_spec(corpus, out) -> Spec:
    """A run whose rate is so high that it soon stops to improve."""
    config, shape = configs(
        corpus, out, max_iters=400, learning_rate=0.1, eval_interval=2, eval_passes=2, cooldown=0.0
    )
    return Spec(config, shape, n_windows=8, n_passes=1, patience=3)


def test_patience_ends_a_run_and_its_best_evaluations_count(corpus, tmp_path):
    numbers = runs.do_run(patient_spec(corpus, tmp_path / "run"))
    losses = patient.evaluations(str(tmp_path / "run"))
    assert numbers["step"] < 400 and numbers["finished"] and numbers["commit"]
    assert len(losses) == numbers["step"] / 2 + 1
    last_best = max(int(np.argmin([pair[k] for pair in losses])) for k in (0, 1))
    assert len(losses) - 1 - last_best == 3
    assert numbers["losses"] == [min(pair[k] for pair in losses) for k in (0, 1)]


def test_a_patient_run_that_was_stopped_ends_as_if_it_never_was(corpus, tmp_path, monkeypatch):
    whole = runs.do_run(patient_spec(corpus, tmp_path / "whole"))
    part = patient_spec(corpus, tmp_path / "part")
    train_step = train_script.Run.train_step
    stops = [3, 4]  # between two evaluations, and right before one

    def stopped_in(run):
        entry = train_step(run)
        if stops and entry["step"] == stops[0]:
            del stops[0]
            os.kill(os.getpid(), signal.SIGTERM)
        return entry

    monkeypatch.setattr(train_script.Run, "train_step", stopped_in)
    assert runs.do_run(part) is None
    assert runs.do_run(part) is None
    again = runs.do_run(part)
    assert (again["losses"], again["step"]) == (whole["losses"], whole["step"])
    assert patient.evaluations(part.train.out_dir) == patient.evaluations(str(tmp_path / "whole"))


def test_a_patient_run_that_replaces_another_begins_without_its_losses(corpus, tmp_path):
    old = patient_spec(corpus, tmp_path)
    train_script.train(replace(old.train, learning_rate=1e-3, max_iters=4), old.model)
    assert len(patient.evaluations(str(tmp_path))) == 3
    new = replace(old.train, overwrite=True, max_iters=4, seed=2, eval_interval=4)
    best = patient.train_patiently(new, old.model, patience=100)["best"]
    losses = patient.evaluations(str(tmp_path))
    assert len(losses) == 2 and not (tmp_path / "log.new.jsonl").exists()
    assert best == np.min(losses, axis=0).tolist()


# Texts


def test_first_tokens_are_the_first(data, tmp_path):
    name = efficiency.first_tokens(data, "pydocs", 1000, tmp_path)
    meta = load_meta(tmp_path / name)
    whole = load_meta(Path(data) / "pydocs")
    assert name == "pydocs_1000" and meta["sha256"] != whole["sha256"]
    train = load_tokens(tmp_path / name, "train", meta)
    everything = load_tokens(Path(data) / "pydocs", "train", whole)
    assert train.tolist() == everything[:1000].tolist()
    val = (tmp_path / name / "val.bin").read_bytes()
    assert val == Path(data, "pydocs/val.bin").read_bytes()
    with pytest.raises(UserError, match="18000 tokens to train on, and 18001 .* longer text"):
        efficiency.first_tokens(data, "pydocs", 18001, tmp_path)


@pytest.mark.parametrize("preset", ["quick", "laptop", "gpu"])
def test_texts_are_close_and_the_recipes_have_room_on_both_sides(preset):
    sizes = efficiency.texts(efficiency.Settings(preset=preset))
    for smaller, larger in zip(sizes, sizes[1:], strict=False):
        assert larger / smaller == pytest.approx(1.25, rel=1e-3)
    for place in efficiency.RECIPES_AT:
        assert sizes[-1] / sizes[place] > 1.9 and sizes[0] / sizes[place] < 0.81


def test_what_a_run_is(data, tmp_path):
    settings = efficiency.Settings(
        data_dir=data, out_dir=str(tmp_path), preset="quick", passes=5, fusion="add"
    )
    arms = efficiency.recipes(settings)
    assert list(arms) == [
        "plain, equal parameters", "gated, lambda 1, 3 passes (the paper's)",
        "add, lambda 4, 5 passes",
    ]  # fmt: skip
    one = efficiency.spec_of(arms["add, lambda 4, 5 passes"], 5000, 2, settings)
    assert one.train.pass_mix == (0, 0, 0, 0, 1) and one.train.lam == 4 and one.train.seed == 2
    assert one.model.fusion == "add" and one.model.dropout == 0.1
    assert one.train.cooldown == 0 and one.train.learning_rate == pytest.approx(1e-3)
    assert one.train.eval_passes == 9 and one.patience == 5
    plain = efficiency.spec_of(arms["plain, equal parameters"], 5000, 2, settings)
    assert plain.model.fusion == "none" and plain.model.n_hidden == 192 + 21  # 2 D / (3 L)
    other_text = efficiency.spec_of(arms["plain, equal parameters"], 6250, 2, settings)
    assert other_text.train.out_dir != plain.train.out_dir


# The factor


def test_the_plain_curve_falls():
    # 1.5 and 1.7 are out of order, and become their mean
    curve = efficiency.falling([10, 20, 40, 80], [2.0, 1.5, 1.7, 1.0])
    assert curve.tolist() == pytest.approx([2.0, 1.6, 1.6, 1.0])


@pytest.mark.parametrize(
    "loss, tokens, bound",
    [
        (2.0, 10, ""),
        (1.8, 10 * 2**0.5, ""),  # half way, in the logarithm of the text
        (1.6, 20, ""),  # the fewest tokens that reach it
        (1.3, 40 * 2**0.5, ""),
        (1.0, 80, ""),
        (2.1, 10, "<"),
        (0.9, 80, ">"),
    ],
)
def test_tokens_for_a_loss_by_hand(loss, tokens, bound):
    curve = np.array([2.0, 1.6, 1.6, 1.0])
    found, sign = efficiency.tokens_for(loss, [10, 20, 40, 80], curve)
    assert found == pytest.approx(tokens) and sign == bound


def runs_with(*losses) -> dict:
    return {seed: {"losses": list(by_pass)} for seed, by_pass in enumerate(losses, start=1)}


def test_the_factor_and_its_interval_by_hand():
    plain = {10: runs_with([2.0], [3.0]), 20: runs_with([1.0], [1.0])}
    ours = runs_with([2.0, 1.5] + [2.5] * 7, [3.0, 2.0] + [2.5] * 7)
    # both seeds: the plain curve falls from 2.5 to 1.0, and pass 2 is 1.75, half way
    numbers = efficiency.factor_numbers(plain, 10, ours, "pass 2")
    assert numbers["factor"] == pytest.approx(2**0.5) and numbers["bound"] == ""
    # seed 1 alone: 1.5 of 2.0 to 1.0, half way; seed 2 alone: 2.0 of 3.0 to 1.0, half way too
    assert numbers["interval"] == pytest.approx([2**0.5, 2**0.5])
    fixed_point = efficiency.factor_numbers(plain, 10, ours, "fixed point")
    # both: 2.5 of 2.5, factor 1; seed 1: 2.5 is above 2.0, a bound; seed 2: a quarter of the way
    assert fixed_point["factor"] == pytest.approx(1)
    half = 12.7062 * 0.25 * math.log(2) / 2  # t of one degree of freedom; logs 0 and a quarter
    expected = [math.exp(-half), math.exp(half)]
    assert fixed_point["interval"] == pytest.approx(expected, rel=1e-4)
    assert fixed_point["beyond"] == 0.5  # seed 1
    alone = efficiency.factor_numbers(plain, 10, {1: ours[1]}, "pass 2")
    assert alone["factor"] == pytest.approx(2**0.5) and alone["interval"] is None


def test_all_numbers_are_of_the_seeds_that_every_arm_has(capsys):
    cost = {"compute_tokens": 1, "step": 1, "seconds": 1.0}
    found = {}
    for arm, by_seed in {
        (efficiency.PLAIN, 10): {1: 2.0, 2: 9.0, 3: 3.0},
        (efficiency.PLAIN, 20): {1: 1.0, 3: 1.5},
        ("gated", 10): {2: 9.0, 1: 1.5, 3: 2.5},
    }.items():
        found[arm] = {seed: {"losses": [loss]} | cost for seed, loss in by_seed.items()}
    arms = efficiency.results_of(found, efficiency.Settings())
    assert [arm["seeds"] for arm in arms] == [[1, 3]] * 3
    assert [arm["means"]["pass 1"] for arm in arms] == [2.5, 1.25, 2.0]
    assert arms[2]["factors"]["pass 1"]["seeds"] == [1, 3]
    assert capsys.readouterr().err == "seeds left out, because some arm lacks them: 2\n"
    found["gated", 10] = {2: found["gated", 10][2]}
    with pytest.raises(UserError, match="no seed is finished in every arm"):
        efficiency.results_of(found, efficiency.Settings())


def test_cells_say_what_is_a_bound():
    numbers = {"factor": 1.234, "bound": "", "interval": [1.1, 1.4], "beyond": 0.0}
    assert efficiency.cell(numbers) == "1.23 (1.10 to 1.40)"
    assert efficiency.cell(numbers | {"bound": ">", "beyond": 1.0}) == ">1.23"
    assert efficiency.cell(numbers | {"interval": None, "beyond": None}) == "1.23"
    some = efficiency.cell(numbers | {"beyond": 0.25})
    assert some == "1.23 (1.10 to 1.40, 25% beyond the curve)"
    assert efficiency.cell({}) == ""


@pytest.fixture
def short(monkeypatch, small_preset):
    monkeypatch.setattr(efficiency, "LONGEST", 2)


def test_a_sweep_of_texts_ends_in_tables_json_and_picture(data, tmp_path, capsys, short):
    words = ["--preset=quick", "--seeds=1", "--jobs=1", "--n_windows=2", "--max_iters=1"]
    words += ["--device=cpu", f"--data_dir={data}", f"--out_dir={tmp_path}/out"]
    words += [f"--results_dir={tmp_path}", "--fusion=add"]
    assert efficiency.main(words) == 0
    out = capsys.readouterr().out
    assert "add, lambda 4, 3 passes" in out and "no finished plain run" not in out
    arms = json.loads((tmp_path / "data_efficiency.json").read_text())["arms"]
    plain = [arm for arm in arms if arm["recipe"] == "plain, equal parameters"]
    assert [arm["tokens"] for arm in plain] == [200, 250, 312, 391, 488, 610, 763]
    assert [arm["tokens"] for arm in arms if arm not in plain] == [250, 391] * 2
    assert all(len(arm["runs"]) == 1 for arm in arms)
    paper = arms[7]
    assert paper["computation"] == pytest.approx(
        paper["compute_tokens"] / plain[1]["compute_tokens"]
    )
    assert set(paper["factors"]) == {"pass 1", "pass 2", "fixed point"}
    assert (tmp_path / "data_efficiency.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, message",
    [
        (["quickly"], "unexpected 'quickly'"),
        (["--fusion=none"], "--fusion=none must be one of gated"),
        (["--lambda=-1"], "--lambda=-1.0 must be"),
        (["--passes=1"], "--passes=1 must be at least 2"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UserError, match=message):
        efficiency.main(words)
