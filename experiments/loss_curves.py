"""The loss of every pass over a run (the paper's Fig. 18).

    python -m experiments.loss_curves out/demo                  writes out/demo/loss.png, loss.json
    python -m experiments.loss_curves out/demo_plain out/demo   the same beside a plain run

In a working configuration the curve of pass 2 starts above that of pass 1 and crosses under it.

The left panel has the losses, the right one those of the later passes minus pass 1's on the same
tokens, in nats per token. Dots are validation losses, thin lines the training batches, averaged
over `smooth` logged steps. The run drawn is the last one named; of a plain run before it, the
validation loss is shown.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from experiments.report import LOSS, draw_picture, origin, write_json
from harness.configurator import UserError, parse, require, run, setting
from harness.runlog import read_evaluations, read_training


@dataclass(frozen=True)
class Settings:
    smooth: int = setting(5, "logged steps that a point of the training curves averages")
    out: str = setting("", "the PNG file; empty: loss.png in the run's folder", path=True)

    def __post_init__(self):
        require(self, "smooth", self.smooth >= 1, "at least 1")
        is_png = not self.out or self.out.endswith(".png")
        require(self, "out", is_png, "the name of a .png file")


@dataclass(frozen=True)
class Curve:
    """The losses of one pass: at which steps, and minus the first pass's on the same tokens."""

    steps: np.ndarray  # (N,)
    losses: np.ndarray  # (N,)
    gaps: np.ndarray  # (N,)


def logged(folder: Path) -> tuple[list[dict], list[dict]]:
    """The training and the evaluation entries of a run's log.jsonl; UserError without any."""
    file = folder / "log.jsonl"
    if not file.is_file():
        raise UserError(f"no log at {file}; name a run's folder, e.g. out/demo")
    evaluations = read_evaluations(folder)
    if not evaluations:
        raise UserError(
            f"{file} has no evaluations to draw; train with --eval_iters of at least 1"
        )
    return read_training(folder), evaluations


def curve(entries: list[dict], name: str, k: int, smooth: int = 1) -> Curve:
    """Pass k (1 is plain) of the entries that have it, each point a mean over `smooth` of them.

    name: "losses" or "val_losses". A point stands at the step in the middle of those that it
    averages, of an even number at the later of two.
    """
    having = [entry for entry in entries if len(entry[name]) >= k]
    if len(having) < smooth:
        nothing = np.zeros(0)
        return Curve(nothing, nothing, nothing)
    steps = np.array([entry["step"] for entry in having])
    losses = np.array([entry[name][k - 1] for entry in having])
    gaps = np.array([entry[name][k - 1] - entry[name][0] for entry in having])
    window = np.ones(smooth) / smooth
    middle = smooth // 2
    return Curve(
        steps[middle : len(steps) - (smooth - 1 - middle)],
        np.convolve(losses, window, "valid"),
        np.convolve(gaps, window, "valid"),
    )


def crossing(steps: np.ndarray, gaps: np.ndarray) -> int | None:
    """The first step from which pass 2 stays under pass 1, its gap negative, or None."""
    above = np.flatnonzero(gaps >= 0)
    first = above[-1] + 1 if len(above) else 0
    return int(steps[first]) if first < len(steps) else None


def draw(figure, training: list[dict], evaluations: list[dict], plain: list[dict], smooth: int):
    """Left the passes' losses, right the later ones minus pass 1's.

    plain: another run's evaluations, for the baseline, or none.
    """
    left, right = figure.subplots(1, 2)
    dots = {"marker": "o", "ms": 3, "lw": 1.2}
    thin = {"lw": 0.7, "alpha": 0.6}
    for k in range(1, 1 + max(len(entry["val_losses"]) for entry in evaluations)):
        curves = {
            "validation": (curve(evaluations, "val_losses", k), dots),
            "training": (curve(training, "losses", k, smooth), thin),
        }
        for split, (points, style) in curves.items():
            if not len(points.steps):
                continue
            label = f"pass {k}, {split}"
            color = f"C{k - 1}"
            left.plot(points.steps, points.losses, color=color, label=label, **style)
            if k > 1:
                right.plot(points.steps, points.gaps, color=color, label=label, **style)
    lowest = min(min(entry["val_losses"]) for entry in evaluations)
    if plain:
        points = curve(plain, "val_losses", 1)
        style = {"color": "black", "ls": "--", "lw": 1.2, "label": "plain, validation"}
        left.plot(points.steps, points.losses, **style)
        lowest = min(lowest, points.losses.min())
        ours = curve(evaluations, "val_losses", 1)
        both, at, of_plain = np.intersect1d(ours.steps, points.steps, return_indices=True)
        right.plot(both, points.losses[of_plain] - ours.losses[at], **style)
    left.set(xlabel="step", ylabel=LOSS, title="Loss by pass", ylim=(lowest - 0.1, lowest + 1.2))
    right.set(xlabel="step", title="Minus pass 1 of the same step")
    right.axhline(0, color="C0", lw=1)
    # The first evaluations may be far off; the scale is that of the run's second half.
    late = evaluations[len(evaluations) // 2 :]
    widest = max(max(entry["val_losses"]) - min(entry["val_losses"]) for entry in late)
    right.set_ylim(-3 * max(widest, 0.03), 3 * max(widest, 0.03))
    left.legend()


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="run")
    if len(words) not in (1, 2):
        raise UserError(
            "name one run's folder, or a plain run's and then one: "
            "python -m experiments.loss_curves out/demo_plain out/demo"
        )
    began = time.perf_counter()
    *plain_folder, folder = [Path(word) for word in words]
    training, evaluations = logged(folder)
    plain = logged(plain_folder[0])[1] if plain_folder else []
    out = Path(settings.out or folder / "loss.png")
    points = curve(training, "losses", 2, settings.smooth)
    step = crossing(points.steps, points.gaps)
    numbers = {"run": str(folder), "crossing": step, "evaluations": evaluations, "plain": plain}
    numbers = origin("loss_curves", settings, began) | numbers
    try:
        write_json(out.with_suffix(".json"), numbers)
    except OSError as error:
        raise UserError(
            f"--out={out}: {error}; name a .png file in a folder that can be written"
        ) from None
    drawn = draw_picture(
        out, lambda figure: draw(figure, training, evaluations, plain, settings.smooth)
    )
    if not len(points.steps):
        crossed = (
            "was not logged often enough to compare; "
            "train by more passes, log more often, or lower --smooth"
        )
    elif step is None:
        crossed = "does not stay under pass 1"
    else:
        crossed = f"is under pass 1 from step {step} on"
    averaged = f"training batches, {settings.smooth} logged steps averaged"
    wrote = f"; wrote {out}" if drawn else ""
    print(f"{folder}: pass 2 {crossed} ({averaged}){wrote}")
    return 0


if __name__ == "__main__":
    run(main)
