"""The loss of every pass over a run (the paper's Fig. 18): a working configuration's pass 2 crosses under its pass 1.

    python -m experiments.loss_curves out/demo        writes out/demo/loss.png

Dots are validation losses, thin lines the training batches (smoothed over `smooth` logged steps).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import UserError, parse, run, setting


@dataclass(frozen=True)
class Settings:
    smooth: int = setting(5, "logged steps that a point of the training curves averages")
    out: str = setting("", "the PNG file; empty: loss.png in the run's folder")

    def __post_init__(self):
        if self.smooth < 1:
            raise ValueError(f"smooth={self.smooth} must be at least 1")


def read_log(folder: Path) -> tuple[list[dict], list[dict]]:
    """The training and the evaluation lines of a run's log.jsonl."""
    if not (folder / "log.jsonl").is_file():
        raise UserError(f"no log at {folder / 'log.jsonl'}; name a run's folder, e.g. out/demo")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "losses" in line], [line for line in lines if "val_losses" in line]


def crossing(evaluations: list[dict]) -> int | None:
    """The first evaluated step from which pass 2's validation loss stays under pass 1's, or None."""
    below = [len(losses) > 1 and losses[1] < losses[0] for losses in (line["val_losses"] for line in evaluations)]
    last_above = max((i for i, under in enumerate(below) if not under), default=-1)
    return evaluations[last_above + 1]["step"] if last_above + 1 < len(below) else None


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="run")
    if len(words) != 1:
        raise UserError("name one run's folder, e.g. python -m experiments.loss_curves out/demo")
    folder = Path(words[0])
    training, evaluations = read_log(folder)
    if not evaluations:
        raise UserError(f"{folder}/log.jsonl has no evaluations to draw; train with --eval_iters of at least 1")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats a token)", title=f"{folder}: loss by pass")
    for k in range(max(len(line["val_losses"]) for line in evaluations)):
        points = [(line["step"], line["val_losses"][k]) for line in evaluations if len(line["val_losses"]) > k]
        axes.plot(*zip(*points), "o-", ms=3, lw=1.2, color=f"C{k}", label=f"pass {k + 1}, validation")
        steps, losses = [np.array([line[name] if name == "step" else line[name][k] for line in training
                                   if line["passes"] > k], dtype=float) for name in ("step", "losses")]
        if len(losses) >= settings.smooth:
            window = np.ones(settings.smooth) / settings.smooth
            smoothed = np.convolve(losses, window, "valid")
            axes.plot(steps[settings.smooth - 1:], smoothed, lw=0.6, alpha=0.6, color=f"C{k}")
    lowest = min(min(line["val_losses"]) for line in evaluations)
    axes.set_ylim(lowest - 0.1, lowest + 1.2)
    axes.legend()
    out = Path(settings.out or folder / "loss.png")
    figure.savefig(out, dpi=110)
    step = crossing(evaluations)
    crossed = "does not stay under pass 1" if step is None else f"is under pass 1 from step {step} on"
    print(f"{folder}: pass 2 {crossed}; wrote {out}")
    return 0


if __name__ == "__main__":
    run(main)
