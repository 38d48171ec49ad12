"""Expectations that several tests of experiments share, spelt out from the weights.

Of the model only `stack` without a cache is used (test_model.py holds that to a naive decoder):
fusion, shift, passes, prompts and decoding are written here as loops.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from harness.configurator import UserError

T = 16  # block_size of the fixtures' runs


def validation(corpus: str) -> np.ndarray:
    """The tokens of the validation split of the fixtures' corpus."""
    meta = json.loads((Path(corpus) / "tiny/meta.json").read_text())
    assert len(meta["tokenizer"]["symbols"]) < 256
    return np.fromfile(Path(corpus) / "tiny/val.bin", dtype="uint16").astype(np.int64)


def window_rows(tokens: np.ndarray, n: int, length: int = T + 1) -> torch.Tensor:
    """n windows (n, length): the first at the split's start, the last at its end, evenly spaced."""
    rows = []
    for i in range(n):
        start = int(i * (len(tokens) - length) / max(n - 1, 1))
        rows.append(tokens[start : start + length])
    return torch.tensor(np.array(rows))


def fused(model, h, e) -> torch.Tensor:
    """Eq. (4) at one position: h, e (B, D)."""
    normed = e / (e.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.input_norm.weight
    value = h @ model.fusion.W_H.weight.T
    return value / (1 + torch.exp(-(normed @ model.fusion.W_G.weight.T)))


def negative_log(model, h, target) -> torch.Tensor:
    """-log p(target): h (B, D), target (B,) -> (B,)."""
    logits = h @ model.embedding.weight.T
    return torch.logsumexp(logits, -1) - logits[torch.arange(len(target)), target]


@torch.no_grad()
def naive_passes(model, rows, n_feedback) -> tuple[np.ndarray, np.ndarray]:
    """Mean losses (n_feedback + 1, T) and changes (n_feedback, T) by feedback pass and position."""
    e = model.embedding.weight[rows[:, :-1]]
    states = [model.stack(e)]
    for _ in range(n_feedback):
        columns = [e[:, 0]]
        for t in range(1, e.size(1)):
            columns.append(fused(model, states[-1][:, t - 1], e[:, t]))
        states.append(model.stack(torch.stack(columns, dim=1)))
    losses = []
    changes = []
    for n, h in enumerate(states):
        by_t = [negative_log(model, h[:, t], rows[:, t + 1]).mean() for t in range(h.size(1))]
        losses.append([float(loss) for loss in by_t])
        if n == 0:
            continue
        before = states[n - 1]
        row = []
        for t in range(h.size(1)):
            ratios = [(h[b, t] - before[b, t]).norm() / h[b, t].norm() for b in range(len(h))]
            row.append(float(np.mean(ratios)))
        changes.append(row)
    return np.array(losses), np.array(changes)


@torch.no_grad()
def naive_inputs(model, idx, n_prompt, mode, n_extra=1) -> torch.Tensor:
    """u (B, T, D) as fed by each mode, from states recomputed over all inputs before."""
    e = model.embedding.weight[idx]
    u = [e[:, t] for t in range(n_prompt)]
    for _ in range(n_extra if mode == "fused" else 0):
        h = model.stack(torch.stack(u, dim=1))
        u = [e[:, 0], *(fused(model, h[:, t - 1], e[:, t]) for t in range(1, n_prompt))]
    for t in range(n_prompt, idx.size(1)):
        h = model.stack(torch.stack(u, dim=1))[:, -1]
        u.append(e[:, t] if mode == "standard" else fused(model, h, e[:, t]))
    return torch.stack(u, dim=1)


@torch.no_grad()
def naive_likelihood(model, rows, n_prompt, mode, n_extra=1) -> np.ndarray:
    """NLL (B, T - n_prompt + 1) of tokens n_prompt.. of rows (B, T + 1)."""
    u = naive_inputs(model, rows[:, :-1], n_prompt, mode, n_extra)
    columns = []
    for t in range(n_prompt, rows.size(1)):
        h = model.stack(u[:, :t])[:, -1]
        columns.append(negative_log(model, h, rows[:, t]).numpy())
    return np.array(columns, dtype=float).T


@torch.no_grad()
def naive_greedy(model, prompts, n_new, mode) -> torch.Tensor:
    """n_new tokens (B, n_new) after prompts, the likeliest each time."""
    idx = prompts
    for _ in range(n_new):
        h = model.stack(naive_inputs(model, idx, prompts.size(1), mode))[:, -1]
        token = (h @ model.embedding.weight.T).argmax(-1)
        idx = torch.cat([idx, token[:, None]], dim=1)
    return idx[:, prompts.size(1) :]


def saved_figures(monkeypatch) -> list[Figure]:
    """The figures that are saved from now on."""
    saved = []
    savefig = Figure.savefig

    def keep(figure, *args, **kwargs):
        saved.append(figure)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def lines_of(axes) -> dict[str, tuple[list, list]]:
    """The x and y values of an axes' lines by label."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in axes.lines}


def table_rows(printed: str) -> list[list[str]]:
    """The cells of all Markdown tables in a text, header and all, without the rules."""
    rows = []
    for line in printed.splitlines():
        if line.startswith("|") and not line.startswith("|--"):
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
    return rows


def run_experiment(experiment, data_dir, tmp_path, *words) -> dict:
    """Its JSON after main([...]); the PNG is one."""
    name = experiment.__name__.split(".")[1]
    results = tmp_path / "new/results"
    arguments = [*words, f"--results_dir={results}"]
    if data_dir:
        arguments.append(f"--data_dir={data_dir}")
    assert experiment.main(arguments) == 0
    assert (results / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((results / f"{name}.json").read_text())


def refused(experiment, *words) -> str:
    """The message with which an experiment refuses these words."""
    with pytest.raises(UserError) as error:
        experiment.main(list(words))
    assert "\n" not in str(error.value)
    return str(error.value)
