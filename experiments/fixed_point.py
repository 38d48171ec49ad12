"""How many passes are enough: passes used, and loss given up, when they stop at a tolerance (the paper's limitation).

    python -m experiments.fixed_point out/demo [CHECKPOINT...]

The paper leaves the number of passes to the user. `GPT.reconstruct`, and with it `prefill` and `generate`, take `tol`:
the passes end once ||h^(k) - h^(k-1)|| <= tol ||h^(k)||, norms over all positions and channels of a row.

Measured on a fully fused prefill of evenly spaced windows of the validation split, each by itself, for every tolerance
and for 0, the exact fixed point: after block_size passes the states are those of the recurrence, Eqs. (3)-(6).
- passes used, the plain one included: the mean over windows, and the most, which is what a batch of all of them uses,
  for it stops when its last row is under the tolerance; `out of reach`: the share of windows that took all block_size;
- loss given up, in nats a token: the loss where a window stopped minus its loss at the fixed point, the mean over
  windows and the worst of them. It is negative where the fixed point, which training by few passes never saw, is worse;
- agreement: the share of positions whose most likely next token is that of the fixed point.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from harness.configurator import UserError, parse, run, setting
from experiments.report import Settings as Shared
from experiments.report import held_out, labels, need_feedback, save, start, table
from model import GPT

BATCH = 40  # windows at a time


@dataclass(frozen=True)
class Settings(Shared):
    tols: tuple[float, ...] = setting((1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 1e-5, 1e-6),
                                      "tolerances; 0, all block_size passes, comes by itself")

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "tols", tuple(sorted(set(self.tols) - {0}, reverse=True)))
        if not self.tols or not all(0 < tol < 1 for tol in self.tols):
            raise ValueError(f"tols={list(self.tols)} must lie between 0 and 1, e.g. 1e-1,1e-2,1e-3")


@torch.no_grad()
def measure(model: GPT, idx: Tensor, targets: Tensor, tols: tuple[float, ...]) -> dict[str, Tensor]:
    """By tolerance, falling and with 0 as the last, and window of tokens and next tokens (N, T): where passes stop.

    `passes` (tols + 1, N), `losses` in nats a token (tols + 1, N), `agree` as a share of positions (tols + 1, N), and
    `plain` (N,): the loss of the first pass.
    """
    parts = [measure_batch(model, *part, torch.tensor([*tols, 0.0], device=idx.device)[:, None]) for part in
             zip(tqdm(idx.split(BATCH), "windows", leave=False, disable=None), targets.split(BATCH))]
    return {name: torch.cat([part[name] for part in parts], dim=-1).cpu() for name in parts[0]}


def measure_batch(model: GPT, idx: Tensor, targets: Tensor, tols: Tensor) -> dict[str, Tensor]:
    """`measure` of a few windows (B, T) at once; tols (tols + 1, 1)."""
    e, n_passes = model.embed(idx), idx.size(1)
    h = model.stack(e)  # Eq. (7)
    plain, best = read(model, h, targets)
    stopped = torch.zeros(len(tols), len(idx), dtype=torch.bool, device=idx.device)  # (tols + 1, B)
    passes, losses, choices = stopped.long(), stopped.to(plain.dtype), best.repeat(len(tols), 1, 1)
    for k in range(2, n_passes + 1):
        h_before, h = h, model.next_pass(h, e)  # Eqs. (8)-(9)
        change = (h - h_before).norm(dim=(1, 2)) / h.norm(dim=(1, 2))  # (B,)
        last = k == n_passes or torch.equal(h, h_before)  # no bit changes, so none will: the fixed point already
        new = ~stopped & ((change <= tols) & (tols > 0) | last)  # (tols + 1, B)
        if new.any():
            loss, best = read(model, h, targets)
            passes, losses = torch.where(new, k, passes), torch.where(new, loss, losses)
            choices = torch.where(new[..., None], best, choices)  # (tols + 1, B, T)
            stopped |= new
        if last:
            break
    passes[-1] = n_passes  # what tol=0 takes, where the last ones change nothing too
    agree = (choices == choices[-1]).double().mean(dim=-1)  # (tols + 1, B)
    return {"passes": passes, "losses": losses, "agree": agree, "plain": plain}


def read(model: GPT, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's loss (B,), in nats a token, and the most likely next tokens (B, T), by states (B, T, D)."""
    logits = model.head(h)  # (B, T, V)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1), logits.argmax(dim=-1)


def summary(found: dict[str, Tensor], tols: tuple[float, ...], n_passes: int) -> dict:
    """Means and extremes over windows of what `measure` found; n_passes: block_size."""
    given_up = found["losses"].double() - found["losses"][-1].double()  # (tols + 1, N)
    passes = found["passes"].double()
    columns = {"tol": [*tols, 0.0], "passes_mean": passes.mean(dim=1).tolist(),
               "passes_max": found["passes"].max(dim=1).values.tolist(),
               "out_of_reach": (passes == n_passes).double().mean(dim=1).tolist(),
               "loss_given_up": given_up.mean(dim=1).tolist(), "loss_given_up_max": given_up.max(dim=1).values.tolist(),
               "agreement": found["agree"].mean(dim=1).tolist()}
    return {"block_size": n_passes, "n_windows": passes.size(1), "plain_loss": found["plain"].double().mean().item(),
            "fixed_point_loss": found["losses"][-1].double().mean().item(), "by_tol": columns}


def plot(figure, results: dict[str, dict]) -> None:
    """Two panels against the tolerance, which falls to the right: passes used, and loss given up."""
    figure.set_size_inches(10, 4.2)
    panels = figure.subplots(1, 2)
    for color, (name, result) in enumerate(results.items()):
        columns = {key: np.array(column[:-1], dtype=float) for key, column in result["by_tol"].items()}
        tols, given_up, worst = columns["tol"], columns["loss_given_up"], columns["loss_given_up_max"]
        solid, dashed = {"color": f"C{color}", "lw": 1.4}, {"color": f"C{color}", "lw": 1, "ls": "--"}
        panels[0].plot(tols, columns["passes_mean"], "o-", ms=4, label=f"{name}, mean", **solid)
        panels[0].plot(tols, columns["passes_max"], label=f"{name}, most", **dashed)
        panels[0].axhline(result["block_size"], color="gray", ls=":", lw=1)
        panels[1].plot(tols, np.where(given_up != 0, abs(given_up), np.nan), label=f"{name}, mean", **solid)
        panels[1].plot(tols, np.where(worst > 0, worst, np.nan), label=f"{name}, worst window", **dashed)
        for shown, fill in ((given_up > 0, f"C{color}"), (given_up < 0, "white")):
            panels[1].plot(tols[shown], abs(given_up[shown]), "o", ms=5, mfc=fill, color=f"C{color}")
    panels[0].plot([], [], color="gray", ls=":", lw=1, label="all block_size passes")
    panels[1].plot([], [], "o", ms=5, mfc="white", color="gray", label="hollow: better than the fixed point")
    panels[0].set(ylim=0, ylabel="passes used", title="Passes until the states settle")
    panels[1].set(ylabel="loss given up (nats a token)", yscale="log", title="Against the exact fixed point")
    for panel in panels:
        panel.set(xlabel="tolerance: ||h - h'|| / ||h||", xscale="log", xlim=(2 * max(tols), min(tols) / 2))
        panel.legend(fontsize=8)


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError("name at least one checkpoint, e.g. python -m experiments.fixed_point out/demo")
    (began, runs), results = start(paths, settings), {}
    for path, name, (model, checkpoint, tokens) in zip(paths, labels(paths), runs):
        need_feedback(path, checkpoint)
        found = measure(model, *held_out(model, tokens, settings.n_windows), settings.tols)
        result = results[name] = summary(found, settings.tols, model.config.block_size)
        print(f"{name}: loss {result['plain_loss']:.4f} after the plain pass, {result['fixed_point_loss']:.4f} at the "
              f"fixed point, nats a token")
        print(table(["tol", "passes, mean", "most", "out of reach", "loss given up", "worst window", "agreement"],
                    zip(*result["by_tol"].values())), "\n")
    save("fixed_point", settings, began, {"checkpoints": results}, lambda figure: plot(figure, results))
    return 0


if __name__ == "__main__":
    run(main)
