"""How many prefill passes are enough: passes used, and loss given up, by tolerance.

    python experiments/fixed_point.py out/demo [CHECKPOINT...]

The question is this project's. The paper leaves open with how many recurrence steps to train; here
training is over, and the passes of a prefill, or of a cache rebuilt from its tokens, are to end
once they change little. `GPT.reconstruct`, and with it `prefill` and `generate`, take `tol`: the
passes end once ||h^(k) - h^(k-1)|| <= tol ||h^(k)||, norms over all channels and over the fused
positions of a row, that is without its plain prompt.

Measured on evenly spaced windows of the validation split, each by itself, of which the first
--n_plain positions are plain and all others fused, for every tolerance and for 0, the exact fixed
point: after at most block_size passes the states are those of the recurrence, Eqs. (3)-(6). Losses
and agreement are those of the fused positions.
- passes used, k, the plain one included: the mean over windows, and the most, which is what a batch
  of all of them uses, because it stops when its last row is under the tolerance; `out of reach`:
  the share of windows that took all passes;
- loss given up, in nats per token: the loss where a window stopped minus its loss at the fixed
  point, the mean over windows and the worst of them. It is negative where the fixed point, which
  training by few passes never saw, is worse. The row `plain` is one pass, k = 1;
- agreement: the share of positions whose most likely next token is that of the fixed point.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from tqdm import tqdm

from experiments import report
from harness.configurator import UserError, parse, require, run, setting
from model import GPT

BATCH = 40  # windows at a time


@dataclass(frozen=True)
class Settings(report.Settings):
    seed: int = setting(1, "not used", flag=False)
    tols: tuple[float, ...] = setting(
        (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 1e-5, 1e-6),
        "tolerances; 0, which takes all passes, comes by itself",
    )
    n_plain: int = setting(0, "tokens of a plain prompt before the fused ones; 0: a fused prefill")

    def __post_init__(self):
        super().__post_init__()
        positive = sorted(set(self.tols) - {0}, reverse=True)
        object.__setattr__(self, "tols", tuple(positive))
        fit = len(positive) > 0 and 0 < positive[-1] and positive[0] < 1
        require(self, "tols", fit, "numbers between 0 and 1, e.g. 1e-1,1e-2,1e-3")
        require(self, "n_plain", self.n_plain >= 0, "at least 0")


def exact_passes(n_positions: int, n_plain: int) -> int:
    """How many passes give the states of the recurrence: one more for each fused position."""
    return 1 + n_positions - max(n_plain, 1)  # the first position is always plain


@torch.no_grad()
def stopping_points(
    model: GPT, idx: Tensor, targets: Tensor, tols: tuple[float, ...], n_plain: int = 0
) -> dict[str, Tensor]:
    """Where the passes over windows of tokens and next tokens, (N, T) each, stop by tolerance.

    tols fall, and 0 follows as the last; S = len(tols) + 1. -> `passes` (S, N); `losses` (S, N), in
    nats per fused token; `agree` (S, N), as a share of them; `plain_loss` and `plain_agree` (N,),
    of the first pass.
    """
    n_plain = max(n_plain, 1)  # the first position is always plain
    every_tol = torch.tensor([*tols, 0.0], device=idx.device)  # (S,)
    parts = []
    batches = list(zip(idx.split(BATCH), targets.split(BATCH), strict=True))
    for tokens, next_tokens in tqdm(batches, "windows", leave=False, disable=None):
        parts.append(stopping_points_of_batch(model, tokens, next_tokens, every_tol, n_plain))
    return {name: torch.cat([part[name] for part in parts], dim=-1).cpu() for name in parts[0]}


def stopping_points_of_batch(
    model: GPT, idx: Tensor, targets: Tensor, tols: Tensor, n_plain: int
) -> dict[str, Tensor]:
    """`stopping_points` of a few windows (B, T) at once; tols (S,) end in 0."""
    n_passes = exact_passes(idx.size(1), n_plain)
    plain = torch.arange(idx.size(1), device=idx.device) < n_plain  # (T,)
    e = model.embed(idx)
    h = model.stack(e)  # Eq. (7)
    plain_loss, plain_choice = loss_and_choice(model, h, targets, n_plain)
    shape = len(tols), len(idx)  # (S, B)
    stopped = torch.zeros(shape, dtype=torch.bool, device=idx.device)
    passes = torch.ones(shape, dtype=torch.long, device=idx.device)
    losses = plain_loss.repeat(len(tols), 1)  # (S, B)
    choices = plain_choice.repeat(len(tols), 1, 1)  # (S, B, T - n_plain)
    for k in range(2, n_passes + 1):
        h_before = h
        h = model.next_pass(h, e, plain)  # Eqs. (8)-(9)
        change = relative_change(h[:, n_plain:], h_before[:, n_plain:])  # (B,)
        # Where no bit changes none will: this is the fixed point already.
        last = k == n_passes or torch.equal(h, h_before)
        small = (change <= tols[:, None]) & (tols[:, None] > 0)  # (S, B)
        stops = ~stopped & (small | last)  # (S, B)
        if stops.any():
            loss, choice = loss_and_choice(model, h, targets, n_plain)
            passes = torch.where(stops, k, passes)
            losses = torch.where(stops, loss, losses)
            choices = torch.where(stops[..., None], choice, choices)
            stopped |= stops
        if last:
            break
    passes[-1] = n_passes  # what tol=0 takes, also where the last passes change nothing
    return {
        "passes": passes,
        "losses": losses,
        "agree": (choices == choices[-1]).double().mean(dim=-1),  # (S, B)
        "plain_loss": plain_loss,
        "plain_agree": (plain_choice == choices[-1]).double().mean(dim=-1),  # (B,)
    }


def relative_change(h: Tensor, h_before: Tensor) -> Tensor:
    """||h - h_before|| / ||h|| of each row, (B, T, D) each -> (B,)."""
    return (h - h_before).norm(dim=(1, 2)) / h.norm(dim=(1, 2))


def loss_and_choice(
    model: GPT, h: Tensor, targets: Tensor, n_plain: int
) -> tuple[Tensor, Tensor]:
    """States (B, T, D) -> each row's loss (B,), in nats per token, and the likeliest next tokens.

    Both of the fused positions, so the tokens are (B, T - n_plain).
    """
    fused = h[:, n_plain:]  # (B, T - n_plain, D)
    loss = model.nll(fused, targets[:, n_plain:]).mean(dim=1)  # (B,)
    return loss, model.head(fused).argmax(dim=-1)


def over_windows(found: dict[str, Tensor], tols: tuple[float, ...], n_passes: int) -> dict:
    """Means and extremes over windows of `stopping_points`; n_passes: those of tol=0."""
    losses = found["losses"].double()  # (S, N)
    best = losses[-1]  # (N,)
    given_up = losses - best  # (S, N)
    plain_given_up = found["plain_loss"].double() - best  # (N,)
    passes = found["passes"].double()  # (S, N)
    return {
        "n_passes": n_passes,
        "n_windows": passes.size(1),
        "plain": {
            "loss": found["plain_loss"].double().mean().item(),
            "loss_given_up": plain_given_up.mean().item(),
            "loss_given_up_max": plain_given_up.max().item(),
            "agreement": found["plain_agree"].mean().item(),
        },
        "fixed_point_loss": best.mean().item(),
        "by_tol": {
            "tol": [*tols, 0.0],
            "passes_mean": passes.mean(dim=1).tolist(),
            "passes_max": found["passes"].max(dim=1).values.tolist(),
            "out_of_reach": (passes == n_passes).double().mean(dim=1).tolist(),
            "loss_given_up": given_up.mean(dim=1).tolist(),
            "loss_given_up_max": given_up.max(dim=1).values.tolist(),
            "agreement": found["agree"].mean(dim=1).tolist(),
        },
    }


def table_rows(result: dict) -> list[list]:
    plain = result["plain"]
    losses = [plain["loss_given_up"], plain["loss_given_up_max"]]
    rows = [["plain", 1.0, 1, 0.0, *losses, plain["agreement"]]]
    for row in zip(*result["by_tol"].values(), strict=True):
        rows.append(list(row))
    return rows


def plot(figure, results: dict[str, dict]) -> None:
    """Passes used, and loss given up, against the tolerance, which falls to the right."""
    figure.set_size_inches(7, 4.6)
    used, lost = figure.subplots(1, 2)
    for color, (name, result) in enumerate(results.items()):
        columns = {key: column[:-1] for key, column in result["by_tol"].items()}  # without 0
        tols = columns["tol"]
        look = {"color": f"C{color}"}
        used.plot(tols, columns["passes_mean"], "o-", ms=4, label=f"{name}, mean", **look)
        used.plot(tols, columns["passes_max"], "--", label=f"{name}, worst window", **look)
        used.axhline(result["n_passes"], ls=":", lw=1, label=f"{name}, all passes", **look)
        lost.plot(tols, columns["loss_given_up"], "o-", ms=4, **look)
        lost.plot(tols, columns["loss_given_up_max"], "--", **look)
        plain = result["plain"]["loss_given_up"]
        lost.axhline(plain, ls="-.", lw=1, **look)
        used.plot([], [], ls="-.", lw=1, label=f"{name}, plain (k = 1), mean", **look)
    lost.axhline(0, color="gray", lw=0.8)
    used.set(ylim=0, ylabel="passes used, k", title="Passes until states settle")
    lost.set(ylabel="nats per token", title="Loss minus the fixed point's")
    lost.set_yscale("symlog", linthresh=1e-3)  # the sign matters: the fixed point can be worse
    for panel in (used, lost):
        panel.set(xlabel="tolerance", xscale="log", xlim=(2 * max(tols), min(tols) / 2))
    handles, labels = used.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError(
            "name at least one checkpoint, e.g. python experiments/fixed_point.py out/demo"
        )
    began, runs = report.start(paths, settings)
    results = {}
    for path, name, loaded in zip(paths, report.labels(paths), runs, strict=True):
        model, checkpoint, tokens = loaded
        report.need_feedback(path, checkpoint)
        block_size = model.config.block_size
        if settings.n_plain >= block_size:
            raise UserError(
                f"--n_plain={settings.n_plain} leaves nothing to fuse in {path}, whose block_size "
                f"is {block_size}; give at most --n_plain={block_size - 1}"
            )
        idx, targets = report.held_out(model, tokens, settings.n_windows)
        found = stopping_points(model, idx, targets, settings.tols, settings.n_plain)
        n_passes = exact_passes(block_size, settings.n_plain)
        result = over_windows(found, settings.tols, n_passes)
        results[name] = result
        print(
            f"{name}: loss {result['plain']['loss']:.4f} after the plain pass, "
            f"{result['fixed_point_loss']:.4f} at the fixed point, nats per token"
        )
        header = ["tol", "passes, mean", "most", "out of reach", "loss given up", "worst window"]
        print(report.table([*header, "agreement"], table_rows(result)), "\n")
    numbers = {"checkpoints": results}
    report.save("fixed_point", settings, began, numbers, lambda figure: plot(figure, results))
    return 0


if __name__ == "__main__":
    run(main)
