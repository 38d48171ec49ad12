"""What every experiment shares: runs, held-out windows, the table, the JSON file and the picture.

The preamble of every script of this folder, so that `python experiments/NAME.py` works as well as
`python -m experiments.NAME`, is the `if __package__ ...` lines before its imports from this
repository.
"""

import contextlib
import datetime
import hashlib
import json
import os
import re
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

from harness.checkpoint import FREE_ON_RESUME, load_model, without_feedback
from harness.configurator import UserError, require, setting
from harness.data import even_starts, load_meta, load_tokens, windows
from harness.machine import pick_device
from model import GPT

ROOT = Path(__file__).resolve().parents[1]  # where the commit is asked for
WIDTH = 7  # inches of a picture; on a page it is about as wide as a line of text
POINTS = 9  # the smallest letters in a picture of that width
LOSS = "loss (nats per token)"  # the label of every axis that shows one


@dataclass(frozen=True)
class Settings:
    """The settings that every experiment has; each adds its own in a subclass."""

    seed: int = setting(1, "of whatever is drawn")
    n_windows: int = setting(120, "evenly spaced windows of the validation split")
    device: str = setting("auto", "auto, cpu, cuda, mps")
    data_dir: str = setting("data", "where prepare.py wrote", path=True)
    results_dir: str = setting("out/results", "where NAME.json and NAME.png go", path=True)

    def __post_init__(self):
        require(self, "seed", self.seed >= 0, "at least 0")
        require(self, "n_windows", self.n_windows >= 1, "at least 1")


# Runs and their data


def load(path: str, settings: Settings) -> tuple[GPT, dict, np.ndarray]:
    """A run's model in eval mode, its checkpoint without tensors, and its validation tokens.

    A line on stderr where its training was stopped before its end. UserError where data_dir holds
    other data than it was trained on.
    """
    model, checkpoint = load_model(path, pick_device(settings.device))
    warn_of_early_stop(path, checkpoint)
    folder = Path(settings.data_dir) / checkpoint["train_config"]["dataset"]
    meta = load_meta(folder)
    pretrained = checkpoint["dataset"]["sha256"] == ""  # on no text of ours: any will do
    same_text = pretrained or meta["sha256"] == checkpoint["dataset"]["sha256"]
    same_symbols = meta["tokenizer"] == checkpoint["tokenizer"]
    if not (same_text and same_symbols):
        raise UserError(
            f"{folder} was prepared from another text than {path} was trained on; "
            "prepare that text again"
        )
    # Several runs may be held at once, and the model has its own weights.
    for part in ("model", "optimizers"):
        del checkpoint[part]
    return model, checkpoint, load_tokens(folder, "val", meta)


def warn_of_early_stop(path: str, checkpoint: dict) -> None:
    """A line on stderr where a run's training was stopped before its end."""
    step, n_steps = checkpoint["step"], checkpoint["train_config"]["max_iters"]
    if step < n_steps:
        print(f"{path}: trained for {step:,} of its {n_steps:,} steps", file=sys.stderr)


def held_out(model: GPT, tokens: np.ndarray, n_windows: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, (n_windows or fewer, block_size) each, on the model's device.

    The windows are evenly spaced over the split.
    """
    block_size = model.config.block_size
    starts = even_starts(tokens, n_windows, block_size)
    return windows(tokens, starts, block_size, model.embedding.weight.device)


def start(paths: list[str], settings: Settings) -> tuple[float, list[tuple[GPT, dict, np.ndarray]]]:
    """The time, for `save`, and what `load` gives for each path.

    UserError, before any work, for a checkpoint, its data or a results_dir that would fail.
    """
    began = time.perf_counter()
    loaded = [load(path, settings) for path in paths]
    folder = Path(settings.results_dir).absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise UserError(
            f"--results_dir={settings.results_dir}: {nearest} is not a folder that can be written; "
            "name another"
        )
    return began, loaded


def need_feedback(path: str, checkpoint: dict) -> None:
    """UserError, saying how to train it, where a checkpoint never trained latent feedback."""
    if problem := without_feedback(path, checkpoint):
        raise UserError(problem)


def labels(paths: list[str]) -> list[str]:
    """The runs' folder names; the paths themselves where two runs' folders have the same name."""
    names = []
    for path in paths:
        place = Path(path)
        folder = place if place.is_dir() else place.parent
        names.append(folder.resolve().name)
    return names if len(set(names)) == len(names) else paths


def groups(names: list[str], checkpoints: list[dict]) -> dict[str, list[int]]:
    """Which runs differ in their seed alone: a label for each group, and its runs' places.

    What a run began from counts, but for the digits in its name, because that differs by the seed:
    out/plain_1 and out/plain_2 are one series, and out/other_1 is not of it. UserError where a
    group has a seed twice.
    """
    ignored = FREE_ON_RESUME - {"max_iters"} | {"seed"}
    members: dict[str, dict[int, int]] = {}  # settings -> seed -> place
    for place, checkpoint in enumerate(checkpoints):
        settings = checkpoint["model_config"] | checkpoint["train_config"]
        kept = {name: value for name, value in settings.items() if name not in ignored}
        kept["begun from"] = re.sub(r"\d", "", settings["init_from"])
        places = members.setdefault(json.dumps(kept, sort_keys=True), {})
        seed = settings["seed"]
        if seed in places:
            raise UserError(
                f"{names[places[seed]]} and {names[place]} have the same settings and the same "
                f"seed={seed}; name each training once, or train with another --seed"
            )
        places[seed] = place
    grouped = {}
    for by_seed in members.values():
        places = list(by_seed.values())
        label = group_name([names[place] for place in places])
        while label in grouped:  # two groups whose runs' names begin alike
            label += "'"
        grouped[label] = places
    return grouped


def group_name(names: list[str]) -> str:
    """tasks_1, tasks_2 -> tasks: what the runs' names begin with, without a number.

    A single run keeps its name.
    """
    if len(names) == 1:
        return names[0]
    return re.sub(r"[-_./]*(seed)?[-_]?\d*$", "", os.path.commonprefix(names)) or names[0]


# Numbers


def student(values: Iterable[float]) -> float | None:
    """Half of Student's 95% interval of the mean of values (N,); None for a single one."""
    sample = np.asarray(list(values), float)  # (N,)
    n = len(sample)
    if n < 2:
        return None
    from scipy.stats import t  # here: a single value needs no scipy

    return float(t.ppf(0.975, n - 1) * sample.std(ddof=1) / n**0.5)


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table, its columns aligned; floats with four significant digits."""
    text = [[str(cell) for cell in header]]
    for row in rows:
        text.append([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row])
    widths = [max(len(cell) for cell in column) for column in zip(*text, strict=True)]
    lines = []
    for row in text:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def cached(
    folder: str, model: GPT, key: list, sources: list[Path], compute: Callable[[], dict]
) -> dict:
    """compute()'s numbers, kept in `folder` by a hash of the model, the key and the sources.

    sources: the files of code that the numbers depend on. So an experiment that was interrupted
    continues with what it has, and an edit to one of them begins anew. UserError where the folder
    cannot be written.
    """
    digests = [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources]
    known = hashlib.sha256(json.dumps([asdict(model.config), digests, key]).encode())
    for weight in model.state_dict().values():
        known.update(weight.cpu().numpy().tobytes())
    digest = known.hexdigest()[:16]
    file = Path(folder) / f"{digest}.json"
    if not file.exists():
        numbers = compute()
        try:
            write(file, json.dumps(numbers))
        except OSError as error:
            raise UserError(f"{folder}: {error}; name a folder that can be written") from None
    return json.loads(file.read_text())


# Results


def commit() -> str:
    """The commit that made the results, "-dirty" after it for changed files.

    "unknown" without git or its repository.
    """
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def write(file: Path, text: str) -> None:
    """Writes a file whole or not at all, and its folder. OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Unlike a run's files, which are locked, these may be written by two processes at a time: two
    # sweeps publish the runs that they share.
    part = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    part.write_text(text)
    part.replace(file)


def write_json(file: Path, numbers: dict) -> None:
    """Writes numbers for people too: indented, but a list of nothing but numbers on one line."""
    text = json.dumps(numbers, indent=1)
    # A bracket that a line break follows is no part of a string, in which they are escaped.
    text = re.sub(r'\[\n([^][{}"]*)\]', lambda found: f"[{' '.join(found[1].split())}]", text)
    write(file, text + "\n")


def origin(experiment: str, settings: Any, began: float) -> dict:
    """How an experiment's numbers came about, for its JSON file.

    experiment: its module's name. settings: its dataclass; the device is left out where that has
    none. began: time.perf_counter() at the start.
    """
    how = {
        "command": f"python -m experiments.{experiment} {shlex.join(sys.argv[1:])}",
        "settings": asdict(settings),
        "commit": commit(),
    }
    if hasattr(settings, "device"):
        how["device"] = str(pick_device(settings.device))
    how["torch"] = torch.__version__
    how["date"] = datetime.date.today().isoformat()
    how["seconds"] = round(time.perf_counter() - began, 1)
    return how


@contextlib.contextmanager
def writing_results(folder: Path):
    """Around the writing of results: an OSError becomes a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--results_dir={folder}: {error}; name a folder that can be written"
        ) from None


def save(
    name: str,
    settings: Settings,
    began: float,
    numbers: dict,
    draw: Callable[[Any], None],
) -> None:
    """Writes results_dir/name.json (the numbers, and how they came about), then name.png.

    name: the experiment's, or EXPERIMENT/PART. began: the time that `start` returned. The picture
    comes last, so that whatever goes wrong with it, the numbers are on disk.
    """
    folder = Path(settings.results_dir)
    how = origin(name.split("/")[0], settings, began)
    with writing_results(folder):
        write_json(folder / f"{name}.json", how | numbers)
    print(f"wrote {folder / name}.json")
    if draw_picture(folder / f"{name}.png", draw):
        print(f"wrote {folder / name}.png")


def draw_picture(file: Path, draw: Callable[[Any], None]) -> bool:
    """Writes a picture that draw(figure) fills -> whether it could.

    Any failure costs the picture alone, and one line on stderr.

    draw may change the figure's height; its width stays WIDTH inches, or its letters grow with it.
    """
    # A notebook's MPLBACKEND may name a module that this environment lacks. Only files are drawn.
    os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        with matplotlib.rc_context({"font.size": POINTS, "axes.titlesize": POINTS + 1}):
            figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure)
            enlarge_letters(figure)
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, dpi=840 / figure.get_figwidth())
    except Exception as error:  # whatever it is, it must not take the numbers with it
        reason = " ".join(str(error).split())
        print(f"no picture {file} ({type(error).__name__}: {reason})", file=sys.stderr)
        return False
    return True


def enlarge_letters(figure) -> None:
    """Raises each letter of a figure to at least POINTS, for a figure WIDTH inches wide."""
    from matplotlib.text import Text

    least = POINTS * figure.get_figwidth() / WIDTH
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            # Ticks are made late, so their size is set for all that will be.
            axis.set_tick_params(which="both", labelsize=least)
    for text in figure.findobj(Text):
        if text.get_fontsize() < least:
            text.set_fontsize(least)
