"""Training until nothing improves: a run that ends by patience, and its best evaluations."""

import json
from pathlib import Path

import numpy as np

from harness.machine import stop_on_signals
from harness.runlog import read_log, writing_to
from model import GPTConfig
from train import Run, TrainConfig

EVALUATIONS = "evaluations.jsonl"


def no_better(losses: list[list[float]], patience: int) -> bool:
    """Whether the last `patience` evaluations, losses by pass each, brought no pass a new best."""
    if not losses:
        return False
    last_best = np.argmin(losses, axis=0).max()
    return len(losses) - 1 - int(last_best) >= patience


def best_of_each_pass(losses: list[list[float]]) -> list[float]:
    """The best evaluation of each pass, which may be different ones."""
    return np.min(losses, axis=0).tolist()


def train_patiently(config: TrainConfig, shape: GPTConfig, patience: int) -> dict:
    """Trains until `patience` evaluations brought no pass a new best, or max_iters is reached.

    -> the checkpoint's counters, "finished", which is False after a signal, and "best": the best
    evaluation of each pass, since the last weights are not the best. The evaluations stand in a
    file beside the checkpoint, from which a run that was stopped continues.
    """
    run = Run(config, shape)
    file = Path(config.out_dir) / EVALUATIONS
    # What was evaluated after the checkpoint will be done again.
    done = [entry for entry in read_log(file) if entry["step"] <= run.counters["step"]]
    entries = done if config.resume else []
    rewrite(file, entries)
    losses = [entry["val_losses"] for entry in entries]
    try:
        with stop_on_signals() as signals:
            while True:
                step = run.counters["step"]
                if step % config.eval_interval == 0 and (not entries or entries[-1]["step"] < step):
                    entry = run.evaluate()
                    entries.append(entry)
                    losses.append(entry["val_losses"])
                    rewrite(file, entries)
                    run.save()
                    by_pass = " ".join(f"{loss:.4f}" for loss in entry["val_losses"])
                    print(f"step {step:6d}  validation loss by pass: {by_pass}", flush=True)
                finished = no_better(losses, patience) or step >= config.max_iters
                if finished or signals:
                    break
                run.train_step()
            run.save()
    finally:
        run.processes.close()
    return run.counters | {"finished": finished, "best": best_of_each_pass(losses)}


def rewrite(file: Path, entries: list[dict]) -> None:
    """Writes all evaluations so far; there are tens of them."""
    with writing_to(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
