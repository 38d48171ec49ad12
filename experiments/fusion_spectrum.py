"""What the fusion lets through: the spectrum of W_H, the states before and after it, the gate (the paper's Fig. 17).

    python -m experiments.fusion_spectrum out/demo

The paper: W_H stays nearly full rank (1530 of 1536), its singular values fall smoothly, and it keeps the variance
spectrum of the states but for somewhat weaker low-variance directions; the gate sigmoid(W_G e) fills the range from 0
to 1 and changes with the token, so that it is no fixed mask over the dimensions.

Measured, each beside an untrained model of the same shape and seed, so that one sees what training did:
- singular values of W_H and W_G (fusion=concat: of the halves of W_R that read h and e). Rank: how many lie above
  D eps times the largest, eps being the weights' own precision. Effective rank: exp of the entropy of their shares,
  D for equal values and 1 for a single one;
- the variance spectrum, i.e. the eigenvalues of the covariance as shares of their sum, of held-out states h^(passes)
  and of W_H h, its effective rank, and the share of the variance in the weaker half of the directions;
- the gate over held-out tokens, each symbol as often as it occurs, and the parts of its variance: between dimensions
  (a fixed mask), between tokens (a common volume), and the rest, which reweights dimensions token by token. With add
  and concat there is no gate: instead, the share of the state's term in the fused input, |W_H h| / (|W_H h| + |W_G e|).
The first position of a window is never fused and not counted.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from harness.configurator import UserError, parse, run, setting
from experiments.report import Settings as Shared
from experiments.report import held_out, labels, need_feedback, save, start, table
from model import GPT, Fusion
from train import INIT, seed_torch

BATCH = 40  # windows at a time
BINS = np.linspace(0, 1, 41)


@dataclass(frozen=True)
class Settings(Shared):
    passes: int = setting(4, "look at the states of this pass; 1: a plain prefill's, block_size: the recurrence's")

    def __post_init__(self):
        super().__post_init__()
        if self.passes < 1:
            raise ValueError(f"passes={self.passes} must be at least 1")


def matrices(fusion: Fusion) -> dict[str, Tensor]:
    """The matrix that reads the state, then the one that reads the embedding, each (D, D), by name."""
    if fusion.kind == "concat":
        of_h, of_e = fusion.W_R.weight.detach().chunk(2, dim=1)
        return {"W_R[h]": of_h, "W_R[e]": of_e}
    return {"W_H": fusion.W_H.weight.detach(), "W_G": fusion.W_G.weight.detach()}


def effective_rank(sizes: Tensor) -> float:
    """exp of the entropy of sizes (N,) >= 0 as shares of their sum (Roy and Vetterli, 2007): from 1 to N."""
    return torch.special.entr(sizes / sizes.sum()).sum().exp().item()


def singular(matrix: Tensor) -> dict:
    """Singular values of a matrix, the largest first, its rank and its effective rank."""
    values = torch.linalg.svdvals(matrix.cpu().double())
    floor = max(matrix.shape) * torch.finfo(matrix.dtype).eps * values[0]
    return {"values": values.tolist(), "rank": int((values > floor).sum()), "effective_rank": effective_rank(values)}


def spectrum(covariance: Tensor) -> dict:
    """Eigenvalues of a covariance (D, D) as shares, the largest first; effective rank; the weaker half's share."""
    values = torch.linalg.eigvalsh(covariance).flip(0).clamp(min=0)
    shares = values / values.sum()
    return {"shares": shares.tolist(), "effective_rank": effective_rank(shares),
            "weaker_half": shares[(len(shares) + 1) // 2:].sum().item()}


def gate_numbers(gates: Tensor, weights: Tensor) -> dict:
    """Histogram and variance of gates (S, D) of S symbols with weights (S,) that sum to 1."""
    of_dimension, of_token = weights @ gates, gates.mean(dim=1)  # (D,), (S,)
    mean = of_dimension.mean()
    variance = weights @ ((gates - mean) ** 2).mean(dim=1)
    between = {"dimensions": ((of_dimension - mean) ** 2).mean() / variance,
               "tokens": weights @ ((of_token - mean) ** 2) / variance}
    counts = np.histogram(gates.numpy(), BINS, weights=weights[:, None].expand_as(gates).numpy() / gates.size(1))[0]
    return {"histogram": counts.tolist(), "mean": mean.item(), "std": variance.sqrt().item(),
            "below_0.1": (weights @ (gates < 0.1).double().mean(dim=1)).item(),
            "above_0.9": (weights @ (gates > 0.9).double().mean(dim=1)).item(),
            "share_dimensions": between["dimensions"].item(), "share_tokens": between["tokens"].item(),
            "share_tokens_by_dimension": (1 - between["dimensions"] - between["tokens"]).item()}


def term_numbers(of_h: Tensor, of_e: Tensor) -> dict:
    """Mean norms of the two terms (N, D) of fused inputs, and the share of the first in the sum of their norms."""
    size_h, size_e = of_h.norm(dim=1).cpu().double(), of_e.norm(dim=1).cpu().double()  # (N,)
    share = size_h / (size_h + size_e)
    return {"histogram": (np.histogram(share.numpy(), BINS)[0] / len(share)).tolist(), "norm_h": size_h.mean().item(),
            "norm_e": size_e.mean().item(), "share_h": share.mean().item()}


@torch.no_grad()
def measure(model: GPT, idx: Tensor, n_passes: int) -> dict:
    """All of the module's numbers for a model with a fusion on tokens (N, T)."""
    (name_h, reads_h), (name_e, reads_e) = matrices(model.fusion).items()
    h = torch.cat([model.passes(part, n_passes)[-1][:, :-1].flatten(0, 1)
                   for part in tqdm(idx.split(BATCH), "windows", leave=False, disable=None)])  # (N (T-1), D)
    fused = idx[:, 1:].flatten()  # the tokens that enter with a state before them
    covariance, weight = torch.cov(h.T.cpu().double()), reads_h.cpu().double()
    result = {"kind": model.fusion.kind, "matrices": {name_h: singular(reads_h), name_e: singular(reads_e)},
              "states": {"h": spectrum(covariance), f"{name_h} h": spectrum(weight @ covariance @ weight.T)}}
    if model.fusion.kind == "gated":
        symbols, counts = fused.unique(return_counts=True)
        gates = torch.sigmoid(model.fusion.W_G(model.input_norm(model.embed(symbols))))  # (S, D), Eq. (4)
        return result | {"gate": gate_numbers(gates.cpu().double(), counts.cpu().double() / len(fused))}
    return result | {"terms": term_numbers(h @ reads_h.T, model.input_norm(model.embed(fused)) @ reads_e.T)}


def untrained(model: GPT, checkpoint: dict) -> GPT:
    """A model of the same shape, initialised as train.py does for the checkpoint's seed."""
    seed_torch(checkpoint["train_config"]["seed"], INIT)
    return GPT(model.config).eval().to(model.embedding.weight.device)


def rows(result: dict) -> dict[str, str | float]:
    """The table's column for one model."""
    column = {}
    for name, of in result["matrices"].items():
        column |= {f"{name}: rank": f"{of['rank']} of {len(of['values'])}",
                   f"{name}: effective rank": of["effective_rank"],
                   f"{name}: smallest / largest": of["values"][-1] / of["values"][0]}
    for name, of in result["states"].items():
        column |= {f"variance of {name}: effective rank": of["effective_rank"],
                   f"variance of {name}: in the weaker half": of["weaker_half"]}
    if "gate" in result:
        texts = {"mean": "mean", "std": "standard deviation", "below_0.1": "share below 0.1",
                 "above_0.9": "share above 0.9", "share_dimensions": "variance between dimensions (a fixed mask)",
                 "share_tokens": "variance between tokens (a common volume)",
                 "share_tokens_by_dimension": "variance of dimensions by token"}
        return column | {f"gate: {text}": result["gate"][name] for name, text in texts.items()}
    return column | {"mean norm of the state's term": result["terms"]["norm_h"],
                     "mean norm of the embedding's term": result["terms"]["norm_e"],
                     "the state's share of both norms": result["terms"]["share_h"]}


def plot(figure, results: dict[str, dict[str, dict]]) -> None:
    """A row of three panels a checkpoint: singular values, variance spectrum, gate (or the state's share)."""
    figure.set_size_inches(12, 3.6 * len(results))
    for (name, pair), panels in zip(results.items(), figure.subplots(len(results), 3, squeeze=False)):
        for which, result in pair.items():
            style = {"ls": "-", "lw": 1.6} if which == "trained" else {"ls": "--", "lw": 1.0}
            for color, (matrix, of) in enumerate(result["matrices"].items()):
                relative = np.array(of["values"]) / of["values"][0]
                panels[0].plot(relative, color=f"C{color}", label=f"{matrix}, {which}", **style)
            for color, (states, of) in zip((2, 0), result["states"].items()):
                panels[1].plot(of["shares"], color=f"C{color}", label=f"{states}, {which}", **style)
            histogram = (result["gate"] if "gate" in result else result["terms"])["histogram"]
            panels[2].stairs(histogram, BINS, color="C1", label=which, fill=which == "trained",
                             alpha=0.6 if which == "trained" else 1, **style)
        panels[0].set(xlabel="index", ylabel="singular value / largest", yscale="log", title=f"{name}: its matrices")
        panels[1].set(xlabel="direction", ylabel="share of the variance", yscale="log", title="Held-out states")
        if "gate" in pair["trained"]:
            panels[2].set(xlim=(0, 1), xlabel="sigmoid(W_G e)", ylabel="share of the gate values", title="Gate")
        else:
            of_h, of_e = (f"|{matrix} {vector}|" for matrix, vector in zip(pair["trained"]["matrices"], "he"))
            panels[2].set(xlim=(0, 1), xlabel=f"{of_h} / ({of_h} + {of_e})", ylabel="share of the positions",
                          title=f"No gate (fusion={pair['trained']['kind']})")
        for panel in panels:
            panel.legend(fontsize=8)


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError("name at least one checkpoint, e.g. python -m experiments.fusion_spectrum out/demo")
    (began, runs), results = start(paths, settings), {}
    for path, name, (model, checkpoint, tokens) in zip(paths, labels(paths), runs):
        need_feedback(path, checkpoint)
        idx, _ = held_out(model, tokens, settings.n_windows)
        results[name] = {"untrained": measure(untrained(model, checkpoint), idx, settings.passes),
                         "trained": measure(model, idx, settings.passes)}
        untrained_column, trained_column = (rows(result) for result in results[name].values())
        if model.fusion.kind != "gated":
            print(f"{name}: fusion={model.fusion.kind} has no gate; its two terms are compared instead")
        print(table([name, "untrained", "trained"],
                    [[text, cell, trained_column[text]] for text, cell in untrained_column.items()]), "\n")
    save("fusion_spectrum", settings, began, {"bins": BINS.tolist(), "checkpoints": results},
         lambda figure: plot(figure, results))
    return 0


if __name__ == "__main__":
    run(main)
