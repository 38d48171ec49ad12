"""The trainer: its schedule, its randomness, resume, signals, several processes, and what users get wrong."""

import json
import math
import os
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

import train as trainer
from harness.checkpoint import load_checkpoint, load_model
from harness.configurator import UserError, build
from conftest import QUICK, SHAPE
from model import GPT, GPTConfig
from harness.data import load_meta, load_tokens
from train import Run, TrainConfig, learning_rate, make_optimizers, pass_count, train

ROOT = Path(__file__).parents[1]


@pytest.fixture
def start(corpus, tmp_path):
    """start(**settings) runs train() in tmp_path/run; settings of both configs, and `stop`."""
    def go(stop=lambda step: False, **settings):
        shape = SHAPE | {name: value for name, value in settings.items() if name in GPTConfig.__dataclass_fields__}
        rest = {name: value for name, value in settings.items() if name not in shape}
        config = build(TrainConfig, QUICK | {"data_dir": corpus, "out_dir": str(tmp_path / "run")} | rest)
        return train(config, build(GPTConfig, shape), stop)
    return go


def command(corpus, out, **settings) -> list[str]:
    """train.py's command line for a tiny run."""
    values = SHAPE | QUICK | {"data_dir": corpus, "out_dir": str(out)} | settings
    return [sys.executable, str(ROOT / "train.py")] + [f"--{name}={value}" for name, value in values.items()]


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


# The schedule

def test_staged_schedule_takes_the_single_pass_steps_first():
    config = TrainConfig(pass_mix=(0.75, 0.22, 0.03), max_iters=4000)
    counts = [pass_count(config, step) for step in range(4000)]
    assert counts[:3000] == [1] * 3000 and 1 not in counts[3000:]
    assert counts.count(2) / 1000 == pytest.approx(0.88, abs=0.03) and counts.count(3) + counts.count(2) == 1000


def test_interleaved_schedule_draws_from_the_whole_mix_everywhere():
    config = TrainConfig(pass_mix=(0.5, 0.3, 0.0, 0.2), interleave=True, max_iters=2000)
    counts = np.array([pass_count(config, step) for step in range(2000)])
    for part in (counts[:1000], counts[1000:]):
        shares = [np.mean(part == k) for k in (1, 2, 3, 4)]
        assert shares == pytest.approx([0.5, 0.3, 0.0, 0.2], abs=0.05)


def test_one_kind_of_step_only():
    assert {pass_count(TrainConfig(pass_mix=(1,), max_iters=50), step) for step in range(60)} == {1}
    assert {pass_count(TrainConfig(pass_mix=(0, 0, 1), max_iters=50), step) for step in range(60)} == {3}


def test_learning_rate_is_wsd():
    config = TrainConfig(learning_rate=1.0, warmup_iters=4, max_iters=20, cooldown=0.25)
    rates = [learning_rate(config, step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4:16] == [1.0] * 12
    assert rates[15:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("settings", [{"warmup_iters": 0}, {"warmup_iters": 500}, {"cooldown": 0.0}, {"cooldown": 1.0}])
def test_learning_rate_stays_between_0_and_its_peak(settings):
    config = TrainConfig(max_iters=20, learning_rate=0.5, **settings)
    assert all(0 < learning_rate(config, step) <= 0.5 for step in range(20))


def test_prefix_mixin_is_a_share_of_the_steps():
    config = TrainConfig(prefix_mixin=0.3)
    assert np.mean([trainer.feedback_at(config, step).mixin for step in range(2000)]) == pytest.approx(0.3, abs=0.04)
    assert not any(trainer.feedback_at(TrainConfig(), step).mixin for step in range(100))


@pytest.mark.parametrize("field, value", [
    ("pass_mix", (0.5, 0.4)), ("pass_mix", ()), ("pass_mix", (1.5, -0.5)), ("pass_mix", (math.nan,)),
    ("batch_size", -1), ("batch_size", 0), ("max_iters", -5), ("learning_rate", math.nan), ("learning_rate", math.inf),
    ("jitter", -0.1), ("prefix_mixin", 1.5), ("cooldown", 2.0), ("lam", -1.0), ("seed", -1), ("eval_passes", 0),
    ("beta1", 1.0), ("beta2", 1.0)])
def test_impossible_settings_are_named(field, value):
    with pytest.raises(ValueError, match=field.rstrip("_")):
        TrainConfig(**{field: value})


def test_decay_is_on_matrices_only_and_muon_takes_the_hidden_ones():
    model = GPT(GPTConfig(**SHAPE))
    [adamw] = make_optimizers(model, TrainConfig(weight_decay=0.1))
    for group in adamw.param_groups:
        assert {p.ndim for p in group["params"]} == ({2} if group["weight_decay"] else {1})
    adamw, muon = make_optimizers(model, TrainConfig(optimizer="muon"))
    in_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    expected = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and name != "embedding.weight"}
    assert in_muon == expected and id(model.fusion.W_H.weight) in in_muon
    in_adamw = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert not in_adamw & in_muon and len(in_adamw) + len(in_muon) == len(list(model.parameters()))


# One step and evaluation, against independent computations

def test_first_step_equals_one_computed_by_hand(start, corpus, tmp_path):
    start(max_iters=1, pass_mix=(0, 0, 1), jitter=0.0, lam=0.5, warmup_iters=0, grad_clip=0.1, cooldown=0.0)
    after, _ = load_model(tmp_path / "run")
    start(max_iters=0, overwrite=True, pass_mix=(0, 0, 1), jitter=0.0, lam=0.5, warmup_iters=0, cooldown=0.0)
    model, checkpoint = load_model(tmp_path / "run")
    tokens = load_tokens(Path(corpus) / "tiny", "train", load_meta(Path(corpus) / "tiny"))
    starts = np.random.default_rng((1, trainer.BATCH, 0, 0)).integers(len(tokens) - 16, size=4)
    rows = torch.stack([torch.from_numpy(tokens[s:s + 17].astype(np.int64)) for s in starts])
    nll = [F.cross_entropy(model.head(h).reshape(-1, model.config.vocab_size), rows[:, 1:].reshape(-1))
           for h in model.passes(rows[:, :-1], 3)]
    loss = nll[0] + 0.5 * (nll[1] + nll[2]) / 2
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    with torch.no_grad():
        for p in model.parameters():  # AdamW's first step: decay, then the sign of the gradient, nearly
            g = p.grad * 0.1 / norm
            decay = 0.1 if p.ndim == 2 else 0.0
            p.mul_(1 - 1e-3 * decay).sub_(1e-3 * g / (g.abs() + 1e-8))
    for (name, ours), theirs in zip(model.named_parameters(), after.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-6), name
    line = next(line for line in log_of_first_run(start, tmp_path) if "losses" in line)
    assert line["losses"] == pytest.approx([x.item() for x in nll], abs=1e-5)


def log_of_first_run(start, tmp_path):
    start(max_iters=1, overwrite=True, pass_mix=(0, 0, 1), jitter=0.0, lam=0.5, warmup_iters=0, cooldown=0.0)
    return log(tmp_path / "run")


def test_evaluation_is_the_mean_over_evenly_spaced_windows(tiny_run, corpus):
    model, _ = load_model(tiny_run)
    tokens = load_tokens(Path(corpus) / "tiny", "val", load_meta(Path(corpus) / "tiny"))
    starts = [int(i * (len(tokens) - 17) / 6) for i in range(7)]
    rows = [torch.from_numpy(tokens[s:s + 17].astype(np.int64)) for s in starts]
    expected = np.mean([[F.cross_entropy(model.head(h)[0], row[1:]).item() for h in model.passes(row[None, :-1], 3)]
                        for row in rows], axis=0)
    model.train()
    assert trainer.evaluate(model, tokens, 7, 3, batch_size=3) == pytest.approx(expected, abs=1e-5)
    assert model.training


def test_log_has_the_promised_fields(start, tmp_path):
    result = start(pass_mix=(0.5, 0.0, 0.5), max_iters=8, eval_interval=4)
    lines = log(tmp_path / "run")
    steps, evaluations = [x for x in lines if "losses" in x], [x for x in lines if "val_losses" in x]
    assert [x["step"] for x in steps] == list(range(1, 9)) and [x["step"] for x in evaluations] == [0, 4, 8]
    assert [x["passes"] for x in steps] == [1] * 4 + [3] * 4 == [len(x["losses"]) for x in steps]
    assert [x["tokens"] for x in steps] == [64 * n for n in range(1, 9)]
    assert [x["compute_tokens"] for x in steps] == [64, 128, 192, 256, 448, 640, 832, 1024]
    assert set(steps[0]) >= {"step", "passes", "losses", "lr", "grad_norm", "tokens", "compute_tokens", "seconds"}
    assert len(evaluations[-1]["val_losses"]) == 3 and result["val_losses"] == evaluations[-1]["val_losses"]
    assert result["finished"] and result["feedback_steps"] == 4
    assert result["best_val_losses"] == [min(e["val_losses"][k] for e in evaluations) for k in range(3)]


def test_training_learns(start):
    assert start(max_iters=150, learning_rate=3e-3, eval_interval=0)["val_losses"][1] < 2.0


# Randomness and resume

EVERYTHING = {"pass_mix": (0.4, 0.3, 0.3), "dropout": 0.1, "prefix_mixin": 0.5, "jitter": 0.1, "grad_accum": 2,
              "max_iters": 10, "eval_interval": 0, "eval_iters": 1}


@pytest.mark.parametrize("more", [{}, {"optimizer": "muon", "interleave": True}])
def test_five_and_five_resumed_steps_equal_ten(start, tmp_path, more):
    start(out_dir=str(tmp_path / "whole"), **EVERYTHING, **more)
    first = start(**EVERYTHING, **more, stop=lambda step: step == 5)
    assert not first["finished"] and first["step"] == 5
    second = start(**EVERYTHING, **more, resume=True)
    assert second["finished"]
    whole, parts = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "run")
    for part in ("model", "optimizers", "step", "tokens", "compute_tokens", "val_losses", "best_val_losses"):
        assert same_tensors(whole[part], parts[part]), part
    for ours, theirs in zip(log(tmp_path / "whole"), log(tmp_path / "run"), strict=True):
        drop = {"seconds", "tokens_per_second"}
        assert {k: v for k, v in ours.items() if k not in drop} == {k: v for k, v in theirs.items() if k not in drop}


def test_lines_after_the_checkpoint_are_dropped_on_resume(start, tmp_path):
    start(**EVERYTHING, stop=lambda step: step == 5)
    with open(tmp_path / "run" / "log.jsonl", "a") as file:
        file.write(json.dumps({"step": 6, "losses": [9.9], "passes": 1}) + "\n" + '{"step": 7, "los')  # a torn line
    start(**EVERYTHING, resume=True)
    lines = [line for line in log(tmp_path / "run") if "losses" in line]
    assert [line["step"] for line in lines] == list(range(1, 11)) and [9.9] not in [line["losses"] for line in lines]


def test_a_log_with_another_line_is_refused_and_named(start, tmp_path):
    start(**EVERYTHING, stop=lambda step: step == 5)
    for line in ("garbage", "[1]", "3", '{"loss": 1}'):
        (tmp_path / "run" / "log.jsonl").write_text(line + "\n")
        with pytest.raises(UserError, match="is no line of a log; delete"):
            start(**EVERYTHING, resume=True)


def test_an_out_dir_that_cannot_be_is_named(start, tmp_path):
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below"):
        with pytest.raises(UserError, match="--out_dir=.*name a folder"):
            start(out_dir=str(tmp_path / out))


def test_a_folder_that_never_saved_offers_no_resume(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text("")
    with pytest.raises(UserError) as error:
        start()
    assert "--overwrite" in str(error.value) and "--resume" not in str(error.value)
    with pytest.raises(UserError, match="without --resume"):
        start(resume=True)
    assert start(max_iters=1, overwrite=True)["finished"]


def test_evaluation_changes_nothing(start, tmp_path):
    often = {"eval_interval": 1, "eval_iters": 3, "eval_passes": 4, "log_interval": 1}
    never = {"eval_interval": 0, "eval_iters": 0, "log_interval": 0}
    start(**EVERYTHING | often)
    start(**EVERYTHING | never, out_dir=str(tmp_path / "never"))
    a, b = load_checkpoint(tmp_path / "run"), load_checkpoint(tmp_path / "never")
    assert same_tensors(a["model"], b["model"]) and same_tensors(a["optimizers"], b["optimizers"])
    assert log(tmp_path / "never") == []


def test_batches_depend_on_seed_and_step_alone_and_never_repeat(corpus, tmp_path):
    def batches(**settings):
        config = build(TrainConfig, QUICK | {"data_dir": corpus, "out_dir": str(tmp_path / "none")} | settings)
        this = Run(config, GPTConfig(**SHAPE))
        return [this.batch(step, place)[0].tolist() for step in range(4) for place in range(2)]
    first = batches()
    assert first == batches(pass_mix=(1.0,), jitter=0.5) != batches(seed=2)
    assert len({json.dumps(rows) for rows in first}) == 8


def test_single_pass_steps_leave_the_fusion_as_it_was(start, tmp_path):
    start(pass_mix=(1.0,), max_iters=0)
    before = load_checkpoint(tmp_path / "run")["model"]
    start(pass_mix=(1.0,), max_iters=6, overwrite=True)
    after = load_checkpoint(tmp_path / "run")["model"]
    for name in after:
        assert torch.equal(before[name], after[name]) == name.startswith("fusion."), name


def test_single_pass_training_equals_that_of_a_plain_model(start, tmp_path):
    start(pass_mix=(1.0,), max_iters=6)
    start(pass_mix=(1.0,), max_iters=6, fusion="none", out_dir=str(tmp_path / "plain"))
    fused, plain = (load_checkpoint(tmp_path / name)["model"] for name in ("run", "plain"))
    assert all(torch.equal(plain[name], fused[name]) for name in plain)


# Starting from another run, settings that do not go together

def test_init_from_takes_the_weights_and_adds_a_fresh_fusion(start, plain_run, tmp_path):
    start(init_from=plain_run, max_iters=0)
    mid, plain = load_checkpoint(tmp_path / "run"), load_checkpoint(plain_run)
    assert all(torch.equal(plain["model"][name], mid["model"][name]) for name in plain["model"])
    assert mid["model"].keys() - plain["model"].keys() == {"fusion.W_H.weight", "fusion.W_G.weight"}
    assert mid["step"] == 0 and not mid["optimizers"][0]["state"]
    result = start(init_from=plain_run, max_iters=4, overwrite=True)
    assert result["feedback_steps"] == 4


@pytest.mark.parametrize("settings, words", [
    ({"n_layer": 3}, ["--init_from", "n_layer", "2", "3"]),
    ({"init_from": "nowhere"}, ["no checkpoint", "nowhere"])])
def test_init_from_says_what_does_not_fit(start, plain_run, tmp_path, settings, words):
    with pytest.raises(UserError) as error:
        start(**{"init_from": plain_run} | settings)
    assert all(word in str(error.value) for word in words) and not (tmp_path / "run").exists()


def test_init_from_another_tokenizer_is_refused(start, plain_run, tmp_path):
    checkpoint = load_checkpoint(plain_run)
    checkpoint["tokenizer"] = {"kind": "char", "symbols": "ab"}
    torch.save(checkpoint, tmp_path / "other.pt")
    with pytest.raises(UserError, match="tokenizer"):
        start(init_from=str(tmp_path / "other.pt"))


def test_an_existing_run_is_not_touched_without_a_word(start, tmp_path):
    start(max_iters=2)
    before = (tmp_path / "run" / "ckpt.pt").read_bytes()
    with pytest.raises(UserError, match="--resume.*--overwrite"):
        start(max_iters=2)
    with pytest.raises(ValueError, match="exclude"):
        TrainConfig(resume=True, overwrite=True)
    assert (tmp_path / "run" / "ckpt.pt").read_bytes() == before
    assert start(max_iters=1, overwrite=True)["step"] == 1


def test_resume_wants_the_same_run(start, tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        start(resume=True)
    start(max_iters=2)
    for setting, value in (("learning_rate", 0.5), ("n_layer", 1), ("pass_mix", (1.0,)), ("lam", 0.5)):
        with pytest.raises(UserError, match=f"--resume: {setting.rstrip('_')} is"):
            start(max_iters=4, resume=True, **{setting: value})
    assert start(max_iters=4, resume=True, eval_interval=1)["step"] == 4  # longer, and looked at more often
    assert start(max_iters=4, resume=True)["finished"]


def test_resume_refuses_a_dataset_prepared_otherwise(start, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "data")
    start(max_iters=2, data_dir=str(tmp_path / "data"))
    import prepare
    (tmp_path / "tiny.txt").write_text("another text of digits 0123456789\n" * 100)
    prepare.main([f"--input={tmp_path}/tiny.txt", f"--data_dir={tmp_path}/data"])
    with pytest.raises(UserError, match="dataset"):
        start(max_iters=4, data_dir=str(tmp_path / "data"), resume=True)


def test_a_short_corpus_says_which_block_size_works(start, corpus, tmp_path):
    import prepare
    (tmp_path / "short.txt").write_text("abcdefghij" * 20)
    prepare.main([f"--input={tmp_path}/short.txt", f"--data_dir={tmp_path}", "--val_fraction=0.1"])
    with pytest.raises(UserError, match=r"180 and 20: at most --block_size=19"):
        start(dataset="short", data_dir=str(tmp_path), block_size=20)
    assert start(dataset="short", data_dir=str(tmp_path), block_size=19, max_iters=2)["finished"]


def test_multi_pass_steps_need_a_fusion(start):
    with pytest.raises(UserError, match="pass_mix.*fusion=none"):
        start(fusion="none")


@pytest.mark.parametrize("settings", [
    {"max_iters": 0}, {"max_iters": 1}, {"max_iters": 5, "eval_interval": 50}, {"max_iters": 3, "warmup_iters": 50},
    {"max_iters": 3, "warmup_iters": 0}, {"max_iters": 3, "eval_interval": 0}, {"max_iters": 3, "log_interval": 0},
    {"max_iters": 3, "eval_iters": 0}, {"max_iters": 2, "dtype": "bfloat16"}, {"max_iters": 2, "fusion": "concat"},
    {"max_iters": 2, "n_kv_head": 1, "qk_norm": False, "depth_scale": False, "fusion": "add", "detach": True}])
def test_odd_but_possible_settings_run_and_save(start, tmp_path, settings):
    assert start(**settings)["finished"]
    assert load_checkpoint(tmp_path / "run")["step"] == settings["max_iters"]


@pytest.mark.parametrize("settings, words", [
    ({"device": "gpu"}, "--device=gpu: this machine has"), ({"device": "cuda:7"}, "this machine has"),
    ({"dtype": "float16"}, "float16 needs cuda"), ({"dataset": "unknown"}, "prepare.py")])
def test_what_the_machine_does_not_have(start, tmp_path, settings, words):
    with pytest.raises(UserError, match=words):
        start(**settings)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(start, tmp_path, monkeypatch):
    start(max_iters=3)
    before = (tmp_path / "run" / "ckpt.pt").read_bytes()
    monkeypatch.setattr(GPT, "head", lambda self, h: F.linear(h, self.embedding.weight) * float("nan"))
    with pytest.raises(UserError, match="loss.*nan.*gradient norm nan.*no number.*checkpoint is kept.*--learning_rate"):
        start(max_iters=6, resume=True)
    assert (tmp_path / "run" / "ckpt.pt").read_bytes() == before


def test_a_wild_learning_rate_ends_with_a_hint_or_finite_numbers(start, tmp_path):
    try:
        assert all(map(math.isfinite, start(learning_rate=1e3, grad_clip=0, max_iters=30)["val_losses"]))
    except UserError as error:
        assert "--learning_rate" in str(error)


def test_compiled_and_plain_checkpoints_have_the_same_names(start, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "compiled", lambda model, device: torch.compile(model, backend="eager"))
    start(max_iters=2, compile=True, pass_mix=(0.5, 0.5))
    names = load_checkpoint(tmp_path / "run")["model"].keys()
    assert names == GPT(GPTConfig(**SHAPE)).state_dict().keys()


def test_without_a_compiler_training_goes_on_in_eager(corpus, tmp_path):
    away = os.environ | {"CXX": "/no/c++", "PATH": "/no", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/cache"}
    done = subprocess.run(command(corpus, tmp_path / "run", max_iters=1, compile=True), env=away,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "going on in eager" in done.stderr and (tmp_path / "run" / "ckpt.pt").exists()


# From the command line

def test_users_mistakes_end_in_one_line_and_exit_code_2(corpus, tmp_path):
    for wrong, words in (({"learning_rte": "1e-3"}, "learning_rate"), ({"n_head": 3}, "n_embd"),
                         ({"lambda": "x"}, "lambda")):
        done = subprocess.run(command(corpus, tmp_path / "run", **wrong), capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = subprocess.run([sys.executable, str(ROOT / "train.py")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and str(tmp_path / "data") in done.stderr and "prepare.py" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_closed_pipe_is_no_fault_of_the_folder(corpus, tmp_path):
    process = subprocess.Popen(command(corpus, tmp_path / "run", max_iters=100_000), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    assert process.wait(timeout=60) == 141 and process.stderr.read() == ""


def test_config_files_set_everything_and_name_the_run(corpus, tmp_path):
    text = "lambda = 0.5\npass_mix = [0.5, 0.5]\nn_embd = 32\nn_head = 2\nmax_iters = 1e3\n"
    (tmp_path / "small.toml").write_text(text)
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "small.toml", "--max_iters=2", "--dataset=tiny",
                           f"--data_dir={corpus}", "--device=cpu", "--eval_iters=1"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = load_checkpoint(tmp_path / "out" / "small")["train_config"]
    assert config["lam"] == 0.5 and config["pass_mix"] == [0.5, 0.5] and config["max_iters"] == 2


@pytest.mark.parametrize("recipe", sorted((ROOT / "config").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid(recipe):
    from harness.configurator import parse
    config, shape, _ = parse([str(recipe)], TrainConfig, GPTConfig)
    assert asdict(config) != asdict(TrainConfig()) and recipe.read_text().startswith("#")


def test_scripts_do_nothing_when_imported(tmp_path):
    names = [p.stem for p in ROOT.glob("*.py") if not p.stem.startswith(("test_", "conftest"))]
    names += [f"experiments.{p.stem}" for p in (ROOT / "experiments").glob("*.py") if p.stem != "__init__"]
    done = subprocess.run([sys.executable, "-c", "import " + ", ".join(names)], cwd=tmp_path, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and not done.stdout and not list(tmp_path.iterdir()), done.stderr


def wait_for_step(folder, step: int, process) -> None:
    """Returns once the run has logged that step; fails after a minute or when it ended."""
    for _ in range(600):
        if (folder / "log.jsonl").exists() and f'"step": {step},' in (folder / "log.jsonl").read_text():
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    raise AssertionError("the run did not get that far")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_130(corpus, tmp_path, number):
    args = command(corpus, tmp_path / "run", max_iters=100_000, eval_interval=0, eval_iters=0)
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "--resume" in out
    step = load_checkpoint(tmp_path / "run")["step"]
    assert step >= 3 and log(tmp_path / "run")[-1]["step"] == step


def test_a_second_signal_exits_at_once(corpus, tmp_path):
    slow = ("import sys, time, train, configurator\n"
            "train.Run.train_step = lambda self: [time.sleep(0.05) for _ in range(10_000)]\n"
            "print('ready', flush=True)\nconfigurator.run(train.main)\n")
    args = [sys.executable, "-c", slow, *command(corpus, tmp_path / "run", eval_iters=0)[2:]]
    process = subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "parameters" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # the step is being finished
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err


def test_kill_9_leaves_a_checkpoint_that_loads(corpus, tmp_path):
    args = command(corpus, tmp_path / "run", max_iters=100_000, eval_interval=1, eval_iters=0)  # saves at every step
    for attempt in range(3):
        resume = ["--resume"] if attempt else []
        process = subprocess.Popen(args + resume, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_for_step(tmp_path / "run", 5 * (attempt + 1), process)
        time.sleep(0.01 * attempt)
        process.kill()
        process.communicate()
        assert load_checkpoint(tmp_path / "run")["step"] >= 4 * (attempt + 1)


# Several processes

def torchrun(script: str, tmp_path, *args: str) -> subprocess.CompletedProcess:
    (tmp_path / "script.py").write_text(script)
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                           str(tmp_path / "script.py"), *args], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})


def test_two_processes_equal_one_with_twice_the_micro_batches(start, corpus, tmp_path):
    settings = {"pass_mix": (0.4, 0.3, 0.3), "max_iters": 10, "jitter": 0.1, "prefix_mixin": 0.5, "grad_accum": 2}
    text = settings | {"pass_mix": "0.4,0.3,0.3"}
    script = ("import sys, torch, train\n"
              "save = train.Run.save\n"
              f"train.Run.save = lambda self: (torch.save(self.model.state_dict(), r'{tmp_path}/rank%d.pt'"
              " % self.processes.rank), save(self))\n"
              "sys.exit(train.main(sys.argv[1:]))\n")
    done = torchrun(script, tmp_path, *command(corpus, tmp_path / "two", **text)[2:])
    assert done.returncode == 0, done.stderr
    start(**settings | {"grad_accum": 4})
    one, two = load_checkpoint(tmp_path / "run"), load_checkpoint(tmp_path / "two")
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert same_tensors(*ranks) and same_tensors(ranks[0], two["model"])
    assert one["tokens"] == two["tokens"]
    for name, weight in one["model"].items():
        assert torch.allclose(weight, two["model"][name], atol=1e-5), name
    assert [line["step"] for line in log(tmp_path / "two") if "losses" in line] == list(range(1, 11))
    for ours, theirs in zip(log(tmp_path / "run"), log(tmp_path / "two"), strict=True):
        for field in ("losses", "val_losses"):
            assert ours.get(field, []) == pytest.approx(theirs.get(field, []), abs=1e-4)


def test_gradients_of_two_processes_come_from_the_whole_multi_pass_loss(start, corpus, tmp_path):
    """After single-pass steps under DDP the fusion is untouched on both ranks, without error."""
    done = torchrun("import sys, train\nsys.exit(train.main(sys.argv[1:]))\n", tmp_path,
                    *command(corpus, tmp_path / "two", pass_mix="1", max_iters=3)[2:])
    assert done.returncode == 0, done.stderr
    start(pass_mix=(1.0,), max_iters=0)
    fresh, trained = load_checkpoint(tmp_path / "run")["model"], load_checkpoint(tmp_path / "two")["model"]
    assert torch.equal(fresh["fusion.W_H.weight"], trained["fusion.W_H.weight"])
    assert not torch.equal(fresh["embedding.weight"], trained["embedding.weight"])


def test_a_cpu_run_asks_nothing_of_cuda(start, monkeypatch):
    def touched(*args):
        raise AssertionError("CUDA was asked")
    for name in ("is_available", "device_count", "current_device", "init", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, touched)
    assert start(max_iters=2)["finished"]
