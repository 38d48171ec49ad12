"""experiments/midtraining.py: what starts from where, and that residual kinds start as plain."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import midtraining
from experiments.ablations import runs
from harness.configurator import UserError, parse
from harness.runlog import read_log


@pytest.fixture
def words(data, tmp_path, small_preset, monkeypatch) -> list[str]:
    monkeypatch.setattr(midtraining, "N_PASSES", 4)  # to measure a run with
    sizes = ["--preset=quick", "--max_iters=4", "--jobs=1", "--n_windows=4", "--device=cpu"]
    folders = [f"--data_dir={data}", f"--out_dir={tmp_path}/out", f"--results_dir={tmp_path}"]
    return [*sizes, *folders]


def test_what_starts_from_where(words):
    settings, _ = parse([*words, "--lambda=2"], midtraining.Settings, positional="nothing")
    base = midtraining.base_spec(2, settings)
    assert base.train.max_iters == 8 and base.train.cooldown == 0 and base.keep
    assert base.model.fusion == "none" and base.train.pass_mix == (1,) and base.train.seed == 2
    arms = midtraining.arms(settings)
    kinds = ["gated", "add", "concat", "residual", "gated_residual"]
    plain = ["plain, continued", "plain, continued, equal computation"]
    assert list(arms) == [*plain, *kinds]
    steps = {}
    folders = set()
    for name, arm in arms.items():
        one = midtraining.arm_spec(arm, 2, settings)
        assert one.train.init_from == base.train.out_dir
        assert one.train.seed == 1002 and one.train.cooldown == 0.25  # new batches
        steps[name] = one.train.max_iters
        folders.add(one.train.out_dir)
        if name in kinds:
            assert one.model.fusion == name and one.train.lam == 2
            assert one.train.pass_mix == (0, 0, 1)
    assert steps.pop(plain[1]) == 9 and set(steps.values()) == {3}
    assert len(folders | {base.train.out_dir}) == 8
    other = midtraining.arm_spec(arms["gated"], 3, settings)
    assert other.train.out_dir not in folders
    assert Path(other.train.init_from).name != Path(base.train.out_dir).name


def test_arms_start_as_the_plain_model_and_are_compared_with_it(
    words, tmp_path, capsys, monkeypatch
):
    assert midtraining.main([*words, "--seeds=2"]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "midtraining.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "midtraining.json").read_text())
    arms = {arm["arm"]: arm for arm in result["arms"]}
    settings, _ = parse(words, midtraining.Settings, positional="nothing")
    bases = {seed: midtraining.base_spec(seed, settings) for seed in (1, 2)}
    for name, arm in midtraining.arms(settings).items():
        for seed, base in bases.items():
            # The plain model's last evaluation, measured on the same windows.
            plain_loss = runs.numbers_of(base)["losses"][0]
            folder = midtraining.arm_spec(arm, seed, settings).train.out_dir
            first = read_log(Path(folder, "log.jsonl"))[0]
            assert first["step"] == 0
            assert first["val_losses"][0] == pytest.approx(plain_loss, abs=1e-5)
            if "residual" in name:  # the plain model in every pass, exactly
                assert len(set(first["val_losses"])) == 1 and len(first["val_losses"]) == 4
            elif "plain" not in name:
                assert abs(first["val_losses"][1] - first["val_losses"][0]) > 1e-4
    assert arms["gated"]["computation"] == pytest.approx(3)
    assert arms["plain, continued, equal computation"]["computation"] == pytest.approx(3)
    assert arms["gated"]["curves"]["steps"] == [0, 1, 2, 3]
    assert np.shape(arms["gated"]["curves"]["losses"]) == (4, 4)
    pairs = []
    for ours, theirs in zip(arms["add"]["runs"], arms["plain, continued"]["runs"], strict=True):
        pairs.append(ours["Soft"] - theirs["Standard"])
    numbers = arms["add"]["to plain, continued"]["Soft"]
    assert numbers["mean"] == pytest.approx(sum(pairs) / 2)
    assert numbers["interval"] == pytest.approx(12.7062 * abs(pairs[0] - pairs[1]) / 2, rel=1e-4)
    assert result["tested"] == 1 + 5 * 3 and "not corrected" in out
    monkeypatch.setattr(midtraining, "draw", lambda *_: None)  # a second picture shows nothing new
    assert midtraining.main([*words, "--seeds=2", "--train=false"]) == 0
    again = json.loads((tmp_path / "midtraining.json").read_text())
    assert again["arms"] == result["arms"]


@pytest.mark.parametrize(
    "words, message",
    [(["quickly"], "unexpected 'quickly'"), (["--lambda=-1"], "--lambda=-1.0 must be")],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UserError, match=message):
        midtraining.main(words)
