"""Validation loss against the number of feedback passes in prefill (the paper's Fig. 5 and its long-horizon test).

    python -m experiments.prefill_passes out/plain out/demo                    0..8 feedback passes
    python -m experiments.prefill_passes out/two_passes out/demo --long        0..1,000, and the change of the states

The paper: most of the gain comes with the first feedback pass, further ones add less and less. Models trained with two
passes only rise and oscillate when passes go on beyond those of training; a few batches of three passes make the
learned map a contraction, flat for 30 and for 1,000 passes.

Measured, over evenly spaced windows of the validation split, with h_k the states after k feedback passes, Eqs. (8)-(9),
and h_0 those of ordinary prefill, Eq. (7):
- the loss, in nats a token, after k = 0, 1, ... feedback passes. A checkpoint that never trained feedback has its plain
  loss alone and is drawn as a level;
- the change ||h_k - h_(k-1)|| / ||h_k|| of a position's state, its mean over positions and windows.

What a finite window can and cannot show. After k feedback passes the states of the first k + 1 positions are those of
the recurrence, whatever the weights. So from block_size - 1 passes on nothing changes any more, and EVERY model
converges: 1,000 passes over a window of 64 tokens prove nothing by being flat. The way there tells the models apart:
- a contraction's change falls by a factor a pass, to rounding, and its loss is flat long before block_size;
- a model that diverges in the paper's sense has a change that stays large and ends only because the exact positions use
  up the window, and a loss that rises or oscillates until then, to a fixed point worse than ordinary prefill.
The fixed point itself is no artefact: Soft decoding after a prompt of one token computes it, token by token. A
contraction says that a few passes approach it, not that it is the pass with the lowest loss.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from harness.checkpoint import without_feedback
from harness.configurator import UserError, parse, run, setting
from experiments.report import Settings as Shared
from experiments.report import held_out, labels, save, start, table
from model import GPT

SHORT, LONG = 8, 1000  # feedback passes
BATCH = 12  # windows at a time, as in training


@dataclass(frozen=True)
class Settings(Shared):
    passes: int = setting(0, f"feedback passes; 0: {SHORT}, with --long {LONG:,}")
    long: bool = setting(False, "log axis for the passes, and the change of the states beside the loss")

    def __post_init__(self):
        super().__post_init__()
        if self.passes < 0:
            raise ValueError(f"passes={self.passes} must be positive, or 0 for {SHORT} (with --long {LONG:,})")


def measure(model: GPT, idx: Tensor, targets: Tensor, n_passes: int) -> tuple[list[float], list[float]]:
    """Mean loss after 0..n_passes feedback passes over tokens and next tokens (N, T), and each pass's mean change.

    The states of three passes at most are held at a time. Where a pass changes no bit, the later ones cannot either:
    they take its numbers unrun.
    """
    losses, changes = np.zeros(n_passes + 1), np.zeros(n_passes)
    with torch.no_grad():
        for part, part_targets in zip(tqdm(idx.split(BATCH), "windows", leave=False, disable=None),
                                      targets.split(BATCH)):
            e, share = model.embed(part), len(part) / len(idx)
            h, still = model.stack(e), False
            losses[0] += share * loss(model, h, part_targets)
            for k in range(1, n_passes + 1):
                if not still:
                    h_before, h = h, model.next_pass(h, e)
                    change = ((h - h_before).norm(dim=-1) / h.norm(dim=-1)).mean().item()
                    nll, still = loss(model, h, part_targets), torch.equal(h, h_before)
                losses[k] += share * nll
                changes[k - 1] += share * change
    return losses.tolist(), changes.tolist()


def loss(model: GPT, h: Tensor, targets: Tensor) -> float:
    """Cross-entropy, in nats a token, of states (B, T, D) against next tokens (B, T)."""
    return F.cross_entropy(model.head(h).flatten(0, 1), targets.flatten()).item()


def shown(n_passes: int) -> list[int]:
    """The rows of the table: 0, 1, 2, 3, then powers of two, and the last."""
    return sorted({0, 1, 2, 3, n_passes, *(2 ** i for i in range(n_passes.bit_length()))} & set(range(n_passes + 1)))


def draw(figure, results: dict[str, dict], n_passes: int, long: bool) -> None:
    """Loss against passes, a line a checkpoint; with `long` on a log axis, and the change of the states beside."""
    axes = figure.subplots(1, 1 + long, squeeze=False)[0]
    for color, (name, result) in enumerate(results.items()):
        style = {"color": f"C{color}", "label": name, "lw": 1.2}
        if result["changes"]:
            axes[0].plot(result["losses"], "-" if long else "o-", ms=4, **style)
        else:
            axes[0].axhline(result["losses"][0], ls="--", **style)
    axes[0].set(xlabel="feedback passes k", ylabel="validation loss (nats a token)", title="Loss after k passes")
    if long:
        figure.set_size_inches(10, 4.2)
        for color, result in enumerate(results.values()):
            changes = np.array(result["changes"])
            passes = np.arange(1, len(changes) + 1)[changes > 0]  # a log axis has no place for the zeros
            axes[1].plot(passes, changes[changes > 0], lw=1.2, color=f"C{color}")
        axes[0].set_xscale("symlog", linthresh=1)
        axes[0].set_xlim(0, n_passes)
        axes[1].set(xlabel="feedback passes k", ylabel=r"mean of $\|h_k - h_{k-1}\|\ /\ \|h_k\|$",
                    title="Change of the states by pass k", xscale="log", yscale="log")
        for number, block_size in enumerate({result["block_size"] for result in results.values()}):
            label = "" if number else "block_size: exact, whatever the model"
            for panel in axes:
                panel.axvline(block_size, color="gray", ls=":", lw=1, label=label if panel is axes[0] else "")
    axes[0].legend()


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError("name at least one checkpoint, e.g. python -m experiments.prefill_passes out/demo")
    (began, runs), n_passes, results = start(paths, settings), settings.passes or (LONG if settings.long else SHORT), {}
    for path, name, (model, checkpoint, tokens) in zip(paths, labels(paths), runs):
        idx, targets = held_out(model, tokens, settings.n_windows)
        own_passes = n_passes
        if problem := without_feedback(path, checkpoint):
            print(f"{name}, its plain loss alone: {problem}")
            own_passes = 0
        losses, changes = measure(model, idx, targets, own_passes)
        results[name] = {"checkpoint": path, "block_size": model.config.block_size, "n_windows": len(idx),
                         "losses": losses, "changes": changes}
    n_passes = max(len(result["changes"]) for result in results.values())  # 0 where all are plain
    long = settings.long and n_passes > 0
    header, rows = ["feedback passes"], [[k] for k in shown(n_passes)]
    for name, result in results.items():
        header += [f"{name}: loss"] + [f"{name}: change"] * long
        for row in rows:
            k = row[0]
            row.append(result["losses"][k] if k < len(result["losses"]) else "")
            if long:
                row.append(result["changes"][k - 1] if 0 < k <= len(result["changes"]) else "")
    print(table(header, rows))
    save("prefill_passes", settings, began, {"passes": n_passes, "checkpoints": results},
         lambda figure: draw(figure, results, n_passes, long))
    return 0


if __name__ == "__main__":
    run(main)
