"""Trains a GPT by passes (Eqs. 7-10) on data of prepare.py -> out/<run>/ckpt.pt and log.jsonl.

    python train.py config/demo.toml --max_iters=500    any setting: --key=value, after a TOML file
    python train.py config/demo.toml --resume           continues where the run stopped
    torchrun --standalone --nproc_per_node=2 train.py config/shakespeare_gpu.toml

Whatever is random is a function of (seed, purpose, step, micro-batch), never of what ran before.
So a run that stopped and was resumed equals one that never stopped, to the last bit on a CPU.

The learning rate falls to 0 over the last `cooldown` of a run, so its length is set at the start. A
run that may become longer has --cooldown=0: it can be resumed with a larger --max_iters, and a
finished model branches off from it by a run of its own, --init_from=out/RUN --out_dir=out/ENDING
--seed=2 --warmup_iters=0 --cooldown=1. It has another seed, because with the same one it would read
the same batches again.
"""

import contextlib
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from harness.checkpoint import (
    check_same_run,
    initial_weights,
    load_checkpoint,
    not_finite,
    save_checkpoint,
)
from harness.configurator import UserError, parse, require, setting, tell
from harness.configurator import run as run_script
from harness.data import even_starts, load_meta, load_tokens, windows
from harness.machine import (
    Processes,
    compile_blocks,
    memory_for,
    pick_device,
    pick_dtype,
    stop_on_signals,
)
from harness.runlog import Log, locked, read_log, writing_to
from model import GPT, Feedback, GPTConfig, objective

# --------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run but the model's shape. ValueError, naming its flag, for a wrong one."""

    dataset: str = setting("pydocs", "folder of data_dir, made by prepare.py")
    data_dir: str = setting("data", "where prepare.py wrote", path=True)
    out_dir: str = setting(
        "", "the run's folder; empty: out/<name of the config file>", path=True
    )
    init_from: str = setting(
        "", "run or checkpoint whose weights to start from (mid-training)", path=True
    )
    resume: bool = setting(False, "continue the run in out_dir")
    overwrite: bool = setting(False, "replace the run in out_dir, once the new one first saves")
    seed: int = setting(1, "of weights, batches, pass counts and jitter")
    pass_mix: tuple[float, ...] = setting(
        (0.0, 0.0, 1.0), "shares of the steps with 1, 2, 3, ... passes; they sum to 1"
    )
    interleave: bool = setting(
        False, "draw 1, 2, 3, ... at every step instead of all single-pass steps first"
    )
    lam: float = setting(1.0, "weight of the later passes' mean loss, Eq. (10)")
    jitter: float = setting(0.02, "sigma of the uniform noise on the states fed back, Eq. (11)")
    detach: bool = setting(False, "cut the gradient between passes")
    prefix_mixin: float = setting(
        0.0, "share of the multi-pass steps with random plain prefixes, 0 to 1"
    )
    max_iters: int = setting(2000, "training steps")
    batch_size: int = setting(12, "rows of a micro-batch, on each process")
    grad_accum: int = setting(1, "micro-batches of a step, on each process")
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "adamw, or muon: Muon for the hidden matrices"
    )
    learning_rate: float = setting(1e-3, "peak; WSD: warmup, constant, linear cool-down to 0")
    warmup_iters: int = setting(50, "steps of linear warmup")
    cooldown: float = setting(0.25, "share of the run, its last, in which the rate falls to 0")
    weight_decay: float = setting(
        0.1, "on hidden matrices: neither the embedding nor the gains decay"
    )
    beta1: float = setting(0.9, "AdamW")
    beta2: float = setting(0.95, "AdamW")
    grad_clip: float = setting(1.0, "largest gradient norm; 0: no clipping")
    eval_interval: int = setting(
        250, "steps between evaluations, which also save; 0: only at the start and at the end"
    )
    eval_iters: int = setting(20, "batches of an evaluation; 0: none")
    eval_passes: int = setting(4, "evaluate passes 1..eval_passes")
    log_interval: int = setting(10, "steps between log lines; 0: none")
    device: str = setting("auto", "auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "of the matrix products in training; evaluations compute in float32"
    )
    compile: bool = setting(False, "compile the blocks: slow to begin, then faster steps")
    recompute: bool = setting(
        False, "keep each block's input alone for the backward pass: less memory, more time"
    )

    def __post_init__(self):
        object.__setattr__(self, "pass_mix", tuple(float(share) for share in self.pass_mix))
        for name in ("batch_size", "grad_accum", "eval_passes"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "seed", "max_iters", "warmup_iters", "eval_interval", "eval_iters", "log_interval"
        ):
            require(self, name, getattr(self, name) >= 0, "at least 0")
        for name in ("lam", "jitter", "learning_rate", "weight_decay", "grad_clip"):
            require(self, name, 0 <= getattr(self, name) < math.inf, "at least 0, and finite")
        for name in ("cooldown", "prefix_mixin"):
            require(self, name, 0 <= getattr(self, name) <= 1, "a share, from 0 to 1")
        for name in ("beta1", "beta2"):
            require(self, name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        sums_to_1 = abs(sum(self.pass_mix) - 1) <= 1e-6
        shares = all(share >= 0 for share in self.pass_mix)
        require(self, "pass_mix", shares and sums_to_1, "shares of 1, 2, ... passes that sum to 1")
        either = not (self.resume and self.overwrite)
        require(self, "resume", either, "left out where --overwrite is given")


# --------------------------------------------------------------------------------------------------
# Randomness

BATCH, PASSES, MIXIN, NOISE, INIT = range(5)  # the purposes


def random_for(seed: int, purpose: int, *where: int) -> np.random.Generator:
    """The random numbers of one purpose at one place: where is a step, then a micro-batch of it."""
    return np.random.default_rng((seed, purpose, *where))


def seed_torch(seed: int, purpose: int, *where: int) -> None:
    """Seeds what PyTorch draws next, by the same rule."""
    torch.manual_seed(int(random_for(seed, purpose, *where).integers(2**62)))


# --------------------------------------------------------------------------------------------------
# The schedule


def in_first_stage(config: TrainConfig, step: int) -> bool:
    """Whether this step belongs to the single-pass steps with which a staged run begins."""
    return not config.interleave and step < round(config.pass_mix[0] * config.max_iters)


def pass_count(config: TrainConfig, step: int) -> int:
    """Forward passes of this step.

    Staged, the paper's order: the single-pass steps first, which are cheap and end in a plain
    model, then a draw from the rest of the mix at every step.
    Interleaved: a draw from the whole mix at every step.
    """
    mix = np.array(config.pass_mix)
    if not config.interleave:
        if in_first_stage(config, step) or not mix[1:].any():
            return 1
        mix[0] = 0
    draw = random_for(config.seed, PASSES, step)
    return int(draw.choice(len(mix), p=mix / mix.sum())) + 1


def passes_never_taken(config: TrainConfig) -> list[int]:
    """The numbers of passes above one that the mix has and no step of the run takes."""
    missing = {k for k, share in enumerate(config.pass_mix, start=1) if k > 1 and share > 0}
    for step in reversed(range(config.max_iters)):  # a staged run has them at its end
        if not missing:
            break
        missing.discard(pass_count(config, step))
    return sorted(missing) if config.max_iters else []


def feedback_at(config: TrainConfig, step: int) -> Feedback:
    """Jitter, detach, and whether this step mixes plain prefixes in."""
    mixin = random_for(config.seed, MIXIN, step).random() < config.prefix_mixin
    return Feedback(config.jitter, config.detach, bool(mixin))


def learning_rate(config: TrainConfig, step: int) -> float:
    """WSD: linear warmup, constant, linear cool-down to 0 over the last `cooldown` of the run."""
    warm = (step + 1) / max(config.warmup_iters, 1)
    cool = (config.max_iters - step) / max(config.cooldown * config.max_iters, 1)
    return config.learning_rate * min(warm, cool, 1.0)


def first_change(old: TrainConfig, new: TrainConfig, n_steps: int) -> int | None:
    """The first of n_steps steps, done under `old`, that `new` would have done otherwise.

    That is, at another learning rate or in another stage. None where there is none.
    """
    for step in range(n_steps):
        same_rate = learning_rate(old, step) == learning_rate(new, step)
        same_stage = in_first_stage(old, step) == in_first_stage(new, step)
        if not (same_rate and same_stage):
            return step
    return None


# --------------------------------------------------------------------------------------------------
# Evaluation and optimisers


def never() -> bool:
    """What an evaluation that nothing cuts short asks whether it should stop."""
    return False


def evaluate(
    model: GPT,
    tokens: np.ndarray,
    n_windows: int,
    n_passes: int,
    batch_size: int,
    stopped: Callable[[], bool] = never,
) -> list[float]:
    """Mean loss of passes 1..n_passes, in nats per token, over evenly spaced windows of a split.

    The same numbers for the same weights whenever and wherever it runs: it draws nothing, and
    computes in the weights' own float32, whatever the dtype of the training steps. An empty list
    when `stopped()` became true before the end.
    """
    block_size = model.config.block_size
    device = model.embedding.weight.device
    starts = even_starts(tokens, n_windows, block_size)
    total = np.zeros(n_passes)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for begin in range(0, len(starts), batch_size):
                if stopped():
                    return []
                rows = starts[begin : begin + batch_size]
                idx, targets = windows(tokens, rows, block_size, device)
                losses = model(idx, targets, n_passes)  # (n_passes,)
                total += len(rows) * losses.cpu().double().numpy()  # the last batch may be shorter
    finally:
        model.train(was_training)
    return (total / len(starts)).tolist()


def make_optimizers(model: GPT, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW, or with muon: Muon for the hidden matrices and AdamW for the rest.

    As in the paper only hidden matrices decay: neither the embedding nor the gains do.
    DEVIATION: the paper's optimiser is NorMuon.
    """
    embedding = model.embedding.weight
    hidden = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    gains = [p for p in model.parameters() if p.ndim < 2]
    rate = config.learning_rate
    decay = config.weight_decay
    groups = [{"params": [embedding, *gains], "weight_decay": 0.0}]
    if config.optimizer == "adamw":
        groups.append({"params": hidden, "weight_decay": decay})
    betas = (config.beta1, config.beta2)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)
    ]
    if config.optimizer == "muon":
        # match_rms_adamw: Muon's updates have AdamW's size, so one learning rate serves both
        muon = torch.optim.Muon(
            hidden, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    return optimizers


# --------------------------------------------------------------------------------------------------
# A run


class Run:
    """A run: its data, model, optimisers and counters. Only `save` writes.

    To drive one in another way than `train` does: `with opened(...) as (run, log)`, call
    run.train_step(), run.evaluate() and run.save(), and read run.counters.
    """

    def __init__(
        self, config: TrainConfig, model_config: GPTConfig, processes: Processes | None = None
    ):
        """UserError where settings, data, machine and folder do not go together."""
        self.config = config
        self.folder = Path(config.out_dir)
        self.processes = processes or Processes(pick_device(config.device))
        self.device = self.processes.device
        self.dtype = pick_dtype(config.dtype, self.device)

        data = Path(config.data_dir) / config.dataset
        self.meta = load_meta(data)
        self.tokens = {split: load_tokens(data, split, self.meta) for split in ("train", "val")}
        model_config = replace(model_config, vocab_size=self.meta["vocab_size"])
        check_settings(config, model_config, self.meta)
        check_folder(config)

        # What makes this run what it is: saved with it, and compared when it is resumed.
        self.identity = {
            "model_config": asdict(model_config),
            "train_config": asdict(config) | {"pass_mix": list(config.pass_mix)},
            "tokenizer": self.meta["tokenizer"],
            "dataset": self.meta,
            "micro_batches": self.processes.size * config.grad_accum,
        }
        self.counters: dict[str, Any] = {
            "step": 0,
            "tokens": 0,
            "compute_tokens": 0,  # tokens times passes
            "feedback_steps": 0,  # of more than one pass, those before init_from included
            "seconds": 0.0,  # in steps, without evaluations
            "val_losses": [],  # of the last evaluation, by pass
            "val_step": -1,  # the step after which that was; -1: none yet
        }
        seed_torch(config.seed, INIT)
        self.model = GPT(model_config)
        self.has_saved = False  # whether out_dir's checkpoint is of this run
        saved = load_checkpoint(self.folder) if config.resume else None
        if saved:
            check_same_run(saved, self.identity, self.folder)
            check_continues(config, saved, self.processes.size)
            # Where it began, though the flag need not be given again.
            self.identity["train_config"]["init_from"] = saved["train_config"]["init_from"]
            self.model.load_state_dict(saved["model"])
        elif config.init_from:
            inherited = initial_weights(self.model, config.init_from, self.meta["tokenizer"])
            self.counters["feedback_steps"] = inherited
        self.prepare_model()
        if saved:
            self.restore(saved)

    def prepare_model(self) -> None:
        """Everything around the model: device, optimisers, loss scaler, compiler, processes."""
        config = self.config
        self.model.to(self.device)
        self.model.recompute = config.recompute
        self.optimizers = make_optimizers(self.model, config)
        # float16's small gradients would be 0 without it; in other dtypes it does nothing.
        scales = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scales)
        self.compiled = config.compile and compile_blocks(self.model.blocks, self.device)
        # Single-pass steps leave the fusion without gradients, which DDP has to be told.
        unused = self.model.fusion is not None and config.pass_mix[0] > 0
        self.wrapped = self.processes.wrap(self.model, unused)

    def restore(self, saved: dict) -> None:
        """Takes up the counters and the optimisers' state of a checkpoint."""
        self.counters = {name: saved[name] for name in self.counters}
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if saved["scaler"]:  # empty where the run began in another dtype
            self.scaler.load_state_dict(saved["scaler"])
        self.has_saved = True

    # One step

    def train_step(self) -> dict:
        """One optimiser step -> its log line.

        UserError, before the weights change, when the loss or the gradient is not finite.
        """
        began = time.perf_counter()
        config = self.config
        step = self.counters["step"]
        k = pass_count(config, step)
        rate = learning_rate(config, step)
        losses = self.backward(step, k)  # (k,)
        norm = self.update(rate, losses)
        rows = config.batch_size * config.grad_accum * self.processes.size
        tokens = rows * self.model.config.block_size
        seconds = time.perf_counter() - began

        counters = self.counters
        counters["step"] += 1
        counters["tokens"] += tokens
        counters["compute_tokens"] += tokens * k
        counters["feedback_steps"] += int(k > 1)
        counters["seconds"] += seconds
        return {
            "step": step + 1,
            "passes": k,
            "losses": losses,
            "lr": rate,
            "grad_norm": norm,
            "tokens": counters["tokens"],
            "compute_tokens": counters["compute_tokens"],
            "seconds": round(counters["seconds"], 3),
            "tokens_per_second": round(tokens / seconds),
        }

    def backward(self, step: int, k: int) -> list[float]:
        """Gradients of a step's objective, over its micro-batches -> the mean loss of each pass."""
        n = self.config.grad_accum
        feedback = feedback_at(self.config, step)
        losses = torch.zeros(k, device=self.device)
        for i in range(n):
            # Two processes do one process's two micro-batches, in the same order.
            micro = i * self.processes.size + self.processes.rank
            idx, targets = self.batch(step, micro)
            seed_torch(self.config.seed, NOISE, step, micro)  # jitter, prefixes, dropout
            with contextlib.ExitStack() as context:
                if self.processes.size > 1 and i < n - 1:
                    # The processes average their gradients once, after the last micro-batch.
                    context.enter_context(self.wrapped.no_sync())
                with torch.autocast(
                    self.device.type, self.dtype, enabled=self.dtype != torch.float32
                ):
                    micro_losses = self.wrapped(idx, targets, k, feedback)  # (k,)
                self.scaler.scale(objective(micro_losses, self.config.lam) / n).backward()
            losses += micro_losses.detach() / n
        return self.processes.mean(losses).tolist()

    def update(self, rate: float, losses: list[float]) -> float:
        """Changes the weights by the gradients -> the gradient's norm before clipping."""
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            for group in optimizer.param_groups:
                group["lr"] = rate
        limit = self.config.grad_clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        # With a loss scaler a gradient may overflow now and then. That step is left out, for every
        # optimiser: by itself one would step whose own gradients were finite, though clipping by an
        # infinite norm has made them 0, and its weights would decay. A loss that is scaled down is
        # not what makes gradients overflow: then they are wrong for another reason.
        scaled_up = self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        overflow = scaled_up and not math.isfinite(norm)
        checked = losses if overflow else [*losses, norm]
        if not all(math.isfinite(value) for value in checked):
            raise self.diverged(f"loss of each pass {losses}, gradient norm {norm}")
        for optimizer in self.optimizers:
            if not overflow:
                self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        return norm

    def batch(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """The tokens and next tokens, (B, T) each, of one micro-batch."""
        tokens = self.tokens["train"]
        block_size = self.model.config.block_size
        draw = random_for(self.config.seed, BATCH, step, micro)
        starts = draw.integers(len(tokens) - block_size, size=self.config.batch_size)  # (B,)
        return windows(tokens, starts, block_size, self.device)

    # Evaluation and checkpoints

    def interval_ends(self) -> bool:
        """Whether the run is at a step after which it evaluates and saves."""
        step = self.counters["step"]
        interval = self.config.eval_interval
        return step == self.config.max_iters or (interval > 0 and step > 0 and step % interval == 0)

    def evaluation_is_due(self) -> bool:
        """Whether an evaluation belongs here and is not there yet, as after one cut short."""
        step = self.counters["step"]
        here = step == 0 or self.interval_ends()
        return self.config.eval_iters > 0 and here and self.counters["val_step"] != step

    def evaluate(self, stopped: Callable[[], bool] = never) -> dict:
        """Validation losses -> their log line, kept in the counters too.

        With no losses in it when `stopped()` became true before the end.
        """
        n_passes = 1 if self.model.fusion is None else self.config.eval_passes
        n_rows = self.config.batch_size
        n_windows = self.config.eval_iters * n_rows
        with contextlib.ExitStack() as context:
            if self.compiled:  # one graph is enough: that of the training step
                context.enter_context(torch.compiler.set_stance("force_eager"))
            losses = evaluate(
                self.model, self.tokens["val"], n_windows, n_passes, n_rows, stopped
            )
        if not all(math.isfinite(loss) for loss in losses):
            raise self.diverged(f"validation loss {losses}")
        step = self.counters["step"]
        if losses:
            self.counters |= {"val_losses": losses, "val_step": step}
        return {"step": step, "val_losses": losses}

    def save(self) -> None:
        """Writes the checkpoint. UserError, and the one before is kept, for weights not finite."""
        wrong = not_finite(self.model.state_dict())
        if wrong:
            raise self.diverged(wrong)
        if self.processes.rank == 0:
            state = {
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scaler": self.scaler.state_dict(),
            }
            save_checkpoint(self.folder, self.identity | self.counters | state)
        self.has_saved = True

    def diverged(self, what: str) -> UserError:
        """The complaint about numbers that are not finite, with ways out that work."""
        config = self.config
        step = self.counters["step"]
        kept = "nothing was saved yet"
        if self.has_saved:
            kept = "the last checkpoint is kept"
        elif (self.folder / "ckpt.pt").exists():
            kept = "the checkpoint there, of the run before, is kept"
        said = f"after step {step}: {what}: not finite; {kept}"
        if step == 0 and config.init_from:  # no rate has changed a weight yet
            return UserError(f"{said}. --init_from={config.init_from}: start from other weights")
        smaller = f"--learning_rate={min(config.learning_rate / 3, 1e-3):.2g}"
        if config.grad_clip == 0:
            smaller += " --grad_clip=1"
        ways = f"start anew with --overwrite {smaller}"
        if config.resume:
            ways += " in place of --resume"
        # Weights that do no better than a guess are spoilt already, though they are finite.
        val_losses = self.counters["val_losses"]
        spoilt = val_losses and min(val_losses) > 0.99 * math.log(self.meta["vocab_size"])
        if self.has_saved and not spoilt:
            branch = branch_flags(config, self.counters["feedback_steps"])
            ways += f", or continue from that checkpoint with {branch} {smaller}"
        return UserError(f"{said}. At a lower rate: {ways}")


# --------------------------------------------------------------------------------------------------
# What does not go together


def check_settings(config: TrainConfig, model_config: GPTConfig, meta: dict) -> None:
    """UserError where settings and data do not go together."""
    shortest = min(meta["train_tokens"], meta["val_tokens"])
    if shortest <= model_config.block_size:
        way_out = "prepare a longer text"
        if shortest > 2:
            way_out = f"at most --block_size={shortest - 1}"
        raise UserError(
            f"--block_size={model_config.block_size}: each split needs one token more, and "
            f"{config.dataset} has {meta['train_tokens']} and {meta['val_tokens']}: {way_out}"
        )
    if model_config.fusion == "none" and config.pass_mix[0] < 1:
        raise UserError(
            f"--pass_mix={list(config.pass_mix)} has multi-pass steps, which need a fusion, and "
            "--fusion=none; give --pass_mix=1"
        )
    missing = passes_never_taken(config)
    if missing:
        none_left = len(missing) == sum(share > 0 for share in config.pass_mix[1:])
        without = "; feedback will not be trained" if none_left else ""
        tell(
            f"--pass_mix={list(config.pass_mix)}: none of --max_iters={config.max_iters} steps "
            f"will take {' or '.join(map(str, missing))} passes{without}"
        )


def check_folder(config: TrainConfig) -> None:
    """UserError where out_dir holds a run that the settings do not mention."""
    if config.resume or config.overwrite:
        return
    folder = Path(config.out_dir)
    with writing_to(folder):
        if (folder / "ckpt.pt").exists():
            raise UserError(
                f"{folder} already holds a run: --resume it, --overwrite it, or choose another "
                "--out_dir"
            )
        last = max((entry["step"] for entry in read_log(folder / "log.jsonl")), default=0)
    if last > 0:  # a log without a trained step is worth nothing
        raise UserError(
            f"{folder} holds the log of a run of {last} steps that saved no checkpoint: "
            "--overwrite it, or choose another --out_dir"
        )


def check_continues(config: TrainConfig, saved: dict, n_processes: int) -> None:
    """UserError where the steps to come would not continue those that were done.

    The batch is processes x grad_accum x batch_size, and belongs to the run.
    """
    folder = config.out_dir
    theirs = saved["micro_batches"]
    if theirs != n_processes * config.grad_accum:
        way_out = f"start {theirs} processes, or one with --grad_accum={theirs}"
        if theirs % n_processes == 0:
            way_out = f"give --grad_accum={theirs // n_processes}"
        raise UserError(
            f"--resume: a step of {folder} takes {theirs} micro-batches, and here "
            f"{n_processes} processes x --grad_accum={config.grad_accum} take "
            f"{n_processes * config.grad_accum}: {way_out}"
        )
    old = replace(config, max_iters=saved["train_config"]["max_iters"])
    step = first_change(old, config, saved["step"])
    if config.max_iters < saved["step"]:
        why = "it has done more steps already"
        hint = ""
    elif step is not None:
        what = "another learning rate or number of passes"
        why = f"its steps from {step + 1} on would have had {what}"
        hint = (
            ". A run that is to become longer needs --cooldown=0, and no end of its single-pass "
            "steps, from the start"
        )
    else:
        return
    raise UserError(
        f"--resume: --max_iters={config.max_iters} does not continue {folder}, which is at step "
        f"{saved['step']} of {old.max_iters}: {why}. Finish it with --max_iters={old.max_iters}, "
        f"or start from its weights with {branch_flags(config, saved['feedback_steps'])} in place "
        f"of --resume{hint}"
    )


def branch_flags(config: TrainConfig, feedback_steps: int) -> str:
    """The flags of a new run that starts from the weights of this one.

    It reads other batches, and once feedback is trained it does not return to single-pass steps.
    """
    folder = str(Path(config.out_dir))  # without a slash at its end
    old = shlex.quote(folder)
    new = shlex.quote(f"{folder}_2")
    flags = f"--init_from={old} --out_dir={new} --seed={config.seed + 1}"
    later = sum(config.pass_mix[1:])
    staged = config.pass_mix[0] > 0 and later > 0 and not config.interleave
    if staged and feedback_steps:
        mix = [0.0, *(share / later for share in config.pass_mix[1:])]
        flags += f" --pass_mix={','.join(f'{share:.9g}' for share in mix)}"
    return flags


# --------------------------------------------------------------------------------------------------
# The loop


@contextlib.contextmanager
def alone_in(folder: Path, processes: Processes):
    """Holds a run's folder for these processes alone: the first locks it, and tells the others."""
    refusal = None
    with contextlib.ExitStack() as lock:
        if processes.rank == 0:
            try:
                lock.enter_context(locked(folder))
            except UserError as error:
                refusal = error
        if processes.any(refusal is not None):
            raise refusal or UserError(f"{folder} is not free, as the first process says")
        yield


@contextlib.contextmanager
def opened(config: TrainConfig, model_config: GPTConfig):
    """Yields (run, log): a new run, or with `resume` one that continues, alone in its folder."""
    with (
        memory_for("--batch_size, --block_size, --n_layer or --n_embd, or give --recompute"),
        Processes(pick_device(config.device)) as processes,
        alone_in(Path(config.out_dir), processes),
    ):
        run = Run(config, model_config, processes)
        log = Log(
            run.folder,
            run.counters["step"],
            config.max_iters,
            config.log_interval,
            fresh=not config.resume,
            active=processes.rank == 0,
        )
        n_parameters = sum(p.numel() for p in run.model.parameters())
        log.say(
            f"{run.folder}: {n_parameters:,} parameters, step {run.counters['step']} of "
            f"{config.max_iters}, {run.device}, {str(run.dtype).removeprefix('torch.')}"
        )
        try:
            yield run, log
        finally:
            log.close()


def train(config: TrainConfig, model_config: GPTConfig) -> dict:
    """A run from its start or checkpoint to its end, or until a signal: then it saves and returns.

    Returns the checkpoint's counters ("step", "tokens", "val_losses", ...) and "finished".
    """
    with stop_on_signals() as signals, opened(config, model_config) as (run, log):
        while True:
            if run.evaluation_is_due():
                entry = run.evaluate(stopped=lambda: bool(signals))
                if entry["val_losses"]:
                    log.evaluated(entry)
            # All processes stop after the same step, or one would wait for the others.
            halt = run.processes.any(bool(signals))
            at_end = run.counters["step"] >= config.max_iters
            trained = run.counters["step"] > 0 or at_end  # else there is nothing to save
            if trained and (halt or run.interval_ends()):
                run.save()
                log.saved()
            if halt or at_end:
                break
            log.trained(run.train_step())
        finished = at_end and not run.evaluation_is_due()
        log.say(farewell(run, finished))
        return run.counters | {"finished": finished}


def farewell(run: Run, finished: bool) -> str:
    """The last line of a run: what there is, and how to continue."""
    config = run.config
    step = run.counters["step"]
    if not run.has_saved:
        return f"stopped at step {step}, before there was anything to save"
    if not finished:
        return f"stopped at step {step}; {run.folder}/ckpt.pt has it; continue with --resume"
    longer = replace(config, max_iters=2 * config.max_iters)
    branch = branch_flags(config, run.counters["feedback_steps"])
    more = f"start from its weights with {branch}"
    if first_change(config, longer, step) is None:
        more = f"--resume it with a larger --max_iters, or {more}"
    return f"finished at step {step}; {run.folder}/ckpt.pt has it; to train on, {more}"


def main(argv: list[str]) -> int:
    config, model_config, files = parse(argv, TrainConfig, GPTConfig, doc=__doc__)
    name = Path(files[0]).stem if files else "default"
    config = replace(config, out_dir=config.out_dir or f"out/{name}")
    return 0 if train(config, model_config)["finished"] else 130


if __name__ == "__main__":
    run_script(main)
