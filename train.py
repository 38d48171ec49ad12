"""Trains a GPT by passes (Eqs. 7-10) on a folder made by prepare.py and writes out/<run>/ckpt.pt and log.jsonl.

    python train.py config/demo.toml --max_iters=500        any setting: --key=value, after an optional TOML file
    python train.py config/demo.toml --resume               goes on where the run stopped
    torchrun --standalone --nproc_per_node=2 train.py config/shakespeare_gpu.toml

Whatever is random is a function of (seed, purpose, step, micro-batch) and never of what ran before.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from harness.checkpoint import check_same_run, initial_weights, load_checkpoint, save_checkpoint
from harness.configurator import UserError, key, parse, run, setting
from harness.data import even_starts, load_meta, load_tokens, windows
from harness.machine import Processes, compiled, pick_device, pick_dtype, stop_on_signals
from model import GPT, Feedback, GPTConfig, objective
from harness.runlog import Log, writing_to

draw = np.random.default_rng  # of (seed, purpose, step, micro-batch)
BATCH, PASSES, MIXIN, NOISE, INIT = range(5)  # the purposes
COUNTERS = {"step": 0, "tokens": 0, "compute_tokens": 0, "feedback_steps": 0, "seconds": 0.0, "val_losses": [],
            "best_val_losses": []}


@dataclass(frozen=True)
class TrainConfig:
    """Everything of a run but the model's shape. ValueError, naming the field, for what cannot be."""

    dataset: str = setting("pydocs", "folder of data_dir, made by prepare.py")
    data_dir: str = setting("data", "where prepare.py wrote")
    out_dir: str = setting("", "the run's folder; empty: out/<name of the config file>")
    init_from: str = setting("", "run or checkpoint whose weights to start from, e.g. a plain one (mid-training)")
    resume: bool = setting(False, "go on with the run in out_dir")
    overwrite: bool = setting(False, "throw away the run in out_dir")
    seed: int = setting(1, "of weights, batches, pass counts and jitter")
    pass_mix: tuple[float, ...] = setting((0.0, 0.0, 1.0), "shares of the steps with 1, 2, 3, ... passes; sums to 1")
    interleave: bool = setting(False, "draw 1, 2, 3, ... at every step instead of all single-pass steps first")
    lam: float = setting(1.0, "weight of the later passes' mean loss, Eq. (10)")
    jitter: float = setting(0.02, "sigma of the uniform noise on the states fed back, Eq. (11)")
    detach: bool = setting(False, "cut the gradient between passes")
    prefix_mixin: float = setting(0.0, "share of the multi-pass steps with random plain prefixes, 0 to 1")
    max_iters: int = setting(2000, "training steps")
    batch_size: int = setting(12, "rows of a micro-batch, on each process")
    grad_accum: int = setting(1, "micro-batches of a step, on each process")
    optimizer: Literal["adamw", "muon"] = setting("adamw", "adamw, or muon: Muon for the hidden matrices")
    learning_rate: float = setting(1e-3, "peak; WSD: warmup, constant, linear cool-down to 0")
    warmup_iters: int = setting(50, "steps of linear warmup")
    cooldown: float = setting(0.25, "share of the run, its last, in which the rate falls to 0")
    weight_decay: float = setting(0.1, "on hidden matrices: neither the embedding nor the gains decay")
    beta1: float = setting(0.9, "AdamW")
    beta2: float = setting(0.95, "AdamW")
    grad_clip: float = setting(1.0, "largest gradient norm; 0: no clipping")
    eval_interval: int = setting(250, "steps between evaluations, which also save; 0: at the end only")
    eval_iters: int = setting(20, "batches of an evaluation; 0: none")
    eval_passes: int = setting(4, "evaluate passes 1..eval_passes")
    log_interval: int = setting(10, "steps between log lines; 0: none")
    device: str = setting("auto", "auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "of the matrix products")
    compile: bool = setting(False, "torch.compile the step")

    def __post_init__(self):
        object.__setattr__(self, "pass_mix", tuple(map(float, self.pass_mix)))
        for low, high, names in (
            (1, math.inf, "batch_size grad_accum eval_passes"),
            (0, math.inf, "seed max_iters warmup_iters eval_interval eval_iters log_interval"),
            (0, math.inf, "lam jitter learning_rate weight_decay grad_clip"),
            (0, 1, "cooldown prefix_mixin"),
            (0, math.nextafter(1, 0), "beta1 beta2"),
        ):
            for name in names.split():
                if not low <= getattr(self, name) <= high or math.isinf(getattr(self, name)):
                    raise ValueError(f"{key(name)}={getattr(self, name)} must be a number from {low} to {high}")
        if not all(share >= 0 for share in self.pass_mix) or abs(sum(self.pass_mix) - 1) > 1e-6:
            raise ValueError(f"pass_mix={list(self.pass_mix)} must be shares of 1, 2, 3, ... passes that sum to 1")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")


def seed_torch(*place: int) -> None:
    """Seeds what PyTorch draws next by its place: (seed, purpose, step, micro-batch)."""
    torch.manual_seed(int(draw(place).integers(2**62)))


def pass_count(config: TrainConfig, step: int) -> int:
    """Forward passes of this step. Staged: the single-pass steps first; interleaved: drawn from the whole mix."""
    mix = np.array(config.pass_mix)
    if not config.interleave:
        if step < round(mix[0] * config.max_iters) or not mix[1:].any():
            return 1
        mix[0] = 0
    return int(draw((config.seed, PASSES, step)).choice(len(mix), p=mix / mix.sum())) + 1


def feedback_at(config: TrainConfig, step: int) -> Feedback:
    """Jitter, detach, and whether this step mixes plain prefixes in."""
    return Feedback(config.jitter, config.detach, bool(draw((config.seed, MIXIN, step)).random() < config.prefix_mixin))


def learning_rate(config: TrainConfig, step: int) -> float:
    """WSD: linear warmup, constant, linear cool-down to 0 over the last `cooldown` of the run."""
    warm = (step + 1) / max(config.warmup_iters, 1)
    cool = (config.max_iters - step) / max(config.cooldown * config.max_iters, 1)
    return config.learning_rate * min(warm, cool, 1.0)


def evaluate(model: GPT, tokens: np.ndarray, n_windows: int, n_passes: int, batch_size: int = 12) -> list[float]:
    """Mean loss, in nats a token, of passes 1..n_passes over n_windows evenly spaced windows of a split.

    The same number for the same weights whenever and wherever it runs: it draws nothing.
    """
    block_size, device = model.config.block_size, model.embedding.weight.device
    starts = even_starts(tokens, n_windows, block_size)
    was_training, total = model.training, np.zeros(n_passes)
    model.eval()
    with torch.no_grad():
        for part in np.split(starts, range(batch_size, len(starts), batch_size)):
            total += len(part) * model(*windows(tokens, part, block_size, device), n_passes).cpu().double().numpy()
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
    rate, decay = config.learning_rate, config.weight_decay
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


class Run:
    """A run: its data, model, optimisers and counters. Everything is checked before anything is written."""

    def __init__(self, config: TrainConfig, model_config: GPTConfig):
        self.config, self.folder = config, Path(config.out_dir)
        data = Path(config.data_dir) / config.dataset
        self.meta = load_meta(data)
        self.tokens = {split: load_tokens(data, split, self.meta) for split in ("train", "val")}
        model_config = replace(model_config, vocab_size=self.meta["vocab_size"])
        device = pick_device(config.device)
        self.dtype = pick_dtype(config.dtype, device)
        check(config, model_config, {split: len(tokens) for split, tokens in self.tokens.items()})
        saved = load_checkpoint(self.folder) if config.resume else None
        self.counters: dict[str, Any] = {name: saved[name] if saved else start for name, start in COUNTERS.items()}
        self.identity = {"model_config": asdict(model_config), "tokenizer": self.meta["tokenizer"],
                         "train_config": asdict(config) | {"pass_mix": list(config.pass_mix)}, "dataset": self.meta}
        seed_torch(config.seed, INIT)
        self.model = GPT(model_config)
        if saved:
            check_same_run(saved, self.identity, self.folder)
            self.model.load_state_dict(saved["model"])
        elif config.init_from:
            initial_weights(self.model, config.init_from, self.meta["tokenizer"])
        self.processes = Processes(device)
        self.device = self.processes.device
        self.model.to(self.device)
        self.optimizers = make_optimizers(self.model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        if saved:
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.scaler.load_state_dict(saved["scaler"])
        leaves_unused = model_config.fusion != "none" and config.pass_mix[0] > 0
        step_model = compiled(self.model, self.device) if config.compile else self.model
        self.wrapped = self.processes.wrap(step_model, unused=leaves_unused)

    def train_step(self) -> dict:
        """One optimiser step -> its log line. UserError, before the weights change, when a loss is no number."""
        config, step, began = self.config, self.counters["step"], time.perf_counter()
        k, feedback, rate = pass_count(config, step), feedback_at(config, step), learning_rate(config, step)
        losses = torch.zeros(k, device=self.device)
        for micro in range(config.grad_accum):
            place = micro * self.processes.size + self.processes.rank  # two processes do one's two micro-batches
            idx, targets = self.batch(step, place)
            seed_torch(config.seed, NOISE, step, place)  # jitter, prefixes, dropout
            last = micro == config.grad_accum - 1
            with contextlib.nullcontext() if last or self.processes.size == 1 else self.wrapped.no_sync():
                with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                    micro_losses = self.wrapped(idx, targets, k, feedback)  # (k,)
                self.scaler.scale(objective(micro_losses, config.lam) / config.grad_accum).backward()
            losses += micro_losses.detach() / config.grad_accum
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            for group in optimizer.param_groups:
                group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip or math.inf)
        losses = self.processes.mean(losses).tolist()
        self.require_finite(f"loss of each pass {losses}, gradient norm {float(norm)}",
                            losses if self.scaler.is_enabled() else [*losses, float(norm)])
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        tokens, seconds = idx.numel() * config.grad_accum * self.processes.size, time.perf_counter() - began
        count, more = self.counters, {"step": 1, "tokens": tokens, "compute_tokens": tokens * k, "seconds": seconds}
        for name, amount in (more | {"feedback_steps": int(k > 1)}).items():
            count[name] += amount
        return {"step": step + 1, "passes": k, "losses": losses, "lr": rate, "grad_norm": float(norm),
                "tokens": count["tokens"], "compute_tokens": count["compute_tokens"],
                "seconds": round(count["seconds"], 3), "tokens_per_second": round(tokens / seconds)}

    def batch(self, step: int, place: int) -> tuple[Tensor, Tensor]:
        """The tokens and next tokens (B, T) of one micro-batch."""
        config, tokens, block_size = self.config, self.tokens["train"], self.model.config.block_size
        starts = draw((config.seed, BATCH, step, place)).integers(len(tokens) - block_size, size=config.batch_size)
        return windows(tokens, starts, block_size, self.device)

    def evaluate(self) -> dict:
        """Validation losses -> their log line, kept in the counters too."""
        n_passes, n_rows = 1 if self.model.fusion is None else self.config.eval_passes, self.config.batch_size
        losses = evaluate(self.model, self.tokens["val"], self.config.eval_iters * n_rows, n_passes, n_rows)
        self.require_finite(f"validation loss {losses}", losses)
        best = self.counters["best_val_losses"] or losses
        self.counters |= {"val_losses": losses, "best_val_losses": [min(pair) for pair in zip(best, losses)]}
        return {"step": self.counters["step"], "val_losses": losses}

    def require_finite(self, what: str, values: list[float]) -> None:
        if not all(map(math.isfinite, values)):
            kept = "the last checkpoint is kept" if (self.folder / "ckpt.pt").exists() else "nothing was saved yet"
            raise UserError(f"after step {self.counters['step']}: {what}: no number; {kept}. Try a smaller "
                            f"--learning_rate or --lambda (now {self.config.learning_rate}, {self.config.lam})"
                            + ("" if 0 < self.config.grad_clip <= 1 else ", or --grad_clip=1"))

    def save(self) -> None:
        if self.processes.rank == 0:
            save_checkpoint(self.folder, self.identity | self.counters | {
                "model": self.model.state_dict(), "scaler": self.scaler.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]})


def check(config: TrainConfig, model_config: GPTConfig, lengths: dict[str, int]) -> None:
    """UserError where settings, data and output folder do not go together."""
    folder, shortest = Path(config.out_dir), min(lengths.values())
    if shortest <= model_config.block_size:
        way_out = f"at most --block_size={shortest - 1}" if shortest > 2 else "prepare a longer text"
        raise UserError(f"--block_size={model_config.block_size}: each split needs a token more, and {config.dataset} "
                        f"has {lengths['train']} and {lengths['val']}: {way_out}")
    if model_config.fusion == "none" and config.pass_mix[0] < 1:
        raise UserError(f"--pass_mix={list(config.pass_mix)} has multi-pass steps, which need a fusion, and "
                        "--fusion=none; give --pass_mix=1")
    there = [name for name in ("ckpt.pt", "log.jsonl") if (folder / name).exists()]
    if there and not (config.resume or config.overwrite):
        resume = "--resume it, " if "ckpt.pt" in there else ""
        raise UserError(f"{folder} already holds a run ({', '.join(there)}): {resume}--overwrite it, "
                        "or choose another --out_dir")


def train(config: TrainConfig, model_config: GPTConfig, stop: Callable[[int], bool] = lambda step: False) -> dict:
    """A run from its start or checkpoint to its end, or until stop(steps done) or a signal: then it saves and returns.

    Returns the checkpoint's counters ("step", "tokens", "val_losses", ...) and "finished".
    """
    current = Run(config, model_config)
    try:
        with stop_on_signals() as signals:
            step, halt, first = current.counters["step"], False, current.processes.rank == 0
            with writing_to(current.folder):
                for name in ("ckpt.pt", "log.jsonl") if config.overwrite and first else ():
                    (current.folder / name).unlink(missing_ok=True)
            log = Log(current.folder, step, config.max_iters, config.log_interval, first)
            n_params = sum(p.numel() for p in current.model.parameters())
            log.say(f"{current.folder}: {n_params:,} parameters, step {step} of "
                    f"{config.max_iters}, {current.device}, {str(current.dtype).removeprefix('torch.')}")
            if config.eval_iters and not config.resume:
                log.evaluated(current.evaluate())
            while step < config.max_iters and not halt:
                entry = current.train_step()
                log.trained(entry)
                step = entry["step"]
                halt = current.processes.any(bool(signals) or stop(step))
                due = step == config.max_iters or config.eval_interval and step % config.eval_interval == 0
                if due and config.eval_iters:
                    log.evaluated(current.evaluate())
                if due or halt:
                    current.save()
            if config.max_iters == 0:
                current.save()
            finished = step >= config.max_iters
            log.bar.close()
            more = "to train on, --resume with a larger --max_iters" if finished else "go on with --resume"
            log.say(f"{'finished' if finished else 'stopped'} at step {step}; {current.folder}/ckpt.pt has it; {more}")
            return current.counters | {"finished": finished}
    finally:
        current.processes.close()


def main(argv: list[str]) -> int:
    config, model_config, files = parse(argv, TrainConfig, GPTConfig, doc=__doc__)
    name = Path(files[0]).stem if files else "default"
    result = train(replace(config, out_dir=config.out_dir or f"out/{name}"), model_config)
    return 0 if result["finished"] else 130


if __name__ == "__main__":
    run(main)
