"""The trainer: its schedule, its randomness, resume, signals, and what users get wrong."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import QUICK, SHAPE, configs
from filelock import BaseFileLock, FileLock

import train as trainer
from harness.checkpoint import load_checkpoint, load_model, save_checkpoint, without_feedback
from harness.configurator import UserError, parse
from harness.data import load_meta, load_tokens
from harness.runlog import Log, locked
from model import GPT, GPTConfig
from train import Run, TrainConfig, learning_rate, make_optimizers, pass_count, train

ROOT = Path(__file__).parents[1]

# Everything that is random or has a state: what a resumed run must continue.
EVERYTHING = {
    "pass_mix": (0.4, 0.3, 0.3),
    "dropout": 0.1,
    "prefix_mixin": 0.5,
    "jitter": 0.1,
    "grad_accum": 2,
    "max_iters": 10,
    "eval_interval": 0,
    "eval_iters": 1,
}


@pytest.fixture
def start(corpus, tmp_path, monkeypatch):
    """start(**settings) trains in tmp_path/run; with `signal_at`, SIGINT comes in that step."""

    def go(signal_at=None, data_dir=corpus, out_dir=tmp_path / "run", **settings):
        config, shape = configs(data_dir, out_dir, **settings)
        with monkeypatch.context() as patch:
            if signal_at is not None:
                patch.setattr(Run, "train_step", signalling(Run.train_step, signal_at))
            return train(config, shape)

    return go


def signalling(train_step, signal_at):
    """train_step, in which SIGINT arrives at one step."""

    def step(self):
        if self.counters["step"] + 1 == signal_at:
            signal.raise_signal(signal.SIGINT)
        return train_step(self)

    return step


def command(corpus, out, **settings) -> list[str]:
    """train.py's command line for a tiny run."""
    values = SHAPE | QUICK | {"data_dir": corpus, "out_dir": str(out)} | settings
    flags = [f"--{name}={value}" for name, value in values.items()]
    return [sys.executable, str(ROOT / "train.py"), *flags]


def flags_in(message: str) -> dict[str, str]:
    """The settings --name=value that a message recommends, as it writes them."""
    words = shlex.split(re.sub(r"[,;] ", " ", message))
    return dict(re.findall(r"^--(\w+)=(.*?)[.,;]?$", word)[0] for word in words if "=" in word)


def branch_in(message: str) -> dict:
    """The settings of the new run that a message recommends to start from this one's weights."""
    ways = flags_in(message)
    branch = {name: ways[name] for name in ("init_from", "out_dir")} | {"seed": int(ways["seed"])}
    if "pass_mix" in ways:
        branch["pass_mix"] = tuple(float(share) for share in ways["pass_mix"].split(","))
    return branch


def log(folder) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def same_tensors(a, b) -> bool:
    """Equality, to the last bit, of nested dicts and lists of tensors and plain values."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tensors(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_tensors, a, b))
    return a == b


def assert_same_run(ours, theirs):
    """Two runs' checkpoints and logs are the same, but for the time they took."""
    whole, parts = load_checkpoint(ours), load_checkpoint(theirs)
    for part in ("model", "optimizers", "step", "tokens", "compute_tokens", "val_losses"):
        assert same_tensors(whole[part], parts[part]), part
    for one, other in zip(log(ours), log(theirs), strict=True):
        for clock in ("seconds", "tokens_per_second"):
            one.pop(clock, None)
            other.pop(clock, None)
        assert one == other


@pytest.fixture(scope="session")
def whole_run(make_run) -> str:
    """Ten steps of EVERYTHING without a stop."""
    return make_run(**EVERYTHING)


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(folder) is tmp_path/run with a run's files in it."""

    def copy(folder) -> Path:
        shutil.copytree(folder, tmp_path / "run")
        return tmp_path / "run"

    return copy


# The schedule


def test_staged_schedule_takes_the_single_pass_steps_first():
    config = TrainConfig(pass_mix=(0.75, 0.22, 0.03), max_iters=4000)
    counts = [pass_count(config, step) for step in range(4000)]
    assert counts[:3000] == [1] * 3000
    assert counts.count(2) + counts.count(3) == 1000
    assert counts.count(2) / 1000 == pytest.approx(0.88, abs=0.03)


def test_interleaved_schedule_draws_from_the_whole_mix_everywhere():
    config = TrainConfig(pass_mix=(0.5, 0.3, 0.0, 0.2), interleave=True, max_iters=2000)
    counts = np.array([pass_count(config, step) for step in range(2000)])
    for part in (counts[:1000], counts[1000:]):
        shares = [np.mean(part == k) for k in (1, 2, 3, 4)]
        assert shares == pytest.approx([0.5, 0.3, 0.0, 0.2], abs=0.05)


def test_one_kind_of_step_only():
    single = TrainConfig(pass_mix=(1,), max_iters=50)
    triple = TrainConfig(pass_mix=(0, 0, 1), max_iters=50)
    assert {pass_count(single, step) for step in range(60)} == {1}
    assert {pass_count(triple, step) for step in range(60)} == {3}


def test_learning_rate_is_wsd():
    config = TrainConfig(learning_rate=1.0, warmup_iters=4, max_iters=20, cooldown=0.25)
    rates = [learning_rate(config, step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:16] == [1.0] * 12
    assert rates[15:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    "settings", [{"warmup_iters": 0}, {"warmup_iters": 500}, {"cooldown": 0.0}, {"cooldown": 1.0}]
)
def test_learning_rate_stays_between_0_and_its_peak(settings):
    config = TrainConfig(max_iters=20, learning_rate=0.5, **settings)
    assert all(0 < learning_rate(config, step) <= 0.5 for step in range(20))


def test_prefix_mixin_is_a_share_of_the_steps():
    config = TrainConfig(prefix_mixin=0.3)
    share = np.mean([trainer.feedback_at(config, step).mixin for step in range(2000)])
    assert share == pytest.approx(0.3, abs=0.04)
    assert not any(trainer.feedback_at(TrainConfig(), step).mixin for step in range(100))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("beta1", 1.0, "--beta1=1.0 must be at least 0 and below 1"),
        ("beta2", 1.0, "--beta2=1.0 must be at least 0 and below 1"),
        ("batch_size", 0, "--batch_size=0 must be at least 1"),
        ("batch_size", -1, "--batch_size=-1 must be at least 1"),
        ("eval_passes", 0, "--eval_passes=0 must be at least 1"),
        ("max_iters", -5, "--max_iters=-5 must be at least 0"),
        ("seed", -1, "--seed=-1 must be at least 0"),
        ("lam", -1.0, "--lambda=-1.0 must be at least 0, and finite"),
        ("learning_rate", math.nan, "--learning_rate=nan must be at least 0, and finite"),
        ("learning_rate", math.inf, "--learning_rate=inf must be at least 0, and finite"),
        ("jitter", -0.1, "--jitter=-0.1 must be at least 0, and finite"),
        ("prefix_mixin", 1.5, "--prefix_mixin=1.5 must be a share, from 0 to 1"),
        ("cooldown", 2.0, "--cooldown=2.0 must be a share, from 0 to 1"),
        ("pass_mix", (0.5, 0.4), "--pass_mix=(0.5, 0.4) must be shares of 1, 2, ... passes"),
        ("pass_mix", (), "--pass_mix=() must be shares"),
        ("pass_mix", (1.5, -0.5), "--pass_mix=(1.5, -0.5) must be shares"),
        ("pass_mix", (math.nan,), "--pass_mix=(nan,) must be shares"),
    ],
)
def test_impossible_settings_are_named(field, value, message):
    with pytest.raises(ValueError) as caught:
        TrainConfig(**{field: value})
    assert str(caught.value).startswith(message)


def test_decay_is_on_matrices_only_and_muon_takes_the_hidden_ones():
    model = GPT(GPTConfig(**SHAPE))
    embedding = model.embedding.weight
    hidden = {id(p) for p in model.parameters() if p.ndim == 2 and p is not embedding}
    [adamw] = make_optimizers(model, TrainConfig(weight_decay=0.1))
    for group in adamw.param_groups:
        members = {id(p) for p in group["params"]}
        assert members == hidden if group["weight_decay"] else not members & hidden
    adamw, muon = make_optimizers(model, TrainConfig(optimizer="muon"))
    in_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    in_adamw = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert in_muon == hidden and id(model.fusion.W_H.weight) in in_muon
    assert not in_adamw & in_muon
    assert len(in_adamw) + len(in_muon) == len(list(model.parameters()))


# One step and evaluation, against independent computations


def test_first_step_equals_one_computed_by_hand(start, corpus, tmp_path):
    """AdamW's first step: decay, then nearly the sign of the clipped gradient."""
    settings = {"pass_mix": (0, 0, 1), "jitter": 0.0, "lam": 0.5, "warmup_iters": 0}
    settings |= {"cooldown": 0.0, "grad_clip": 0.1}
    start(max_iters=0, **settings, out_dir=tmp_path / "begin")
    start(max_iters=1, **settings)
    model, _ = load_model(tmp_path / "begin")
    after, _ = load_model(tmp_path / "run")
    data = Path(corpus) / "tiny"
    tokens = load_tokens(data, "train", load_meta(data))
    starts = np.random.default_rng((1, trainer.BATCH, 0, 0)).integers(len(tokens) - 16, size=4)
    rows = torch.stack([torch.from_numpy(tokens[s : s + 17].astype(np.int64)) for s in starts])
    nll = []
    for h in model.passes(rows[:, :-1], 3):
        logits = model.head(h).reshape(-1, model.config.vocab_size)
        nll.append(F.cross_entropy(logits, rows[:, 1:].reshape(-1)))
    loss = nll[0] + 0.5 * (nll[1] + nll[2]) / 2
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    with torch.no_grad():
        for p in model.parameters():
            g = p.grad * 0.1 / norm
            decay = 0.1 if p.ndim == 2 and p is not model.embedding.weight else 0.0
            p.mul_(1 - 1e-3 * decay).sub_(1e-3 * g / (g.abs() + 1e-8))
    for (name, ours), theirs in zip(model.named_parameters(), after.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-6), name
    line = next(line for line in log(tmp_path / "run") if "losses" in line)
    assert line["losses"] == pytest.approx([x.item() for x in nll], abs=1e-5)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_evaluation_is_the_mean_over_evenly_spaced_windows(tiny_run, corpus):
    model, _ = load_model(tiny_run)
    data = Path(corpus) / "tiny"
    tokens = load_tokens(data, "val", load_meta(data))
    losses = []
    for i in range(7):
        begin = int(i * (len(tokens) - 17) / 6)
        row = torch.from_numpy(tokens[begin : begin + 17].astype(np.int64))
        states = model.passes(row[None, :-1], 3)
        losses.append([F.cross_entropy(model.head(h)[0], row[1:]).item() for h in states])
    model.train()
    ours = trainer.evaluate(model, tokens, 7, 3, batch_size=3)
    assert ours == pytest.approx(np.mean(losses, axis=0), abs=1e-5)
    assert model.training


def test_log_has_the_promised_fields(start, tmp_path):
    result = start(pass_mix=(0.5, 0.0, 0.5), max_iters=8, eval_interval=4)
    lines = log(tmp_path / "run")
    steps = [line for line in lines if "losses" in line]
    evaluations = [line for line in lines if "val_losses" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["step"] for line in evaluations] == [0, 4, 8]
    assert [line["passes"] for line in steps] == [1] * 4 + [3] * 4
    assert [len(line["losses"]) for line in steps] == [1] * 4 + [3] * 4
    assert [line["tokens"] for line in steps] == [64 * n for n in range(1, 9)]
    computed = [64, 128, 192, 256, 448, 640, 832, 1024]
    assert [line["compute_tokens"] for line in steps] == computed
    assert set(steps[0]) >= {"lr", "grad_norm", "seconds", "tokens_per_second"}
    assert len(evaluations[-1]["val_losses"]) == 3
    assert result["val_losses"] == evaluations[-1]["val_losses"]
    assert result["finished"] and result["feedback_steps"] == 4


def test_training_learns(start):
    assert start(max_iters=150, learning_rate=3e-3, eval_interval=0)["val_losses"][1] < 2.0


# Randomness and resume


@pytest.mark.parametrize("more", [{}, {"optimizer": "muon", "interleave": True}])
def test_five_and_five_resumed_steps_equal_ten(start, tmp_path, whole_run, more):
    whole = whole_run
    if more:
        whole = tmp_path / "whole"
        start(out_dir=whole, **EVERYTHING, **more)
    first = start(**EVERYTHING, **more, signal_at=5)
    assert not first["finished"] and first["step"] == 5
    assert start(**EVERYTHING, **more, resume=True)["finished"]
    assert_same_run(whole, tmp_path / "run")


def test_lines_after_the_checkpoint_are_dropped_on_resume(start, tmp_path):
    start(**EVERYTHING, signal_at=5)
    surplus = json.dumps({"step": 6, "losses": [9.9], "passes": 1})
    with open(tmp_path / "run" / "log.jsonl", "a") as file:
        file.write(surplus + '\n{"step": 7, "los')  # and a torn line
    start(**EVERYTHING, resume=True)
    lines = [line for line in log(tmp_path / "run") if "losses" in line]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [9.9] not in [line["losses"] for line in lines]


@pytest.mark.parametrize("line", ["garbage", "[1]", "3", '{"loss": 1}'])
def test_a_log_with_another_line_is_refused_and_the_way_out_works(start, copy_of, tiny_run, line):
    run = copy_of(tiny_run)
    (run / "log.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="is not a line of a log; delete that line"):
        start(resume=True)
    (run / "log.jsonl").write_text("")
    assert start(resume=True)["finished"]


def test_a_resume_that_dies_while_it_writes_the_log_keeps_it(copy_of, tiny_run, monkeypatch):
    run = copy_of(tiny_run)
    before = (run / "log.jsonl").read_bytes()
    write = os.fsync

    def dies(descriptor):
        write(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(UserError, match="No space left"):
        Log(run, step=1, total=10, every=1)
    assert (run / "log.jsonl").read_bytes() == before
    assert not (run / "log.jsonl.tmp").exists()
    monkeypatch.undo()
    (run / "log.jsonl.tmp").write_text("the remnant of a killed process")
    Log(run, step=1, total=10, every=1)
    kept = [entry for entry in map(json.loads, before.decode().splitlines()) if entry["step"] <= 1]
    assert log(run) == kept and 0 < len(kept) < len(before.decode().splitlines())


def test_evaluation_changes_nothing(start, tmp_path):
    often = {"eval_interval": 1, "eval_iters": 3, "eval_passes": 4, "log_interval": 1}
    never = {"eval_interval": 0, "eval_iters": 0, "log_interval": 0}
    start(**EVERYTHING | often)
    start(**EVERYTHING | never, out_dir=tmp_path / "never")
    a, b = load_checkpoint(tmp_path / "run"), load_checkpoint(tmp_path / "never")
    assert same_tensors(a["model"], b["model"]) and same_tensors(a["optimizers"], b["optimizers"])
    assert log(tmp_path / "never") == []


def test_batches_depend_on_seed_and_step_alone_and_never_repeat(corpus, tmp_path):
    def batches(**settings):
        this = Run(*configs(corpus, tmp_path / "none", **settings))
        return [this.batch(step, micro)[0].tolist() for step in range(4) for micro in range(2)]

    first = batches()
    assert first == batches(pass_mix=(1.0,), jitter=0.5)
    assert first != batches(seed=2)
    assert len({json.dumps(rows) for rows in first}) == 8
    assert not (tmp_path / "none").exists()  # a Run writes nothing before it saves


def test_single_pass_training_is_that_of_a_plain_model_and_leaves_the_fusion(start, tmp_path):
    start(pass_mix=(1.0,), max_iters=0, out_dir=tmp_path / "begin")
    start(pass_mix=(1.0,), max_iters=6)
    start(pass_mix=(1.0,), max_iters=6, fusion="none", out_dir=tmp_path / "plain")
    folders = ("begin", "run", "plain")
    begin, fused, plain = (load_checkpoint(tmp_path / name)["model"] for name in folders)
    for name in fused:
        assert torch.equal(begin[name], fused[name]) == name.startswith("fusion."), name
    assert all(torch.equal(plain[name], fused[name]) for name in plain)


def test_a_loss_scaler_is_made_anew_where_the_checkpoint_has_none(start, monkeypatch, tmp_path):
    """As where dtype=auto was float32 and is float16 on the machine that resumes."""
    settings = {"dtype": "auto", "max_iters": 4, "eval_iters": 0}
    start(**settings, signal_at=2)
    assert load_checkpoint(tmp_path / "run")["scaler"] == {}
    monkeypatch.setattr(trainer, "pick_dtype", lambda name, device: torch.float16)
    assert start(**settings, resume=True)["finished"]
    assert load_checkpoint(tmp_path / "run")["scaler"]["scale"] == 2.0**16


def test_a_gradient_that_overflows_costs_the_whole_step(corpus, tmp_path, monkeypatch):
    """Of all optimisers, also where the overflow is in the weights of one of them."""
    monkeypatch.setattr(trainer, "pick_dtype", lambda name, device: torch.float16)
    settings = {"optimizer": "muon", "pass_mix": (1.0,), "eval_iters": 0, "log_interval": 1}
    with trainer.opened(*configs(corpus, tmp_path / "run", **settings)) as (run, log_of_run):
        run.train_step()
        before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
        run.backward(1, 1)
        run.model.blocks[0].mlp.up.weight.grad[0, 0] = math.inf
        norm = run.update(1e-3, [2.5])
        assert norm == math.inf and run.scaler.get_scale() == 2.0**15
        assert same_tensors(before, run.model.state_dict())
        log_of_run.write({"step": 2, "grad_norm": norm})
        run.train_step()
        assert not same_tensors(before, run.model.state_dict())
    text = (tmp_path / "run" / "log.jsonl").read_text()
    assert json.loads(text)["grad_norm"] is None and "Infinity" not in text


def test_a_gradient_that_no_scale_makes_finite_ends_the_run(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "pick_dtype", lambda name, device: torch.float16)
    settings = {"pass_mix": (1.0,), "eval_iters": 0}
    with trainer.opened(*configs(corpus, tmp_path / "run", **settings)) as (run, _):
        run.model.output_norm.weight.register_hook(lambda gradient: gradient * math.nan)
        for _ in range(17):  # 2^16, 2^15, ..., 1
            assert math.isnan(run.train_step()["grad_norm"])
        with pytest.raises(UserError, match="gradient norm nan: not finite"):
            run.train_step()


# What a resumed run may change


def resumed(start, **settings) -> str:
    """The complaint about resuming with these settings."""
    with pytest.raises(UserError, match="^--resume: ") as caught:
        start(resume=True, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_flags_of_a_way_out_are_quoted_for_a_shell(start, corpus, tmp_path):
    spaced = tmp_path / "my data"
    for name in ("tiny", "my text"):
        shutil.copytree(Path(corpus) / "tiny", spaced / name)
    settings = {"data_dir": spaced, "max_iters": 2, "eval_iters": 0}
    start(dataset="my text", out_dir=f"{tmp_path}/run/", **settings)
    message = resumed(start, **settings)
    assert flags_in(message)["dataset"] == "my text"
    assert start(dataset="my text", out_dir=f"{tmp_path}/run/", resume=True, **settings)["finished"]


def test_the_next_run_is_beside_a_folder_given_with_a_slash(start, tmp_path, capsys):
    start(max_iters=2, eval_iters=0, out_dir=f"{tmp_path}/run/")
    ways = branch_in(capsys.readouterr().out.splitlines()[-1])
    assert ways["out_dir"] == f"{tmp_path}/run_2" and ways["init_from"] == f"{tmp_path}/run"


def test_resume_names_all_settings_at_once_and_another_dataset_as_such(
    start, copy_of, tiny_run, corpus, tmp_path
):
    import prepare

    copy_of(tiny_run)
    message = resumed(start, n_layer=1, lam=0.5)
    assert "n_layer is 2 in" in message and "lambda is 1.0 in" in message
    assert "--lambda=1.0 --n_layer=2, or start anew" in message
    shutil.copytree(Path(corpus) / "tiny", tmp_path / "data" / "tiny")
    (tmp_path / "other.txt").write_text("another text, of other symbols\n" * 100)
    prepare.main([f"--input={tmp_path}/other.txt", f"--data_dir={tmp_path}/data"])
    message = resumed(start, dataset="other", data_dir=tmp_path / "data")
    assert "dataset is tiny in" in message and "--dataset=tiny, or" in message
    assert "changed" not in message


@pytest.mark.parametrize(
    "setting, value", [("learning_rate", 0.5), ("n_layer", 1), ("pass_mix", (1.0,)), ("lam", 0.5)]
)
def test_resume_wants_the_settings_it_began_with_and_names_them(
    start, copy_of, tiny_run, setting, value
):
    copy_of(tiny_run)
    name = "lambda" if setting == "lam" else setting
    message = resumed(start, **{setting: value})
    assert message.startswith(f"--resume: {name} is ")
    began_with = re.search(rf"--{name}=(\S+), or", message)[1]
    config, shape, _ = parse([f"--{name}={began_with}"], TrainConfig, GPTConfig)
    fields = asdict(config) | asdict(shape)
    assert start(resume=True, **{setting: fields[setting]}, eval_interval=1)["finished"]


def test_a_longer_run_is_resumed_while_its_schedule_allows_it(start, tmp_path):
    """Before the cool-down, or without one; it then equals a run of that length from the start."""
    settings = {"eval_interval": 0, "eval_iters": 1, "pass_mix": (0.5, 0.5)}
    start(max_iters=20, **settings, out_dir=tmp_path / "whole")
    start(max_iters=16, **settings, signal_at=8)
    assert start(max_iters=20, **settings, resume=True)["finished"]
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_without_a_cool_down_a_finished_run_can_be_made_longer(start, tmp_path, capsys):
    settings = {"cooldown": 0.0, "eval_iters": 0}
    start(max_iters=4, **settings)
    assert "--resume it with a larger --max_iters" in capsys.readouterr().out
    start(max_iters=6, **settings, resume=True)
    start(max_iters=6, **settings, out_dir=tmp_path / "whole")
    whole, parts = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "run")
    assert same_tensors(whole["model"], parts["model"])


@pytest.mark.parametrize(
    "max_iters, changed",
    [
        (40, {}),  # in the cool-down: the rate would jump up
        (16, {}),  # ... or down
        (10, {}),  # fewer than were done
        (40, {"cooldown": 0.0, "pass_mix": (0.5, 0.0, 0.5)}),  # back to single passes
        (12, {"cooldown": 0.0}),
    ],
)
def test_another_length_is_refused_after_the_fact_and_each_way_out_works(
    start, tmp_path, max_iters, changed
):
    settings = {"eval_iters": 0} | changed
    start(max_iters=20, **settings, signal_at=18)
    before = (tmp_path / "run" / "ckpt.pt").read_bytes()
    message = resumed(start, max_iters=max_iters, **settings)
    assert (tmp_path / "run" / "ckpt.pt").read_bytes() == before
    assert ("more steps already" in message) == (max_iters < 18)
    assert ("to become longer" in message) == (max_iters > 18)
    ways = flags_in(message)
    assert ways["max_iters"] == "20" and ways["init_from"] == str(tmp_path / "run")
    branched = start(max_iters=max_iters, **settings | branch_in(message))
    assert branched["finished"] and branched["step"] == max_iters
    assert start(max_iters=20, **settings, resume=True)["finished"]


def test_the_finish_line_recommends_what_works(start, tmp_path, capsys):
    start(max_iters=8, eval_iters=0)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("finished at step 8") and "--resume" not in line
    assert branch_in(line)["seed"] == 2  # with the same one it would read the same batches again
    assert start(max_iters=16, eval_iters=0, **branch_in(line))["finished"]


def test_a_run_that_starts_from_a_staged_one_keeps_its_later_passes(start, capsys):
    staged = {"pass_mix": (0.5, 0.4, 0.1), "max_iters": 8, "eval_iters": 0}
    start(**staged)
    branch = branch_in(capsys.readouterr().out.splitlines()[-1])
    assert branch["pass_mix"] == pytest.approx((0, 0.8, 0.2))
    assert start(**staged | branch)["feedback_steps"] == 4 + 8
    for single in ({"pass_mix": (1.0,)}, staged | {"interleave": True}):
        start(**single | {"max_iters": 2, "overwrite": True})
        assert "pass_mix" not in branch_in(capsys.readouterr().out.splitlines()[-1])


def test_a_mix_without_a_multi_pass_step_is_told(start, capsys):
    start(pass_mix=(0.98, 0.02), max_iters=20, eval_iters=0)
    told = capsys.readouterr().err
    none = "--pass_mix=[0.98, 0.02]: none of --max_iters=20 steps will take 2 passes; feedback will"
    assert none in told
    start(pass_mix=(0.9, 0.1), max_iters=20, eval_iters=0, overwrite=True)
    start(pass_mix=(1.0,), max_iters=20, eval_iters=0, overwrite=True)
    assert "none of" not in capsys.readouterr().err


def test_a_rare_number_of_passes_that_is_never_drawn_is_told(start, capsys):
    start(pass_mix=(0.5, 0.49, 0.005, 0.005), max_iters=4, eval_iters=0)
    told = capsys.readouterr().err
    assert "--max_iters=4 steps will take 3 or 4 passes\n" in told
    start(pass_mix=(0.5, 0.001, 0.499), interleave=True, max_iters=8, eval_iters=0, overwrite=True)
    assert "--max_iters=8 steps will take 2 passes\n" in capsys.readouterr().err


def test_the_last_line_of_a_stopped_run_recommends_what_works(start, tmp_path, capsys):
    start(max_iters=4, eval_iters=0, signal_at=2)
    assert "stopped at step 2" in capsys.readouterr().out
    assert start(max_iters=4, eval_iters=0, resume=True)["finished"]


def test_resume_refuses_data_that_were_prepared_again(start, corpus, tmp_path):
    import prepare

    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    start(max_iters=2, data_dir=data)
    shutil.rmtree(data / "tiny")
    (tmp_path / "tiny.txt").write_text("another text of digits 0123456789\n" * 100)
    prepare.main([f"--input={tmp_path}/tiny.txt", f"--data_dir={data}"])
    message = resumed(start, max_iters=2, data_dir=data)
    assert "text of the dataset has changed" in message
    assert "--overwrite in place of --resume" in message
    assert start(max_iters=2, data_dir=data, overwrite=True)["finished"]


def test_a_checkpoint_of_other_code_is_refused_on_resume(start, copy_of, tiny_run):
    run = copy_of(tiny_run)
    checkpoint = load_checkpoint(run)
    lacking = {name: value for name, value in checkpoint.items() if name != "scaler"}
    save_checkpoint(run, lacking)
    with pytest.raises(UserError, match="made by another version of the code: it lacks scaler"):
        start(resume=True)
    settings = dict(checkpoint["train_config"], nesterov=True)
    del settings["beta2"]
    save_checkpoint(run, checkpoint | {"train_config": settings})
    with pytest.raises(UserError, match="train_config lacks beta2; has nesterov besides"):
        start(resume=True)
    settings = dict(checkpoint["train_config"])
    del settings["recompute"]  # what a resumed run may set anew may be missing
    save_checkpoint(run, checkpoint | {"train_config": settings})
    assert start(resume=True)["finished"]


@pytest.mark.parametrize("killed_in", ["save", "saved"])
def test_a_log_is_of_the_checkpoint_it_stands_beside(start, tmp_path, monkeypatch, killed_in):
    """Also where a run that overwrites another one is killed right before or after its first save.

    Then --resume continues the former run, or the new one, and the log is of that one alone.
    """
    settings = {"eval_interval": 2, "pass_mix": (1.0,), "cooldown": 0.0}
    start(max_iters=2, learning_rate=1e-3, **settings)

    def killed(self):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Run if killed_in == "save" else Log, killed_in, killed)
        with pytest.raises(RuntimeError, match="killed"):
            start(max_iters=2, learning_rate=5e-4, overwrite=True, **settings)
    rate = 1e-3 if killed_in == "save" else 5e-4
    start(max_iters=4, learning_rate=rate, resume=True, **settings)
    entries = [entry for entry in log(tmp_path / "run") if "lr" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    assert entries[1]["lr"] == entries[3]["lr"] == rate
    assert not (tmp_path / "run" / "log.new.jsonl").exists()


def test_a_folder_that_vanishes_costs_neither_weights_nor_run(start, tmp_path, monkeypatch):
    step = Run.train_step

    def without_folder(self):
        if self.counters["step"] == 2:
            shutil.rmtree(tmp_path / "run")
        return step(self)

    monkeypatch.setattr(Run, "train_step", without_folder)
    assert start(max_iters=4)["finished"]
    assert load_checkpoint(tmp_path / "run")["step"] == 4
    assert log(tmp_path / "run")[-1]["step"] == 4


# Starting from another run


def test_init_from_takes_the_weights_and_adds_a_fresh_fusion(start, plain_run, tmp_path):
    start(init_from=plain_run, max_iters=0)
    mid, plain = load_checkpoint(tmp_path / "run"), load_checkpoint(plain_run)
    assert all(torch.equal(weight, mid["model"][name]) for name, weight in plain["model"].items())
    new = mid["model"].keys() - plain["model"].keys()
    assert new == {"fusion.W_H.weight", "fusion.W_G.weight"}
    assert mid["step"] == 0 and not mid["optimizers"][0]["state"]
    assert start(init_from=plain_run, max_iters=4, overwrite=True)["feedback_steps"] == 4


def test_feedback_that_came_with_the_weights_counts_as_trained(start, tiny_run, tmp_path):
    """With one pass per step from there on, Soft is still what the weights were trained for."""
    fed = load_checkpoint(tiny_run)["feedback_steps"]
    branch = {"init_from": tiny_run, "max_iters": 2, "pass_mix": (1.0,)}
    assert start(**branch)["feedback_steps"] == fed > 0
    assert without_feedback("run", load_checkpoint(tmp_path / "run")) == ""
    assert start(fusion="add", overwrite=True, **branch)["feedback_steps"] == 0  # a fresh fusion


def test_where_a_run_began_stays_known_and_cannot_be_changed(start, plain_run, tmp_path):
    settings = {"max_iters": 4, "eval_iters": 0}
    start(init_from=plain_run, **settings, signal_at=2)
    message = resumed(start, init_from=str(tmp_path / "elsewhere"), **settings)
    assert f"--init_from={plain_run}" in message
    assert start(resume=True, **settings)["finished"]  # it need not be given again
    assert load_checkpoint(tmp_path / "run")["train_config"]["init_from"] == str(plain_run)
    assert start(resume=True, init_from=plain_run, **settings)["finished"]


def test_init_from_another_shape_names_all_flags_and_they_work(start, plain_run, tmp_path):
    with pytest.raises(UserError, match="--init_from=.* there and .* here; give ") as caught:
        start(init_from=plain_run, n_layer=3, n_embd=64, max_iters=1)
    assert not (tmp_path / "run").exists()
    ways = flags_in(str(caught.value).split("give ")[1])
    assert ways == {"n_layer": "2", "n_embd": "32"}
    shape = {name: int(value) for name, value in ways.items()}
    assert start(init_from=plain_run, max_iters=1, **shape)["finished"]


def test_init_from_nowhere_leaves_nothing(start, tmp_path):
    with pytest.raises(UserError, match="^--init_from: no checkpoint.*nowhere"):
        start(init_from="nowhere", out_dir=tmp_path / "deep" / "run")
    assert not list(tmp_path.iterdir())


def test_init_from_another_tokenizer_is_refused(start, plain_run, tmp_path):
    checkpoint = load_checkpoint(plain_run)
    other = {"kind": "char", "symbols": "ab"}
    save_checkpoint(tmp_path, checkpoint | {"tokenizer": other})
    with pytest.raises(UserError, match="tokenizer.*--dataset=tiny"):
        start(init_from=str(tmp_path))


# A folder that holds a run already


def test_an_existing_run_is_not_touched_without_a_word(start, tmp_path):
    start(max_iters=2)
    before = (tmp_path / "run" / "ckpt.pt").read_bytes()
    with pytest.raises(UserError, match="--resume.*--overwrite"):
        start(max_iters=2)
    with pytest.raises(ValueError, match="--resume=True must be left out where --overwrite"):
        TrainConfig(resume=True, overwrite=True)
    assert (tmp_path / "run" / "ckpt.pt").read_bytes() == before
    assert start(max_iters=1, overwrite=True)["step"] == 1


@pytest.mark.parametrize("init", [False, True])
def test_overwrite_replaces_the_old_run_at_its_first_save_and_not_before(
    start, copy_of, tiny_run, monkeypatch, init
):
    run = copy_of(tiny_run)
    before = (run / "ckpt.pt").read_bytes(), (run / "log.jsonl").read_text()
    more = {"init_from": str(run)} if init else {}

    def fail(self, rate, losses):
        raise UserError("the first step fails")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "update", fail)
        with pytest.raises(UserError, match="first step"):
            start(overwrite=True, seed=2, **more)
    assert ((run / "ckpt.pt").read_bytes(), (run / "log.jsonl").read_text()) == before
    assert start(overwrite=True, seed=2, max_iters=3, eval_interval=0, **more)["finished"]
    assert load_checkpoint(run)["step"] == 3
    assert [line["step"] for line in log(run) if "losses" in line] == [1, 2, 3]
    assert sorted(path.name for path in run.iterdir()) == ["ckpt.pt", "lock", "log.jsonl"]


def test_a_signal_before_the_first_step_keeps_the_old_run(start, copy_of, tiny_run, monkeypatch):
    run = copy_of(tiny_run)
    before = (run / "ckpt.pt").read_bytes()
    evaluate = Run.evaluate

    def interrupted(self, stopped):
        signal.raise_signal(signal.SIGINT)
        return evaluate(self, stopped)

    monkeypatch.setattr(Run, "evaluate", interrupted)
    assert not start(overwrite=True, seed=2)["finished"]
    assert (run / "ckpt.pt").read_bytes() == before


def test_a_folder_without_a_trained_step_is_free(start, tmp_path):
    (tmp_path / "run").mkdir()
    entry = {"step": 0, "val_losses": [5.0]}
    (tmp_path / "run" / "log.jsonl").write_text(json.dumps(entry) + "\n")
    with pytest.raises(UserError, match="without --resume"):
        start(resume=True)
    assert start(max_iters=1, eval_iters=0)["finished"]
    assert [line["step"] for line in log(tmp_path / "run")] == [1]


def test_a_log_of_trained_steps_without_a_checkpoint_offers_no_resume(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text(json.dumps({"step": 7, "losses": [5.0]}) + "\n")
    with pytest.raises(UserError) as caught:
        start(max_iters=1)
    assert "7 steps" in str(caught.value) and "--overwrite" in str(caught.value)
    assert "--resume" not in str(caught.value)
    assert start(max_iters=1, overwrite=True)["finished"]


@pytest.mark.parametrize("settings", [{}, {"resume": True}, {"overwrite": True}])
def test_a_second_trainer_is_refused_before_it_writes(start, copy_of, tiny_run, settings):
    run = copy_of(tiny_run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    holds = "import sys; from pathlib import Path; from harness.runlog import locked\n"
    holds += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", holds, str(run)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "held\n"
    try:
        with pytest.raises(UserError, match="another process is training in .*wait for it"):
            start(**settings)
    finally:
        other.kill()  # a lock does not outlive its process, however that ends
        other.communicate()
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert start(resume=True)["finished"]


def test_the_lock_is_free_again_after_a_run_and_after_a_failed_one(start, tmp_path):
    with pytest.raises(UserError):
        start(block_size=20_000)
    assert not (tmp_path / "run").exists()
    start(max_iters=1)
    with FileLock(tmp_path / "run" / "lock", timeout=0):
        pass


@pytest.mark.parametrize("left", ["a/b/other.txt", "a/other.txt", None])
def test_what_ends_a_locked_block_is_heard_whatever_the_folder_has_become(tmp_path, left):
    folder = tmp_path / "a" / "b"
    with pytest.raises(ZeroDivisionError), locked(folder):
        if left:
            (tmp_path / left).write_text("of another program")
        else:
            shutil.rmtree(tmp_path / "a")
        raise ZeroDivisionError
    assert left is None or (tmp_path / left).exists()
    assert (folder / "lock").exists() == (left == "a/b/other.txt")


def test_the_locks_file_goes_while_the_lock_is_held(tmp_path, monkeypatch):
    there = []
    release = BaseFileLock.release

    def released(lock, force=False):
        there.append((tmp_path / "run" / "lock").exists())
        release(lock, force)

    monkeypatch.setattr(BaseFileLock, "release", released)
    with locked(tmp_path / "run"):
        pass
    assert there[0] is False and not (tmp_path / "run").exists()


# Settings, data and machine that do not go together


def test_a_short_corpus_says_which_block_size_works(start, tmp_path):
    import prepare

    (tmp_path / "short.txt").write_text("abcdefghij" * 20)
    prepare.main([f"--input={tmp_path}/short.txt", f"--data_dir={tmp_path}", "--val_fraction=0.1"])
    with pytest.raises(UserError, match=r"180 and 20: at most --block_size=19"):
        start(dataset="short", data_dir=tmp_path, block_size=20)
    assert start(dataset="short", data_dir=tmp_path, block_size=19, max_iters=2)["finished"]


def test_multi_pass_steps_need_a_fusion_and_the_way_out_works(start):
    with pytest.raises(UserError, match="pass_mix.*fusion=none; give --pass_mix=1"):
        start(fusion="none", max_iters=1)
    assert start(fusion="none", max_iters=1, pass_mix=(1,))["finished"]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_iters": 0},
        {"max_iters": 1},
        {"max_iters": 5, "eval_interval": 50},
        {"max_iters": 3, "warmup_iters": 50},
        {"max_iters": 3, "warmup_iters": 0},
        {"max_iters": 3, "eval_interval": 0},
        {"max_iters": 3, "log_interval": 0},
        {"max_iters": 3, "eval_iters": 0},
        {"max_iters": 2, "eval_iters": 10**9, "eval_interval": 0, "batch_size": 64},
        {"max_iters": 2, "dtype": "bfloat16"},
        {"max_iters": 2, "fusion": "concat"},
        {"max_iters": 2, "n_kv_head": 1, "qk_norm": False, "fusion": "add", "detach": True},
    ],
)
def test_odd_but_possible_settings_run_and_save(start, tmp_path, settings):
    assert start(**settings)["finished"]
    assert load_checkpoint(tmp_path / "run")["step"] == settings["max_iters"]


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"device": "gpu"}, "--device=gpu: this machine has"),
        ({"dtype": "float16"}, "float16 needs cuda"),
        ({"dataset": "unknown"}, "prepare.py"),
        ({"data_dir": "x" * 5000}, "prepare.py"),
        ({"init_from": "x" * 5000}, "no checkpoint can be there: File name too long"),
    ],
)
def test_what_the_machine_does_not_have_is_named_and_leaves_nothing(
    start, tmp_path, settings, words
):
    with pytest.raises(UserError, match=words):
        start(**settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("out", ["file", "file/below", "x" * 5000])
def test_an_out_dir_that_cannot_be_is_named(start, tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out_dir=.*name a folder that can be written"):
        start(out_dir=tmp_path / out)


def test_tokens_that_may_not_be_read_are_named(start, corpus, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(UserError, match="train.bin cannot be read: Permission denied"):
        start()


@pytest.mark.parametrize("settings", [{"n_embd": 2**24}, {"batch_size": 2**50}])
def test_out_of_memory_is_one_line_with_the_flags_to_lower(start, tmp_path, settings):
    with pytest.raises(UserError, match="out of memory .*lower --batch_size.*--n_embd") as caught:
        start(eval_iters=0, **settings)
    assert "\n" not in str(caught.value)


def test_a_cpu_run_asks_nothing_of_cuda(start, monkeypatch):
    def touched(*args):
        raise AssertionError("CUDA was asked")

    def available() -> bool:  # newer optimisers of PyTorch ask this by themselves
        assert not sys._getframe(1).f_code.co_filename.startswith(str(ROOT)), "CUDA was asked"
        return False

    monkeypatch.setattr(torch.cuda, "is_available", available)
    for name in ("device_count", "current_device", "init", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, touched)
    assert start(max_iters=2)["finished"]


# Numbers that are not finite


def test_a_loss_that_is_not_finite_keeps_the_checkpoint_and_each_way_out_works(
    start, tmp_path, monkeypatch
):
    long = {"max_iters": 30, "learning_rate": 0.01}
    start(signal_at=20, **long)
    run = tmp_path / "run"
    before = (run / "ckpt.pt").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "head", lambda self, h: math.nan * F.linear(h, self.embedding.weight))
        with pytest.raises(UserError) as caught:
            start(resume=True, **long)
    message = str(caught.value)
    assert "after step 20" in message and "not finite; the last checkpoint is kept" in message
    assert (run / "ckpt.pt").read_bytes() == before
    ways = flags_in(message)
    rate = float(ways["learning_rate"])
    assert 0 < rate < long["learning_rate"]
    assert start(max_iters=6, learning_rate=rate, **branch_in(message))["finished"]
    assert "--overwrite" in message
    assert start(max_iters=6, learning_rate=rate, overwrite=True)["finished"]


def test_weights_no_better_than_a_guess_are_not_recommended(start):
    """They are finite, and from there no rate leads anywhere."""
    with pytest.raises(UserError, match="the last checkpoint is kept") as caught:
        start(learning_rate=1e6, max_iters=50, eval_interval=1)
    assert "--init_from" not in str(caught.value)
    assert "--overwrite" in str(caught.value)


def test_weights_that_fail_before_the_first_step_are_to_blame(start, tiny_run, copy_of):
    run = copy_of(tiny_run)
    checkpoint = load_checkpoint(run)
    checkpoint["model"]["embedding.weight"] *= 1e38
    save_checkpoint(run, checkpoint)
    with pytest.raises(UserError, match="after step 0.*not finite") as caught:
        start(init_from=str(run), out_dir=run.parent / "new", eval_iters=0)
    assert "start from other weights" in str(caught.value)
    assert "--learning_rate" not in str(caught.value)


def test_a_wild_learning_rate_ends_with_a_rate_that_works(start):
    with pytest.raises(UserError, match="nothing was saved yet") as caught:
        start(learning_rate=1e30, grad_clip=0.0, max_iters=6, eval_interval=0, eval_iters=0)
    ways = flags_in(str(caught.value))
    assert ways == {"learning_rate": "0.001", "grad_clip": "1"}
    settings = {name: float(value) for name, value in ways.items()}
    assert start(max_iters=6, overwrite=True, **settings)["finished"]


def test_weights_that_are_not_finite_are_never_saved(start, copy_of, tiny_run, monkeypatch):
    """Also where no evaluation would notice: the last step spoils them."""
    run = copy_of(tiny_run)
    before = (run / "ckpt.pt").read_bytes()
    update = Run.update

    def spoiled(self, rate, losses):
        norm = update(self, rate, losses)
        with torch.no_grad():
            self.model.blocks[0].mlp.up.weight[0, 0] = math.nan
        return norm

    monkeypatch.setattr(Run, "update", spoiled)
    with pytest.raises(UserError, match=r"blocks.0.mlp.up.weight: not finite.*run before, is kept"):
        start(max_iters=1, eval_iters=0, overwrite=True)
    assert (run / "ckpt.pt").read_bytes() == before


# Compiling and recomputing


def test_one_compilation_serves_all_passes_mixin_and_evaluation(
    start, whole_run, tmp_path, count_graphs
):
    graphs = count_graphs(trainer)
    start(**EVERYTHING, compile=True)
    passes = {line["passes"] for line in log(tmp_path / "run") if "passes" in line}
    assert passes == {1, 2, 3} and len(graphs) == 1
    compiled, eager = load_checkpoint(tmp_path / "run"), load_checkpoint(whole_run)
    assert compiled["model"].keys() == eager["model"].keys()
    for name, weight in eager["model"].items():
        assert torch.allclose(weight, compiled["model"][name], atol=1e-5), name


def test_recomputing_gives_the_same_weights_to_the_last_bit(start, whole_run, tmp_path):
    """Dropout, jitter and mixin included."""
    start(**EVERYTHING, recompute=True)
    assert_same_run(whole_run, tmp_path / "run")


def kept_bytes(forward) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, each storage once."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()  # its graph keeps them alive, so that no address is used twice
    return sum(kept.values()) + result.nbytes


def test_recomputing_keeps_three_passes_in_the_memory_of_one(corpus, tmp_path):

    def size(k: int, recompute: bool) -> int:
        this = Run(*configs(corpus, tmp_path, recompute=recompute, n_layer=4))
        idx, targets = this.batch(0, 0)
        return kept_bytes(lambda: this.model(idx, targets, k))

    assert size(3, True) < 1.3 * size(1, False) < 0.6 * size(3, False)


# Signals and the terminal


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_after_the_step(start, tmp_path, monkeypatch, name):
    train_step = Run.train_step

    def step(self):
        signal.raise_signal(getattr(signal, name))
        return train_step(self)

    monkeypatch.setattr(Run, "train_step", step)
    result = start(eval_interval=0)
    assert result["step"] == 1 and not result["finished"]
    assert load_checkpoint(tmp_path / "run")["step"] == 1


def test_an_evaluation_ends_early_on_a_signal_and_is_done_on_resume(
    start, tmp_path, whole_run, monkeypatch
):
    settings = EVERYTHING | {"eval_interval": 5, "eval_iters": 50}
    start(**settings, out_dir=tmp_path / "whole")
    forward = GPT.forward
    evaluated = []

    def counting(self, *args, **options):
        if not self.training:
            evaluated.append(1)
        if len(evaluated) == 60:  # in the second evaluation
            signal.raise_signal(signal.SIGINT)
        return forward(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", counting)
        result = start(**settings)
    assert len(evaluated) == 60 and result["step"] == 5 and not result["finished"]
    assert load_checkpoint(tmp_path / "run")["val_step"] == 0
    assert start(**settings, resume=True)["finished"]
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def wait_for_step(folder, step: int, process) -> None:
    """Returns once the run has logged that step; fails after a minute or when it ended."""
    for _ in range(600):
        file = folder / "log.jsonl"
        if file.exists() and f'"step": {step},' in file.read_text():
            return
        assert process.poll() is None, "the run ended"
        time.sleep(0.1)
    raise AssertionError("the run did not get that far")


def test_a_vanished_reader_of_stdout_costs_the_line_and_not_the_run(corpus, tmp_path):
    process = subprocess.Popen(
        command(corpus, tmp_path / "run", max_iters=60),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0
    assert load_checkpoint(tmp_path / "run")["step"] == 60


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="a terminal of Unix")
def test_a_closed_terminal_saves_the_run(corpus, tmp_path):
    pty = pytest.importorskip("pty")
    args = command(corpus, tmp_path / "run", max_iters=100_000, eval_interval=0, eval_iters=0)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(args[0], args)

    class Child:
        def poll(self):
            return None if os.waitpid(pid, os.WNOHANG) == (0, 0) else 1

    wait_for_step(tmp_path / "run", 3, Child())
    os.close(terminal)  # the kernel sends SIGHUP, and what is written to the terminal fails
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert load_checkpoint(tmp_path / "run")["step"] == log(tmp_path / "run")[-1]["step"] >= 3


def test_kill_9_leaves_a_checkpoint_that_loads_and_a_run_that_resumes(corpus, tmp_path):
    saving = {"max_iters": 100_000, "eval_interval": 1, "eval_iters": 0, "cooldown": 0}
    args = command(corpus, tmp_path / "run", **saving)
    for attempt in range(2):
        resume = ["--resume"] if attempt else []
        process = subprocess.Popen(
            args + resume, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        wait_for_step(tmp_path / "run", 5 * (attempt + 1), process)
        process.kill()
        process.communicate()
        assert load_checkpoint(tmp_path / "run")["step"] >= 4 * (attempt + 1)


# From the command line


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"learning_rte": "1e-3"}, "learning_rate"),
        ({"n_head": 3}, "n_embd"),
        ({"lambda": "x"}, "lambda"),
    ],
)
def test_users_mistakes_name_the_setting_and_leave_nothing(corpus, tmp_path, wrong, words):
    with pytest.raises(UserError, match=words):
        trainer.main(command(corpus, tmp_path / "run", **wrong)[2:])
    assert not list(tmp_path.iterdir())


def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py")], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert str(tmp_path / "data") in done.stderr and "prepare.py" in done.stderr
    assert not list(tmp_path.iterdir())


def test_config_files_set_everything_and_name_the_run(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "lambda = 0.5\npass_mix = [0.5, 0.5]\nn_embd = 32\nn_head = 2\nmax_iters = 1e3\n"
    (tmp_path / "small.toml").write_text(text)
    words = ["--max_iters=2", "--dataset=tiny", f"--data_dir={corpus}", "--device=cpu"]
    assert trainer.main(["small.toml", *words, "--eval_iters=1"]) == 0
    config = load_checkpoint(tmp_path / "out" / "small")["train_config"]
    assert config["lam"] == 0.5 and config["pass_mix"] == [0.5, 0.5] and config["max_iters"] == 2


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "config").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_recipe_is_valid(recipe):
    config, _, _ = parse([str(recipe)], TrainConfig, GPTConfig)
    assert asdict(config) != asdict(TrainConfig()) and recipe.read_text().startswith("#")


# Several processes

JOBS = """
import json, signal, sys
import torch, train
import torch.distributed as dist
from harness.configurator import UserError

# One group serves all jobs: making another one of the same processes is not reliable.
init_once = dist.init_process_group
dist.init_process_group = lambda backend: dist.is_initialized() or init_once(backend)
dist.destroy_process_group = lambda: None

def compile_blocks(blocks, device):
    for block in blocks:
        block.compile(backend="eager")
    return True

train.compile_blocks = compile_blocks
train_step, save = train.Run.train_step, train.Run.save
for job in json.load(open(sys.argv[1])):
    def step(self):
        if self.processes.rank == 0 and self.counters["step"] + 1 == job["signal_at"]:
            signal.raise_signal(signal.SIGINT)  # one process gets it, and both stop
        return train_step(self)
    def saving(self):
        torch.save(self.model.state_dict(), job["weights"] % self.processes.rank)
        save(self)
    train.Run.train_step, train.Run.save = step, saving
    try:
        print("exit code", train.main(job["words"]))
    except UserError as error:
        print("refused:", error)
"""
TWO = EVERYTHING | {"dropout": 0.0}  # of four micro-batches per step


@pytest.fixture(scope="session")
def two_processes(corpus, tmp_path_factory) -> Path:
    """A folder of runs by two processes, which also wrote what they printed to 0.txt and 1.txt."""
    folder = tmp_path_factory.mktemp("two")
    runs = {
        "two": TWO,
        "compiled": TWO | {"compile": True, "recompute": True},
        "single_passes": TWO | {"pass_mix": (1.0,), "max_iters": 3},
        "half": EVERYTHING | {"grad_accum": 1, "signal_at": 5},
        "locked": TWO,
    }
    jobs = []
    for name, settings in runs.items():
        settings = dict(settings, pass_mix=",".join(map(str, settings["pass_mix"])))
        signal_at = settings.pop("signal_at", None)
        words = command(corpus, folder / name, **settings)[2:]
        weights = str(folder / f"{name}%d.pt")
        jobs.append({"words": words, "signal_at": signal_at, "weights": weights})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "script.py").write_text(JOBS)
    (folder / "locked").mkdir()
    with FileLock(folder / "locked" / "lock", timeout=0):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            + ["--log-dir", str(folder), "--redirects=3", str(folder / "script.py")]
            + [str(folder / "jobs.json")],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    output = "".join(file.read_text() for file in sorted(folder.glob("**/std*.log")))
    assert done.returncode == 0, output[-3000:]
    (folder / "output.txt").write_text(output)
    return folder


def weights_of(folder: Path, name: str) -> list[dict]:
    """The weights that each of the two processes had when it saved last."""
    return [torch.load(folder / f"{name}{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_two_processes_equal_one_with_twice_the_micro_batches(start, two_processes, tmp_path):
    start(**TWO | {"grad_accum": 4})
    one, two = load_checkpoint(tmp_path / "run"), load_checkpoint(two_processes / "two")
    ranks = weights_of(two_processes, "two")
    assert same_tensors(*ranks) and same_tensors(ranks[0], two["model"])
    assert one["tokens"] == two["tokens"] and two["micro_batches"] == 4
    for name, weight in one["model"].items():
        assert torch.allclose(weight, two["model"][name], atol=1e-5), name
    for ours, theirs in zip(log(tmp_path / "run"), log(two_processes / "two"), strict=True):
        assert ours["step"] == theirs["step"]
        for field in ("losses", "val_losses"):
            assert ours.get(field, []) == pytest.approx(theirs.get(field, []), abs=1e-4)


def test_two_processes_compile_and_recompute_under_ddp(two_processes):
    compiled = load_checkpoint(two_processes / "compiled")["model"]
    eager = load_checkpoint(two_processes / "two")["model"]
    assert same_tensors(*weights_of(two_processes, "compiled"))
    assert compiled.keys() == eager.keys()
    for name, weight in eager.items():
        assert torch.allclose(weight, compiled[name], atol=1e-5), name


def test_single_passes_under_ddp_leave_the_fusion_as_it_was(start, two_processes, tmp_path):
    start(pass_mix=(1.0,), max_iters=0)
    fresh = load_checkpoint(tmp_path / "run")["model"]
    trained = load_checkpoint(two_processes / "single_passes")["model"]
    for name in fresh:
        assert torch.equal(fresh[name], trained[name]) == name.startswith("fusion."), name


def test_the_batch_belongs_to_the_run_whatever_number_of_processes_resumes_it(
    start, two_processes, whole_run, copy_of
):
    """Five steps of 2 processes x 1, then five of 1 x 2: to the last bit ten of 1 x 2."""
    run = copy_of(two_processes / "half")
    assert load_checkpoint(run)["step"] == 5
    message = resumed(start, **EVERYTHING | {"grad_accum": 1})
    assert "2 micro-batches" in message and "1 processes x --grad_accum=1" in message
    assert flags_in(message.split("give ")[1]) == {"grad_accum": "2"}
    assert start(**EVERYTHING | {"grad_accum": 2}, resume=True)["finished"]
    assert_same_run(whole_run, run)


def test_a_batch_that_processes_cannot_share_says_what_to_start():
    saved = {"micro_batches": 3}
    with pytest.raises(UserError, match="start 3 processes, or one with --grad_accum=3"):
        trainer.check_continues(TrainConfig(), saved, n_processes=2)


def test_all_processes_learn_of_a_locked_folder_and_one_signal_stops_all(two_processes):
    output = (two_processes / "output.txt").read_text()
    assert output.count("refused: another process is training in") == 1
    assert output.count("is not free, as the first process says") == 1
    assert output.count("exit code 130") == 2 and output.count("exit code 0") == 6
