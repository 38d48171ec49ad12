"""Many training runs, each in its own folder: finished ones are skipped, interrupted ones continued, several at once.

A run is described by a Spec; its folder's name holds what sets it apart and a hash of all of it and of its data, so
that a change of either is another run. The folder gets the log of the training, spec.json and output.txt when it ran
beside others, and at the end measured.json; its checkpoint is then deleted, for hundreds of them fill a disk.

    python -m experiments.runs FOLDER        does the one run that FOLDER/spec.json describes
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from checkpoint import FREE_ON_RESUME, load_model
from configurator import UserError, build, run
from experiments.decoding_modes import likelihood
from experiments.prefill_passes import measure as measure_passes
from experiments.report import held_out
from machine import pick_device, stop_on_signals
from model import GPT, GPTConfig
from prepare import load_meta, load_tokens
from runlog import read_log, writing_to
from train import TrainConfig, train


@dataclass(frozen=True)
class Spec:
    """One run: its two configs, and how it is measured."""

    train: TrainConfig
    model: GPTConfig
    n_windows: int  # of the validation split
    n_passes: int  # feedback passes to measure
    patience: int = 0  # evaluations without a new best of any pass after which to stop; 0: to the end

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> "Spec":
        parts = json.loads(text)
        return Spec(build(TrainConfig, parts.pop("train")), build(GPTConfig, parts.pop("model")), **parts)


def place(spec: Spec, base: Spec, folder: Path) -> Spec:
    """The spec with an out_dir of its own under `folder`, named by what it trains otherwise than `base`, and a hash."""
    def word(value) -> str:
        return "-".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value).lower()

    def choices(a_spec: Spec) -> dict:
        return asdict(a_spec.train) | asdict(a_spec.model)

    sha = load_meta(Path(spec.train.data_dir) / spec.train.dataset)["sha256"]
    digest = hashlib.sha256((sha + replace(spec, train=replace(spec.train, data_dir="")).text()).encode()).hexdigest()
    name = ",".join(f"{key}={word(value)}" for key, value in choices(spec).items()
                    if value != choices(base)[key] and key not in FREE_ON_RESUME - {"max_iters"})
    return replace(spec, train=replace(spec.train, out_dir=str(folder / f"{name or 'base'}-{digest[:8]}")))


def no_better(file: Path, patience: int) -> bool:
    """Whether the last `patience` evaluations of a log.jsonl brought no pass a new best."""
    losses = [entry["val_losses"] for entry in read_log(file) if "val_losses" in entry]
    return bool(losses) and len(losses) - 1 - int(np.argmin(losses, axis=0).max()) >= patience


@torch.no_grad()
def state_share(model: GPT, idx: torch.Tensor, targets: torch.Tensor) -> dict:
    """Of the fused input u of pass 2: what is left to a model that ignores the state, on tokens (N, T).

    "share": E||u(h, e) - u(mean h, e)||^2 / E||u - mean u||^2, the part of its variance that comes with the state, 0
    where h is ignored. "loss": pass 2's, in nats a token, when every state is the mean state.
    """
    e = model.embed(idx)
    h = model.stack(e)
    level = h.mean(dim=(0, 1)).expand_as(h)
    u, u_level = (model.fuse(states, e)[:, 1:] for states in (h, level))  # without the first, which is plain
    share = (u - u_level).square().sum() / (u - u.mean(dim=(0, 1))).square().sum()
    logits = model.head(model.next_pass(level, e))
    return {"share": share.item(), "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()}


def measure(spec: Spec, counters: dict) -> dict:
    """A finished run's numbers: losses after 0, 1, ... feedback passes; with a fusion, its modes and state share too.

    A run with patience is measured by its evaluations, the best of each pass, since its last weights are not its best.
    """
    model, _ = load_model(spec.train.out_dir, str(pick_device(spec.train.device)))
    folder = Path(spec.train.data_dir) / spec.train.dataset
    idx, targets = held_out(model, load_tokens(folder, "val", load_meta(folder)), spec.n_windows)
    kept = {name: counters[name] for name in ("step", "tokens", "compute_tokens", "seconds")}
    if spec.patience:
        return kept | {"losses": counters["best_val_losses"], "finished": counters["finished"]}
    feedback = counters["feedback_steps"] > 0
    losses, changes = measure_passes(model, idx, targets, spec.n_passes if feedback else 0)
    half = model.config.block_size // 2
    modes = {mode: likelihood(model, idx, targets, half, mode)[:, 1:].mean().item()  # the first is read off the prompt
             for mode in (("standard", "soft", "fused") if feedback else ("standard",))}
    more = {"state": state_share(model, idx[:48], targets[:48])} if feedback else {}
    return kept | {"losses": losses, "changes": changes, "modes": modes} | more


def numbers_of(spec: Spec) -> dict | None:
    """What `do` measured of a run, None before it has."""
    file = Path(spec.train.out_dir, "measured.json")
    return json.loads(file.read_text()) if file.exists() else None


def do(spec: Spec) -> dict | None:
    """Trains and measures one run, or takes up where it stopped -> its numbers; None when it was stopped."""
    folder, every = Path(spec.train.out_dir), spec.train.eval_interval
    checkpoint, log, part = folder / "ckpt.pt", folder / "log.jsonl", folder / "measured.tmp"

    def stop(step: int) -> bool:  # asked before the evaluation of a step, so one step later
        return spec.patience > 0 and (step - 1) % every == 0 and no_better(log, spec.patience)

    config = replace(spec.train, resume=checkpoint.exists(), overwrite=log.exists() and not checkpoint.exists())
    result = train(config, spec.model, stop)
    if not (result["finished"] or stop(result["step"])):
        return None
    part.write_text(json.dumps(measure(spec, result)))
    part.replace(folder / "measured.json")
    checkpoint.unlink(missing_ok=True)
    return numbers_of(spec)


def start_beside(spec: Spec, threads: str) -> subprocess.Popen:
    """A process that does one run, in a session of its own, so that Ctrl-C comes to it from `do_all` alone."""
    folder, command = Path(spec.train.out_dir), [sys.executable, "-m", "experiments.runs", spec.train.out_dir]
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").write_text(spec.text())
        with open(folder / "output.txt", "w") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                    env=os.environ | {"OMP_NUM_THREADS": threads})


def do_all(specs: list[Spec], jobs: int) -> list[dict]:
    """Does all runs, `jobs` at a time with the machine's threads divided -> their numbers, in order.

    UserError when any failed, after the others are done. KeyboardInterrupt, once the running ones are saved, on Ctrl-C.
    """
    todo = [spec for spec in {spec.train.out_dir: spec for spec in specs}.values() if numbers_of(spec) is None]
    bar, running, failed, told = tqdm(total=len(todo), unit="run", disable=None), [], [], False
    while jobs == 1 and todo:  # in this process, with the training's own progress
        if not do(todo.pop(0)):
            raise KeyboardInterrupt
        bar.update()
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))
    with stop_on_signals() as signals:
        while running or todo and not signals:
            while todo and not signals and len(running) < jobs:
                running.append((todo[0], start_beside(todo.pop(0), threads)))
            time.sleep(0.2)
            for _, process in running if signals and not told else ():
                process.terminate()
            told = bool(signals)
            for spec, process in [pair for pair in running if pair[1].poll() is not None]:
                running.remove((spec, process))
                bar.update()
                numbers = numbers_of(spec)
                if numbers:
                    line = f"{spec.train.out_dir}: {' '.join(f'{loss:.3f}' for loss in numbers['losses'][:4])}"
                else:
                    last = Path(spec.train.out_dir, "output.txt").read_text().strip().splitlines()[-1:]
                    failed.append(line := f"{spec.train.out_dir}: {' '.join(last)}")
                tqdm.write(f"{line} (runs to go: {len(todo) + len(running)})")
    bar.close()
    if signals:
        raise KeyboardInterrupt
    if failed:
        raise UserError(f"{len(failed)} of the runs failed: {'; '.join(failed)}")
    return [numbers_of(spec) for spec in specs]


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not Path(argv[0], "spec.json").is_file():
        raise UserError("name the folder of a run, with a spec.json; python -m experiments.ablations makes them")
    return 0 if do(Spec.read(Path(argv[0], "spec.json").read_text())) else 130


if __name__ == "__main__":
    run(main)
