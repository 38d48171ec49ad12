"""Validation loss against feedback passes in prefill (the paper's Fig. 5 and its long horizon).

    python -m experiments.prefill_passes out/plain out/demo               0..8 feedback passes
    python -m experiments.prefill_passes out/plain out/two out/demo --long    0..1,000, and changes

The paper: most of the gain comes with the first feedback pass, further ones add less and less.
Models trained with two passes only rise and oscillate when passes continue beyond those of
training; a few batches of three passes make the learned map a contraction, flat for 30 and for
1,000 passes, on windows of 8,192 tokens.

Measured, over evenly spaced windows of the validation split; h_k are the states after k passes in
all, Eqs. (7)-(9), and a pass after the first is a feedback pass:
- the loss, in nats per token, after 0, 1, ... feedback passes. A checkpoint that never trained
  feedback has its plain loss alone and is drawn as a level;
- the change ||h_k - h_(k-1)|| / ||h_k|| of a position's state, its mean over positions.

What a finite window can show. After k passes the states of positions 1..k are those of the
recurrence, whatever the weights: exact by construction. So after block_size passes nothing changes
any more, and EVERY model has converged; 1,000 passes over 64 tokens prove nothing by being flat.
Hence both numbers are given twice: over all positions, and "beyond", over the positions > k alone,
which construction has not reached, there as a difference to the plain pass at the same positions
(later positions have more to read, so that their losses are lower in every model). Long windows
(train with --block_size=256) leave more of them. Beyond:
- a contraction's change falls by a factor per pass, and its loss soon stays level;
- a model that diverges in the paper's sense has a change that stays large, and a loss that rises
  or oscillates until the window is used up, to a fixed point worse than the plain pass.
The fixed point itself is not an artefact: Soft decoding after a prompt of one token computes it,
token by token. A contraction says that a few passes approach it, not that it is the best pass.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from experiments.report import LOSS, held_out, labels, save, start, table
from experiments.report import Settings as Shared
from harness.checkpoint import without_feedback
from harness.configurator import UserError, parse, require, run, setting
from model import GPT

SHORT = 8  # feedback passes
LONG = 1000  # feedback passes with --long
BATCH = 12  # windows at a time, as in training


@dataclass(frozen=True)
class Settings(Shared):
    seed: int = setting(1, "not used", flag=False)
    feedback_passes: int = setting(0, f"at most; 0: {SHORT}, with --long {LONG:,}")
    long: bool = setting(False, "log axis, and beside the loss the positions beyond and changes")

    def __post_init__(self):
        super().__post_init__()
        rule = f"positive, or 0 for {SHORT} (with --long {LONG:,})"
        require(self, "feedback_passes", self.feedback_passes >= 0, rule)


@torch.no_grad()
def by_position(
    model: GPT, idx: Tensor, targets: Tensor, n_feedback: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean losses (n_feedback + 1, T) and changes (n_feedback, T), by feedback pass and position.

    Over tokens and next tokens (N, T). The states of three passes at most are held at a time.
    Where a pass changes no bit, the later ones cannot either: they take its numbers unrun.
    """
    T = idx.size(1)
    losses = np.zeros((n_feedback + 1, T))
    changes = np.zeros((n_feedback, T))
    batches = zip(idx.split(BATCH), targets.split(BATCH), strict=True)
    for part, part_targets in tqdm(list(batches), "windows", leave=False, disable=None):
        share = len(part) / len(idx)
        e = model.embed(part)  # (B, T, D)
        h = model.stack(e)
        losses[0] += share * mean_row(model.nll(h, part_targets))
        still = False
        for n in range(1, n_feedback + 1):
            if not still:
                h_before = h
                h = model.next_pass(h_before, e)
                change = mean_row((h - h_before).norm(dim=-1) / h.norm(dim=-1))  # (T,)
                nll = mean_row(model.nll(h, part_targets))  # (T,)
                still = torch.equal(h, h_before)
            losses[n] += share * nll
            changes[n - 1] += share * change
    return losses, changes


def mean_row(values: Tensor) -> np.ndarray:
    """The mean of values (B, T) over rows, in double precision: (T,)."""
    return values.cpu().double().mean(0).numpy()


def measure(model: GPT, idx: Tensor, targets: Tensor, n_feedback: int) -> dict:
    """The numbers of one model over tokens and next tokens (N, T), lists by feedback pass.

    losses, changes            over all positions; from 0 and from 1 feedback passes on
    losses_beyond,             over the positions that n feedback passes, n + 1 in all, have not
    changes_beyond             made exact: those > n + 1, while there are any
    plain_beyond               the plain pass's loss at the same positions as losses_beyond
    """
    losses, changes = by_position(model, idx, targets, n_feedback)
    T = idx.size(1)
    beyond = range(min(n_feedback + 1, T - 1))  # the numbers of feedback passes that leave any
    return {
        "losses": losses.mean(1).tolist(),
        "changes": changes.mean(1).tolist(),
        "losses_beyond": [losses[n, n + 1 :].mean() for n in beyond],
        "plain_beyond": [losses[0, n + 1 :].mean() for n in beyond],
        "changes_beyond": [changes[n - 1, n + 1 :].mean() for n in beyond if n],
    }


def gains_beyond(result: dict) -> list[float]:
    """Loss minus the plain pass's, over positions not exact by construction, by feedback pass."""
    pairs = zip(result["losses_beyond"], result["plain_beyond"], strict=True)
    return [ours - plain for ours, plain in pairs]


def shown(n_feedback: int) -> list[int]:
    """The rows of the table: 0, 1, 2, 3, then powers of two, and the last."""
    powers = [2**i for i in range(n_feedback.bit_length())]
    return sorted(n for n in {0, 1, 2, 3, *powers, n_feedback} if n <= n_feedback)


def columns(name: str, result: dict, long: bool) -> dict[str, dict[int, float]]:
    """A run's columns of the table: its numbers by feedback passes."""
    losses = dict(enumerate(result["losses"]))
    if not long:
        return {f"{name}: loss": losses}
    return {
        f"{name}: loss": losses,
        f"{name}: change": dict(enumerate(result["changes"], start=1)),
        f"{name}: beyond, loss minus plain pass": dict(enumerate(gains_beyond(result))),
        f"{name}: beyond, change": dict(enumerate(result["changes_beyond"], start=1)),
    }


def draw(figure, results: dict[str, dict], n_feedback: int, long: bool) -> None:
    """Loss against feedback passes, a line per checkpoint; with `long` what is beyond as well."""
    panels = figure.subplots(3 if long else 1, 1, sharex=True, squeeze=False)[:, 0]
    for number, (name, result) in enumerate(results.items()):
        style = {"color": f"C{number}", "lw": 1.2}
        if not result["changes"]:
            label = f"{name} (no feedback)"
            panels[0].axhline(result["losses"][0], ls="--", label=label, **style)
            continue
        panels[0].plot(result["losses"], "-" if long else "o-", ms=4, label=name, **style)
        if long:
            changes = np.array(result["changes_beyond"])  # a log axis has no place for zeros
            passes = np.arange(1, len(changes) + 1)
            panels[1].plot(gains_beyond(result), **style)
            panels[2].plot(passes[changes > 0], changes[changes > 0], **style)
    panels[0].set(ylabel=LOSS, title="All positions" if long else "Validation loss")
    panels[-1].set(xlabel="feedback passes")
    if long:
        figure.set_size_inches(7, 8)
        panels[1].axhline(0, color="gray", lw=1)
        panels[1].set(ylabel="minus the plain pass", title="Positions not exact by construction")
        panels[2].set(ylabel="change of the states", yscale="log")
        panels[0].set_xscale("symlog", linthresh=1)
        panels[0].set_xlim(0, n_feedback)
        panels[2].xaxis.set_major_formatter("{x:.0f}")
        for size in {result["block_size"] for result in results.values()}:
            for panel in panels:
                panel.axvline(size / 2 - 1, color="gray", ls="--", lw=1)
                panel.axvline(size - 1, color="gray", ls=":", lw=1)
        lines = panels[0].lines[-2:]
        lines[0].set_label("half of the positions exact by construction")
        lines[1].set_label("all of them")
    panels[0].legend()


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError(
            "name at least one checkpoint, e.g. python -m experiments.prefill_passes out/demo"
        )
    began, runs = start(paths, settings)
    n_feedback = settings.feedback_passes or (LONG if settings.long else SHORT)
    results = {}
    for path, name, (model, checkpoint, tokens) in zip(paths, labels(paths), runs, strict=True):
        idx, targets = held_out(model, tokens, settings.n_windows)
        problem = without_feedback(path, checkpoint)
        if problem:
            print(f"{name}, its plain loss alone: {problem}")
        about = {
            "checkpoint": path,
            "block_size": model.config.block_size,
            "n_windows": len(idx),
        }
        numbers = measure(model, idx, targets, 0 if problem else n_feedback)
        results[name] = about | numbers
    n_feedback = max(len(result["changes"]) for result in results.values())  # 0: all are plain
    long = settings.long and n_feedback > 0
    cells: dict[str, dict[int, float]] = {}
    for name, result in results.items():
        cells |= columns(name, result, long)
    rows = []
    for n in shown(n_feedback):
        rows.append([n, *(column.get(n, "") for column in cells.values())])
    print(table(["feedback passes", *cells], rows))
    numbers = {"feedback_passes": n_feedback, "checkpoints": results}
    save(
        "prefill_passes",
        settings,
        began,
        numbers,
        lambda figure: draw(figure, results, n_feedback, long),
    )
    return 0


if __name__ == "__main__":
    run(main)
