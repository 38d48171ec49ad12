"""Many training runs, each in its own folder: finished ones are skipped, interrupted ones continued, several at once.

A run is described by a Spec; its folder's name holds what sets it apart and a hash of all of it and of its data, so
that a change of either is another run. The folder gets the log of the training, spec.json and output.txt when it ran
beside others, and at the end measured.json; its checkpoint is then deleted, for hundreds of them fill a disk.

    python -m experiments.ablations.runs FOLDER        does the one run that FOLDER/spec.json describes
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from harness.checkpoint import FREE_ON_RESUME
from harness.configurator import UserError, run
from experiments.ablations.spec import Spec, measure
from harness.machine import stop_on_signals
from harness.data import load_meta
from harness.runlog import locked, read_log, writing_to
from train import TrainConfig, opened, train


def set_apart(spec: Spec) -> dict:
    """What decides the numbers of a run: its settings that differ from the defaults, and its measurement.

    Defaults are left out, so that a new setting does not make all finished runs new ones.
    """
    settings = {}
    for config in (spec.train, spec.model):
        for part in dataclasses.fields(config):
            value = getattr(config, part.name)
            if value != part.default and part.name not in FREE_ON_RESUME - {"max_iters"}:
                settings[part.name] = value
    return settings | {"n_windows": spec.n_windows, "n_passes": spec.n_passes, "patience": spec.patience}


def place(spec: Spec, base: Spec, folder: Path) -> Spec:
    """The spec with an out_dir of its own under `folder`, named by what it trains otherwise than `base`, and a hash."""
    def word(value) -> str:
        return "-".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value).lower()

    ours, theirs = set_apart(spec), set_apart(base)
    sha = load_meta(Path(spec.train.data_dir) / spec.train.dataset)["sha256"]
    digest = hashlib.sha256((sha + json.dumps(ours, sort_keys=True)).encode()).hexdigest()
    everything = dataclasses.asdict(spec.train) | dataclasses.asdict(spec.model)
    names = sorted(name for name in ours | theirs if name in everything and ours.get(name) != theirs.get(name))
    name = ",".join(f"{key}={word(everything[key])}" for key in names)
    return replace(spec, train=replace(spec.train, out_dir=str(folder / f"{name or 'base'}-{digest[:8]}")))


def no_better(file: Path, patience: int) -> bool:
    """Whether the last `patience` evaluations of a log.jsonl brought no pass a new best."""
    losses = [entry["val_losses"] for entry in read_log(file) if "val_losses" in entry]
    return bool(losses) and len(losses) - 1 - int(np.argmin(losses, axis=0).max()) >= patience


def numbers_of(spec: Spec) -> dict | None:
    """What `do` measured of a run, None before it has."""
    file = Path(spec.train.out_dir, "measured.json")
    return json.loads(file.read_text()) if file.exists() else None


def train_patiently(config: TrainConfig, spec: Spec) -> dict:
    """Trains until the last `patience` evaluations brought no pass a new best -> counters, "finished"."""
    file = Path(config.out_dir, "log.jsonl")
    with stop_on_signals() as signals, opened(config, spec.model) as (run, log):
        while True:
            if run.evaluation_is_due():
                log.evaluated(run.evaluate())
                run.save()
            finished = no_better(file, spec.patience) or run.counters["step"] >= config.max_iters
            if finished or signals:
                break
            log.trained(run.train_step())
        run.save()
    losses = [entry["val_losses"] for entry in read_log(file) if "val_losses" in entry]
    best = np.min(losses, axis=0).tolist()
    return run.counters | {"finished": finished, "best_val_losses": best}


def do(spec: Spec) -> dict | None:
    """Trains and measures one run, or takes up where it stopped -> its numbers; None when it was stopped.

    UserError where another process is at it.
    """
    folder = Path(spec.train.out_dir)
    checkpoint, part = folder / "ckpt.pt", folder / "measured.tmp"
    with locked(folder):
        if numbers := numbers_of(spec):
            return numbers
        config = replace(spec.train, resume=checkpoint.exists(), overwrite=not checkpoint.exists())
        result = train_patiently(config, spec) if spec.patience else train(config, spec.model)
        if not result["finished"]:
            return None
        with writing_to(folder):
            part.write_text(json.dumps(measure(spec, result)))
            part.replace(folder / "measured.json")
            checkpoint.unlink()
    return numbers_of(spec)


def start_beside(spec: Spec, threads: str) -> subprocess.Popen:
    """A process that does one run, in a session of its own, so that Ctrl-C comes to it from `do_all` alone."""
    folder, command = Path(spec.train.out_dir), [sys.executable, "-m", "experiments.ablations.runs", spec.train.out_dir]
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").write_text(spec.text())
        with open(folder / "output.txt", "w") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                    env=os.environ | {"OMP_NUM_THREADS": threads})


def do_all(specs: list[Spec], jobs: int) -> list[dict]:
    """Does all runs, `jobs` at a time -> their numbers, in order. Each process has its share of the machine's threads,
    or as many as OMP_NUM_THREADS says.

    UserError when any failed, after the others are done. KeyboardInterrupt, once the running ones are saved, on Ctrl-C.
    """
    todo = [spec for spec in {spec.train.out_dir: spec for spec in specs}.values() if numbers_of(spec) is None]
    bar, running, failed = tqdm(total=len(todo), unit="run", disable=None), [], []
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))
    while jobs == 1 and todo:  # in this process, with the training's own progress
        bar.update()
        try:
            if not do(todo.pop(0)):
                raise KeyboardInterrupt
        except UserError as error:
            failed.append(str(error))
    with stop_on_signals() as signals:
        try:
            while (running or todo) and not signals:
                while todo and len(running) < jobs:
                    running.append((todo[0], start_beside(todo.pop(0), threads)))
                time.sleep(0.2)
                for spec, process in [pair for pair in running if pair[1].poll() is not None]:
                    running.remove((spec, process))
                    bar.update()
                    if numbers := numbers_of(spec):
                        line = f"{spec.train.out_dir}: {' '.join(f'{loss:.3f}' for loss in numbers['losses'][:4])}"
                    else:
                        last = Path(spec.train.out_dir, "output.txt").read_text().strip().splitlines()[-1:]
                        failed.append(line := f"{spec.train.out_dir}: {' '.join(last)}")
                    tqdm.write(f"{line} (runs to go: {len(todo) + len(running)})")
        finally:  # a signal, or anything else: nothing goes on unseen
            for _, process in running:
                process.terminate()
            for _, process in running:
                process.wait()
    bar.close()
    if signals:
        raise KeyboardInterrupt
    if failed:
        raise UserError(f"{len(failed)} of the runs failed, the first: {failed[0]}")
    return [numbers_of(spec) for spec in specs]


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not Path(argv[0], "spec.json").is_file():
        raise UserError("name the folder of a run, with a spec.json; python -m experiments.ablations makes them")
    try:
        spec = Spec.read(Path(argv[0], "spec.json").read_text())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{argv[0]}/spec.json describes no run ({type(error).__name__}: {error}); delete it") from None
    return 0 if do(spec) else 130


if __name__ == "__main__":
    run(main)
