"""Many training runs, each in its own folder: finished ones are skipped, interrupted ones continue.

A run is described by a Spec. Its folder's name holds what sets it apart and a hash of all of that
and of its data, so that a change of either is another run. The folder gets the training's log,
spec.json and output.txt where it ran beside others, and at the end measured.json. Its checkpoint
is then deleted, because hundreds of them fill a disk, unless the Spec says `keep`.

    python -m experiments.ablations.runs FOLDER    does the one run that FOLDER/spec.json describes
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

from tqdm import tqdm

from experiments.ablations.patient import train_patiently
from experiments.ablations.spec import KEPT_COUNTERS, Spec, measure_run
from experiments.report import ROOT, commit
from harness.checkpoint import FREE_ON_RESUME
from harness.configurator import UserError, key, run
from harness.data import SAME_DATA, load_meta
from harness.machine import pick_device, pick_dtype, stop_on_signals
from harness.runlog import locked, write_whole, writing_to
from train import train

# Settings of a training that change none of its numbers. `max_iters` does, by the cool-down.
NO_MATTER = FREE_ON_RESUME - {"max_iters"}
# To be raised by hand when a change of the code changes a run's numbers at the same settings.
MEASURED_AS = 1


def identity(spec: Spec) -> dict:
    """What decides the numbers of a run: its settings that are not defaults, and its measurement.

    Defaults are left out, so that a new setting does not make all finished runs new ones.
    """
    decides = {}
    for config in (spec.train, spec.model):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if value != field.default and field.name not in NO_MATTER:
                decides[field.name] = value
    decides["n_windows"] = spec.n_windows
    decides["n_passes"] = spec.n_passes
    decides["patience"] = spec.patience
    if spec.patience:  # then the evaluations decide when the run ends, and are its numbers
        train = spec.train
        decides["evaluations"] = [train.eval_interval, train.eval_iters, train.eval_passes]
    if spec.train.init_from:  # a run of this kind, whose folder's name identifies it
        decides["start"] = Path(spec.train.init_from).name
    return decides


def word(value) -> str:
    """A setting's value in a folder's name."""
    if isinstance(value, tuple):
        return "-".join(f"{part:g}" for part in value)
    return str(value).lower()


def with_folder(spec: Spec, base: Spec, folder: Path) -> Spec:
    """The spec with an out_dir of its own under `folder`.

    Its name: the settings in which it trains differently from `base`, and a hash of its identity.
    """
    ours = identity(spec)
    theirs = identity(base)
    data = load_meta(Path(spec.train.data_dir) / spec.train.dataset)["sha256"]
    digest = hashlib.sha256((data + json.dumps(ours, sort_keys=True)).encode()).hexdigest()
    settings = dataclasses.asdict(spec.train) | dataclasses.asdict(spec.model)
    parts = []
    for name in sorted(ours | theirs):
        if name in settings and ours.get(name) != theirs.get(name):
            parts.append(f"{name}={word(settings[name])}")
    name = ",".join(parts) or "base"
    return replace(spec, train=replace(spec.train, out_dir=str(folder / f"{name}-{digest[:8]}")))


def settings_of(spec: Spec) -> dict:
    """All that decides a run's numbers, defaults too, as JSON gives it back.

    Beside the settings: the tokens, the precision that the device computes in, and the code's
    MEASURED_AS.
    """
    settings = dataclasses.asdict(spec.train) | dataclasses.asdict(spec.model)
    decide = {name: value for name, value in settings.items() if name not in NO_MATTER}
    meta = load_meta(Path(spec.train.data_dir) / spec.train.dataset)
    decide["data"] = {name: meta[name] for name in (*SAME_DATA, "val_tokens")}
    dtype = pick_dtype(spec.train.dtype, pick_device(spec.train.device))
    decide["precision"] = str(dtype).removeprefix("torch.")
    decide["measured_as"] = MEASURED_AS
    return json.loads(json.dumps(decide))


def difference_to(numbers: dict, spec: Spec) -> str:
    """In what a finished run's settings differ from the spec's, in words; '' where in nothing.

    Its folder's name does not tell, because defaults are left out of that, and a default may have
    changed since. What was not a setting then is not compared.
    """
    theirs = numbers.get("settings", {})
    for name, ours in settings_of(spec).items():
        if name in theirs and theirs[name] != ours:
            return f"{key(name)}={theirs[name]}, and it is {ours} now"
    return ""


def numbers_of(spec: Spec) -> dict | None:
    """What was measured of a run; None before it is finished.

    UserError where it was trained otherwise than the spec says.
    """
    folder = Path(spec.train.out_dir)
    file = folder / "measured.json"
    if not file.exists():
        return None
    numbers = json.loads(file.read_text(encoding="utf-8"))
    if difference := difference_to(numbers, spec):
        raise UserError(
            f"{folder} was trained with {difference}; "
            "delete that folder to train it anew, or give another --out_dir"
        )
    return numbers


def keep_numbers(spec: Spec, numbers: dict) -> None:
    """Writes measured.json, whole or not at all, and its folder."""
    folder = Path(spec.train.out_dir)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "measured.json", json.dumps(numbers))


def do_run(spec: Spec) -> dict | None:
    """Trains and measures one run, or continues where it stopped.

    -> its numbers, or None where a signal stopped it.

    UserError where another process is training it.
    """
    folder = Path(spec.train.out_dir)
    checkpoint = folder / "ckpt.pt"
    with locked(folder):
        if numbers := numbers_of(spec):
            return numbers
        resume = checkpoint.exists()
        # What was killed before its first checkpoint left a log, and starts anew.
        config = replace(spec.train, resume=resume, overwrite=not resume)
        if spec.patience:
            counters = train_patiently(config, spec.model, spec.patience)
        else:
            counters = train(config, spec.model)
        if not counters["finished"]:
            return None
        numbers = measure_patient(counters) if spec.patience else measure_run(spec, counters)
        numbers["settings"] = settings_of(spec)
        keep_numbers(spec, numbers)
        if not spec.keep:
            checkpoint.unlink()
    return numbers


def measure_patient(counters: dict) -> dict:
    """The numbers of a run that ended by patience: the best evaluation of each pass."""
    numbers = {name: counters[name] for name in KEPT_COUNTERS}
    return numbers | {"commit": commit(), "losses": counters["best"]}


def start_beside(spec: Spec, threads: str) -> subprocess.Popen:
    """A process that does one run.

    It has a session of its own, so that Ctrl-C comes to it from `do_runs` alone.
    """
    folder = Path(spec.train.out_dir).absolute()
    command = [sys.executable, "-m", "experiments.ablations.runs", str(folder)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").write_text(spec.text())
        with open(folder / "output.txt", "w") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )


def do_runs(specs: list[Spec], jobs: int) -> None:
    """Does all runs that are not finished, `jobs` at a time.

    Each process has its share of the machine's threads, or as many as OMP_NUM_THREADS says.
    UserError when any failed, after the others are done. KeyboardInterrupt on Ctrl-C, once the
    running ones are saved.
    """
    by_folder = {spec.train.out_dir: spec for spec in specs}
    todo = [spec for spec in by_folder.values() if numbers_of(spec) is None]
    failed = do_in_turn(todo) if jobs == 1 else do_side_by_side(todo, jobs)
    if failed:
        raise UserError(f"{len(failed)} of the runs failed, the first: {failed[0]}")


def do_in_turn(todo: list[Spec]) -> list[str]:
    """Does the runs one by one in this process, with the training's own progress -> what failed."""
    failed = []
    for spec in tqdm(todo, unit="run", disable=None):
        try:
            numbers = do_run(spec)
        except UserError as error:
            failed.append(str(error))
            continue
        if numbers is None:
            raise KeyboardInterrupt  # a signal stopped it
    return failed


def do_side_by_side(todo: list[Spec], jobs: int) -> list[str]:
    """Does the runs in processes of their own, `jobs` at a time -> what failed."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))
    waiting = list(todo)
    running: list[tuple[Spec, subprocess.Popen]] = []
    failed = []
    bar = tqdm(total=len(todo), unit="run", disable=None)
    with stop_on_signals() as signals:
        try:
            while (running or waiting) and not signals:
                while waiting and len(running) < jobs:
                    running.append((waiting[0], start_beside(waiting[0], threads)))
                    del waiting[0]
                time.sleep(0.2)
                ended = [pair for pair in running if pair[1].poll() is not None]
                for pair in ended:
                    running.remove(pair)
                    bar.update()
                    line, ok = outcome(pair[0])
                    if not ok:
                        failed.append(line)
                    tqdm.write(f"{line} (runs to go: {len(waiting) + len(running)})")
        finally:  # a signal, or anything else: nothing continues unseen
            for _, process in running:
                process.terminate()
            for _, process in running:
                process.wait()
    bar.close()
    if signals:
        raise KeyboardInterrupt
    return failed


def outcome(spec: Spec) -> tuple[str, bool]:
    """A line on a run whose process has ended, and whether it is finished."""
    folder = spec.train.out_dir
    if numbers := numbers_of(spec):
        losses = " ".join(f"{loss:.3f}" for loss in numbers["losses"][:4])
        return f"{folder}: {losses}", True
    last = Path(folder, "output.txt").read_text().strip().splitlines()[-1:]
    return f"{folder}: {' '.join(last)}", False


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not Path(argv[0], "spec.json").is_file():
        raise UserError(
            "name the folder of a run, with a spec.json; python -m experiments.ablations makes them"
        )
    try:
        spec = Spec.from_text(Path(argv[0], "spec.json").read_text())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{argv[0]}/spec.json does not describe a run ({type(error).__name__}: {error}); "
            "delete it"
        ) from None
    return 0 if do_run(spec) else 130


if __name__ == "__main__":
    run(main)
