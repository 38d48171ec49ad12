"""What every experiment shares: its checkpoints and held-out windows, its table, and its JSON file and figure."""

import datetime
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.checkpoint import load_model, without_feedback
from harness.configurator import UserError, setting
from harness.machine import pick_device
from model import GPT
from harness.data import load_meta, load_tokens
from harness.data import even_starts, windows


@dataclass(frozen=True)
class Settings:
    """The settings that every experiment has; each adds its own in a subclass."""

    seed: int = setting(1, "of whatever is drawn")
    n_windows: int = setting(120, "evenly spaced windows of the validation split")
    device: str = setting("auto", "auto, cpu, cuda, mps")
    data_dir: str = setting("data", "where prepare.py wrote")
    results_dir: str = setting("results", "where NAME.json and NAME.png go")

    def __post_init__(self):
        if self.seed < 0 or self.n_windows < 1:
            raise ValueError(f"seed={self.seed} must not be negative, n_windows={self.n_windows} be at least 1")


def load(path: str, settings: Settings) -> tuple[GPT, dict, np.ndarray]:
    """A model in eval mode on its device, its checkpoint without tensors, and its validation tokens.

    UserError where data_dir holds other data than it was trained on.
    """
    model, checkpoint = load_model(path, pick_device(settings.device))
    folder = Path(settings.data_dir) / checkpoint["train_config"]["dataset"]
    meta = load_meta(folder)
    trained_on = checkpoint["dataset"]["sha256"] or meta["sha256"]  # "": on no text of ours
    if (meta["sha256"], meta["tokenizer"]) != (trained_on, checkpoint["tokenizer"]):
        raise UserError(f"{folder} was prepared from another text than {path} was trained on; prepare that text again")
    for part in ("model", "optimizers"):  # several runs may be held at once; the model has its own weights
        del checkpoint[part]
    return model, checkpoint, load_tokens(folder, "val", meta)


def held_out(model: GPT, tokens: np.ndarray, n_windows: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens (n_windows or fewer, block_size) of evenly spaced windows, on the model's device."""
    block_size = model.config.block_size
    return windows(tokens, even_starts(tokens, n_windows, block_size), block_size, model.embedding.weight.device)


def start(paths: list[str], settings: Settings) -> tuple[float, list[tuple[GPT, dict, np.ndarray]]]:
    """The time, for `save`, and what `load` gives for each path.

    UserError, before any work, for a checkpoint, its data or a results_dir that would fail.
    """
    began = time.perf_counter()
    loaded = [load(path, settings) for path in paths]
    folder = Path(settings.results_dir).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise UserError(f"--results_dir={settings.results_dir}: {there} is no folder that can be written; name another")
    return began, loaded


def need_feedback(path: str, checkpoint: dict) -> None:
    """UserError, saying how to train it, where a checkpoint never trained latent feedback."""
    if problem := without_feedback(path, checkpoint):
        raise UserError(problem)


def labels(paths: list[str]) -> list[str]:
    """The runs' folder names; the paths themselves where two runs' folders have the same name."""
    names = [(Path(path) if Path(path).is_dir() else Path(path).parent).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else paths


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table, its columns aligned; floats with four significant digits."""
    text = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in [list(header), *rows]]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in text]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def cached(folder: str, model: GPT, key: list, compute: Callable[[], dict]) -> dict:
    """compute()'s numbers, kept in `folder` by a hash of weights, key and commit, and read from there the next time.

    So an experiment that was interrupted goes on with what it has. UserError where the folder cannot be written.
    """
    weights = b"".join(weight.cpu().numpy().tobytes() for weight in model.state_dict().values())
    digest = hashlib.sha256(weights + json.dumps([commit(), *key]).encode()).hexdigest()[:16]
    file, part = Path(folder, f"{digest}.json"), Path(folder, f"{digest}.{os.getpid()}.tmp")
    if not file.exists():
        numbers = compute()
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(numbers))
            part.replace(file)
        except OSError as error:
            raise UserError(f"{folder}: {error}; name a folder that can be written") from None
    return json.loads(file.read_text())


def commit() -> str:
    """The commit that made the results, "-dirty" after it for changed files; unknown without git or its repository."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def save(name: str, settings: Settings, began: float, numbers: dict, draw: Callable[[Any], None]) -> None:
    """Writes results_dir/name.json (the numbers, and how they came about) and name.png, which draw(figure) fills.

    name: the experiment's, or EXPERIMENT/PART; began: the time that `start` returned.
    """
    from matplotlib.figure import Figure

    folder = Path(settings.results_dir)
    how = {"command": f"python -m experiments.{name.split('/')[0]} {shlex.join(sys.argv[1:])}",
           "settings": asdict(settings), "commit": commit(),
           "device": str(pick_device(settings.device)), "torch": torch.__version__,
           "date": datetime.date.today().isoformat(), "seconds": round(time.perf_counter() - began, 1)}
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    draw(figure)
    try:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(how | numbers, indent=1) + "\n")
        figure.savefig(folder / f"{name}.png", dpi=110)
    except OSError as error:
        raise UserError(f"--results_dir={folder}: {error}; name a folder that can be written") from None
    print(f"wrote {folder}/{name}.json and {name}.png")
