"""Training until nothing improves: a run that ends by patience, and its best evaluations."""

from pathlib import Path

import numpy as np

from harness.machine import stop_on_signals
from harness.runlog import read_evaluations
from model import GPTConfig
from train import TrainConfig, opened


def no_better(losses: list[list[float]], patience: int) -> bool:
    """Whether the last `patience` evaluations, losses by pass each, brought no pass a new best."""
    if not losses:
        return False
    last_best = np.argmin(losses, axis=0).max()
    return len(losses) - 1 - int(last_best) >= patience


def evaluations(folder: str) -> list[list[float]]:
    """The validation losses by pass in a run's log, in the order of its steps."""
    return [entry["val_losses"] for entry in read_evaluations(Path(folder))]


def train_patiently(config: TrainConfig, shape: GPTConfig, patience: int) -> dict:
    """Trains until `patience` evaluations brought no pass a new best, or max_iters is reached.

    -> the checkpoint's counters, "finished", which is False after a signal, and "best": the best
    evaluation of each pass, which may be different ones; the last weights are not the best. A run
    that was stopped continues from its checkpoint, and takes its evaluations from its log.
    """
    with stop_on_signals() as signals, opened(config, shape) as (run, log):
        # The log has none that come after the checkpoint. What a new run replaces is not its own.
        losses = evaluations(config.out_dir) if config.resume else []
        while True:
            if run.evaluation_is_due():
                entry = run.evaluate()
                log.evaluated(entry)
                losses.append(entry["val_losses"])
                run.save()
                log.saved()
            finished = no_better(losses, patience) or run.counters["step"] >= config.max_iters
            if finished or signals:
                break
            log.trained(run.train_step())
        run.save()
        log.saved()
    best = np.min(losses, axis=0).tolist()
    return run.counters | {"finished": finished, "best": best}
