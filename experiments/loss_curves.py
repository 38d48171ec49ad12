"""The loss of every pass over a run (the paper's Fig. 18): a working configuration's pass 2 crosses under its pass 1.

    python -m experiments.loss_curves out/demo        writes out/demo/loss.png

Left the losses, right those of the later passes minus pass 1's on the same tokens, in nats. Dots are validation losses,
thin lines the training batches, averaged over `smooth` logged steps.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness import runlog
from harness.configurator import UserError, parse, run, setting


@dataclass(frozen=True)
class Settings:
    smooth: int = setting(5, "logged steps that a point of the training curves averages")
    out: str = setting("", "the PNG file; empty: loss.png in the run's folder")

    def __post_init__(self):
        if self.smooth < 1:
            raise ValueError(f"smooth={self.smooth} must be at least 1")


def read_log(folder: Path) -> tuple[list[dict], list[dict]]:
    """The training and the evaluation lines of a run's log.jsonl."""
    file = folder / "log.jsonl"
    if not file.is_file():
        raise UserError(f"no log at {file}; name a run's folder, e.g. out/demo")
    lines = runlog.read_log(file)
    return [line for line in lines if "losses" in line], [line for line in lines if "val_losses" in line]


def curve(lines: list[dict], name: str, k: int, smooth: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of lines with a pass k (from 0): steps, losses, and losses minus the first pass's, (N,) each, averaged."""
    points = np.array([(line["step"], line[name][k], line[name][k] - line[name][0]) for line in lines
                       if len(line[name]) > k]).reshape(-1, 3)
    if len(points) < smooth:
        return points[:0, 0], points[:0, 1], points[:0, 2]
    losses, gaps = (np.convolve(points[:, column], np.ones(smooth) / smooth, "valid") for column in (1, 2))
    return points[smooth - 1:, 0], losses, gaps


def crossing(steps: np.ndarray, gaps: np.ndarray) -> int | None:
    """The first step from which pass 2 stays under pass 1, its gap negative, or None."""
    above = np.flatnonzero(gaps >= 0)
    first = above[-1] + 1 if len(above) else 0
    return int(steps[first]) if first < len(steps) else None


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="run")
    if len(words) != 1:
        raise UserError("name one run's folder, e.g. python -m experiments.loss_curves out/demo")
    folder = Path(words[0])
    training, evaluations = read_log(folder)
    if not evaluations:
        raise UserError(f"{folder}/log.jsonl has no evaluations to draw; train with --eval_iters of at least 1")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for k in range(max(len(line["val_losses"]) for line in evaluations)):
        for lines, name, smooth, style in ((evaluations, "val_losses", 1, {"marker": "o", "ms": 3, "lw": 1.2}),
                                           (training, "losses", settings.smooth, {"lw": 0.7, "alpha": 0.6})):
            steps, losses, gaps = curve(lines, name, k, smooth)
            if not len(steps):
                continue
            label = f"pass {k + 1}, {'validation' if lines is evaluations else 'training'}"
            left.plot(steps, losses, color=f"C{k}", label=label, **style)
            if k:
                right.plot(steps, gaps, color=f"C{k}", label=label, **style)
    lowest = min(min(line["val_losses"]) for line in evaluations)
    left.set(xlabel="step", ylabel="loss (nats a token)", title=f"{folder}: loss by pass",
             ylim=(lowest - 0.1, lowest + 1.2))
    left.legend(fontsize="small")
    right.set(xlabel="step", ylabel="loss minus pass 1's (nats a token)", title="Later passes against pass 1")
    right.axhline(0, color="C0", lw=1)
    out = Path(settings.out or folder / "loss.png")
    try:
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:
        raise UserError(f"--out={out}: {error}; name a .png file in a folder that can be written") from None
    steps, _, gaps = curve(training, "losses", 1, settings.smooth)
    step = crossing(steps, gaps)
    crossed = "does not stay under pass 1" if step is None else f"is under pass 1 from step {step} on"
    if not len(steps):
        crossed = "was not logged often enough to compare; train by more passes, log more often, or lower --smooth"
    print(f"{folder}: pass 2 {crossed} (training batches, {settings.smooth} logged steps averaged); wrote {out}")
    return 0


if __name__ == "__main__":
    run(main)
