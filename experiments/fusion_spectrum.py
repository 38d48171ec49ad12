"""What the fusion lets through: its matrices, the states before and after W_H, the gate (Fig. 17).

    python experiments/fusion_spectrum.py out/demo

The paper, of the gated fusion: W_H stays nearly full rank (1530 of 1536), its singular values fall
smoothly, and it keeps the variance spectrum of the states except for somewhat weaker low-variance
directions; the gate sigmoid(W_G e) fills the range from 0 to 1 and changes with the token, so that
it is not a fixed mask over the dimensions.

Measured for any kind of fusion, each beside an untrained model of the same shape and seed, so that
one sees what training did:
- singular values of every D x D matrix of the fusion, and of the two halves of a D x 2D one. Rank:
  how many lie above D eps times the largest, eps being the weights' own precision. Effective rank:
  exp of the entropy of their shares, D for equal values and 1 for a single one;
- the variance spectrum, i.e. the eigenvalues of the covariance as shares of their sum, of held-out
  states h^(passes) and of W_H h (concat: of W_R's first half times h), its effective rank, and the
  share of the variance that comes from the weaker half of the directions of h: a W_H that treats
  all directions alike leaves this share as it is;
- the two terms of the fused input u(h, e): the token's, u(0, e), and the state's, which is
  u(h, e) - u(0, e); their mean norms, and the state's share of the sum of both. With `gated` all of
  u is the state's;
- where there is a gate sigmoid(W_G norm(e)), its values over held-out tokens, each symbol as often
  as it occurs, and the parts of their variance: between dimensions (a fixed mask), between tokens
  (a common volume), and the rest, which reweights dimensions token by token.
The first position of a window is never fused and not counted.
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

from experiments import report
from harness.configurator import UserError, parse, require, run, setting
from model import GPT, Fusion
from train import INIT, seed_torch

BATCH = 40  # windows at a time
BINS = np.linspace(0, 1, 41)
WITH_GATE = ("gated", "gated_residual")  # of Eq. (4): sigmoid(W_G norm(e))
READS_STATE = ("W_H", "W_R[h]")  # the names of matrices whose input is a state


@dataclass(frozen=True)
class Settings(report.Settings):
    seed: int = setting(1, "not used", flag=False)
    passes: int = setting(
        4, "look at the states after this many passes in all; 1: a plain prefill's"
    )

    def __post_init__(self):
        super().__post_init__()
        require(self, "passes", self.passes >= 1, "at least 1")


# --------------------------------------------------------------------------------------------------
# Matrices


def matrices(fusion: Fusion, n_embd: int) -> dict[str, Tensor]:
    """Each matrix (D, D) of a fusion by name; one of (D, 2D) as its halves, W[h] and W[e]."""
    found = {}
    for parameter_name, weight in fusion.named_parameters():
        name = parameter_name.removesuffix(".weight")
        if weight.shape == (n_embd, n_embd):
            found[name] = weight.detach()
        elif weight.shape == (n_embd, 2 * n_embd):
            found[f"{name}[h]"] = weight.detach()[:, :n_embd]
            found[f"{name}[e]"] = weight.detach()[:, n_embd:]
    return found


def effective_rank(sizes: Tensor) -> float:
    """exp of the entropy of sizes (N,) >= 0 as shares of their sum (Roy and Vetterli, 2007).

    From 1 to N; 0 where all sizes are 0, as in a matrix that starts at zero.
    """
    total = sizes.sum()
    if total == 0:
        return 0.0
    return torch.special.entr(sizes / total).sum().exp().item()


def singular(matrix: Tensor) -> dict:
    """Singular values of a matrix, the largest first, its rank and its effective rank."""
    values = torch.linalg.svdvals(matrix.cpu().double())
    floor = max(matrix.shape) * torch.finfo(matrix.dtype).eps * values[0]
    return {
        "values": values.tolist(),
        "rank": int((values > floor).sum()),
        "effective_rank": effective_rank(values),
    }


def spectrum(covariance: Tensor, weight: Tensor) -> dict:
    """Of W h, by the covariance (D, D) of h and W (D, D): its spectrum, and what that says.

    The spectrum: the eigenvalues of its covariance as shares, the largest first.
    """
    values = torch.linalg.eigvalsh(weight @ covariance @ weight.T).flip(0).clamp(min=0)
    shares = values / values.sum().clamp(min=torch.finfo(values.dtype).tiny)
    return {
        "shares": shares.tolist(),
        "effective_rank": effective_rank(values),
        "weaker_half": from_weaker_half(covariance, weight),
    }


def from_weaker_half(covariance: Tensor, weight: Tensor) -> float:
    """The share of the variance of W h that comes from the weaker half of h's directions.

    covariance (D, D) of h: its directions are the eigenvectors. weight (D, D): W.
    """
    values, directions = torch.linalg.eigh(covariance)  # (D,), (D, D); ascending
    half = len(values) // 2
    images = weight @ directions  # (D, D)
    variances = images.square().sum(dim=0) * values.clamp(min=0)  # (D,), by direction of h
    total = variances.sum().clamp(min=torch.finfo(values.dtype).tiny)
    return (variances[:half].sum() / total).item()


# --------------------------------------------------------------------------------------------------
# Gate and terms


def gate_numbers(gates: Tensor, weights: Tensor) -> dict:
    """Histogram and variance of gates (S, D) of S symbols with weights (S,) that sum to 1."""
    of_dimension = weights @ gates  # (D,)
    of_token = gates.mean(dim=1)  # (S,)
    mean = of_dimension.mean()
    variance = weights @ (gates - mean).square().mean(dim=1)
    dimensions = ((of_dimension - mean).square().mean() / variance).item()
    tokens = (weights @ (of_token - mean).square() / variance).item()
    weight_of_gate = weights[:, None].expand_as(gates) / gates.size(1)  # (S, D)
    counts, _ = np.histogram(gates.numpy(), BINS, weights=weight_of_gate.numpy())
    return {
        "histogram": counts.tolist(),
        "mean": mean.item(),
        "std": variance.sqrt().item(),
        "below_0.1": (weights @ (gates < 0.1).double().mean(dim=1)).item(),
        "above_0.9": (weights @ (gates > 0.9).double().mean(dim=1)).item(),
        "share_dimensions": dimensions,
        "share_tokens": tokens,
        "share_tokens_by_dimension": 1 - dimensions - tokens,
    }


def term_numbers(of_h: Tensor, of_e: Tensor) -> dict:
    """Mean norms of the terms (N, D) of fused inputs, and the first one's share of both norms."""
    size_h = of_h.norm(dim=1).cpu().double()  # (N,)
    size_e = of_e.norm(dim=1).cpu().double()  # (N,)
    share = size_h / (size_h + size_e).clamp(min=torch.finfo(torch.float64).tiny)  # (N,)
    counts, _ = np.histogram(share.numpy(), BINS)
    return {
        "histogram": (counts / len(share)).tolist(),
        "norm_h": size_h.mean().item(),
        "norm_e": size_e.mean().item(),
        "share_h": share.mean().item(),
    }


# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def fusion_numbers(model: GPT, idx: Tensor, n_passes: int) -> dict:
    """All of the module's numbers for a model with a fusion on tokens (N, T)."""
    parts = []
    for part in tqdm(idx.split(BATCH), "windows", leave=False, disable=None):
        h = model.passes(part, n_passes)[-1]  # (B, T, D)
        parts.append(h[:, :-1].flatten(0, 1))  # (B (T-1), D): those that are fed back
    h = torch.cat(parts)  # (N (T-1), D)
    tokens = idx[:, 1:].flatten()  # (N (T-1),): those that enter with a state before them
    found = matrices(model.fusion, model.config.n_embd)
    covariance = torch.cov(h.T.cpu().double())  # (D, D)
    states = {"h": spectrum(covariance, torch.eye(len(covariance), dtype=covariance.dtype))}
    for name, matrix in found.items():
        if name in READS_STATE:
            states[f"{name} h"] = spectrum(covariance, matrix.cpu().double())
    e = model.embed(tokens)  # (N (T-1), D)
    token_term = model.fuse(torch.zeros_like(h), e)
    state_term = model.fuse(h, e) - token_term
    numbers = {
        "kind": model.fusion.kind,
        "matrices": {name: singular(matrix) for name, matrix in found.items()},
        "states": states,
        "terms": term_numbers(state_term, token_term),
    }
    if model.fusion.kind in WITH_GATE:
        symbols, counts = tokens.unique(return_counts=True)
        norm_e = model.input_norm(model.embed(symbols))  # (S, D)
        gates = torch.sigmoid(model.fusion.W_G(norm_e))  # (S, D), Eq. (4)
        weights = counts.cpu().double() / len(tokens)  # (S,)
        numbers["gate"] = gate_numbers(gates.cpu().double(), weights)
    return numbers


def untrained(model: GPT, seed: int) -> GPT:
    """A model of the same shape, initialised as train.py does for a run's seed; in eval mode."""
    seed_torch(seed, INIT)
    return GPT(model.config).eval().to(model.embedding.weight.device)


def table_column(numbers: dict) -> dict[str, str | float]:
    """What the table says of one model: row -> cell."""
    column = {}
    for name, of in numbers["matrices"].items():
        values = of["values"]
        column[f"{name}: rank"] = f"{of['rank']} of {len(values)}"
        column[f"{name}: effective rank"] = of["effective_rank"]
        column[f"{name}: smallest / largest"] = values[-1] / values[0] if values[0] else 0.0
    for name, of in numbers["states"].items():
        column[f"variance of {name}: effective rank"] = of["effective_rank"]
        column[f"variance of {name}: from the weaker half of h"] = of["weaker_half"]
    terms = numbers["terms"]
    column["mean norm of the state's term"] = terms["norm_h"]
    column["mean norm of the token's term"] = terms["norm_e"]
    column["the state's share of both norms"] = terms["share_h"]
    if "gate" in numbers:
        gate = numbers["gate"]
        column["gate: mean"] = gate["mean"]
        column["gate: standard deviation"] = gate["std"]
        column["gate: share below 0.1"] = gate["below_0.1"]
        column["gate: share above 0.9"] = gate["above_0.9"]
        column["gate: variance between dimensions (a fixed mask)"] = gate["share_dimensions"]
        column["gate: variance between tokens (a common volume)"] = gate["share_tokens"]
        column["gate: variance of dimensions by token"] = gate["share_tokens_by_dimension"]
    return column


def plot(figure, results: dict[str, dict[str, dict]]) -> None:
    """Two rows for each checkpoint: singular values and variance, then gate or terms."""
    figure.set_size_inches(7, 5.6 * len(results))
    parts = figure.subfigures(len(results), 1, squeeze=False)[:, 0]
    for part, (name, pair) in zip(parts, results.items(), strict=True):
        part.suptitle(f"{name} (fusion={pair['trained']['kind']})")
        plot_checkpoint(part, pair)


def plot_checkpoint(figure, pair: dict[str, dict]) -> None:
    (of_matrices, of_states), (of_inputs, legend) = figure.subplots(2, 2)
    colors = {}
    inputs = "gate" if "gate" in pair["trained"] else "state's share"
    for which, numbers in pair.items():
        look = {"ls": "-", "lw": 1.6} if which == "trained" else {"ls": "--", "lw": 1.0}
        for name, of in numbers["matrices"].items():
            color = colors.setdefault(name, f"C{len(colors)}")
            if of["values"][0] > 0:
                relative = np.array(of["values"]) / of["values"][0]
                of_matrices.plot(relative, color=color, label=f"{name}, {which}", **look)
            else:
                of_matrices.plot([], color=color, label=f"{name}, {which}: zero", **look)
        for name, of in numbers["states"].items():
            color = colors.setdefault(name, f"C{len(colors)}")
            if sum(of["shares"]) > 0:
                of_states.plot(of["shares"], color=color, label=f"{name}, {which}", **look)
            else:
                of_states.plot([], color=color, label=f"{name}, {which}: zero", **look)
        histogram = numbers.get("gate", numbers["terms"])["histogram"]
        color = colors.setdefault("inputs", f"C{len(colors)}")
        fill = {"fill": True, "alpha": 0.5} if which == "trained" else {}
        of_inputs.stairs(histogram, BINS, color=color, label=f"{inputs}, {which}", **fill, **look)
    of_matrices.set(
        xlabel="index", ylabel="value / largest", yscale="log", title="singular values"
    )
    of_states.set(xlabel="direction", ylabel="share", yscale="log", title="variance of states")
    if "gate" in pair["trained"]:
        of_inputs.set(xlabel="sigmoid(W_G norm(e))", ylabel="share of the values", title="gate")
    else:
        of_inputs.set(
            xlabel="state's term / both terms", ylabel="share of positions", title="norms in u"
        )
    of_inputs.set_xlim(0, 1)
    legend.axis("off")
    handles = []
    labels = []
    for panel in (of_matrices, of_states, of_inputs):
        more_handles, more_labels = panel.get_legend_handles_labels()
        handles += more_handles
        labels += more_labels
    legend.legend(handles, labels, loc="center")


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError(
            "name at least one checkpoint, e.g. python experiments/fusion_spectrum.py out/demo"
        )
    began, runs = report.start(paths, settings)
    results = {}
    for path, name, loaded in zip(paths, report.labels(paths), runs, strict=True):
        model, checkpoint, tokens = loaded
        report.need_feedback(path, checkpoint)
        idx, _ = report.held_out(model, tokens, settings.n_windows)
        initial = untrained(model, checkpoint["train_config"]["seed"])
        before = fusion_numbers(initial, idx, settings.passes)
        after = fusion_numbers(model, idx, settings.passes)
        results[name] = {"untrained": before, "trained": after}
        if model.fusion.kind not in WITH_GATE:
            kind = f"fusion={model.fusion.kind}"
            print(f"{name}: {kind}: its gate, if any, is not known here; its terms are compared")
        trained_column = table_column(after)
        rows = []
        for text, cell in table_column(before).items():
            rows.append([text, cell, trained_column[text]])
        print(report.table([name, "untrained", "trained"], rows), "\n")
    numbers = {"bins": BINS.tolist(), "checkpoints": results}
    report.save("fusion_spectrum", settings, began, numbers, lambda figure: plot(figure, results))
    return 0


if __name__ == "__main__":
    run(main)
