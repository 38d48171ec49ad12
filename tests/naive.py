"""The method in naive loops, without any cache: expectations that several test files share."""

import torch

from model import GPT


def fused(model: GPT, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """u of aligned states and embeddings, (..., D) each."""
    return model.fusion(h, e, model.input_norm(e))


@torch.no_grad()
def recurrence(model: GPT, prompt: torch.Tensor, choose, n_new: int, soft: bool = True):
    """Soft (or Standard), with the stack run over all inputs at every step.

    choose: (n, logits (B, V)) -> tokens (B,). -> tokens, inputs, states, logits; the last token is
    never fed.
    """
    tokens = prompt
    u = model.embedding(prompt)
    for n in range(n_new):
        h = model.stack(u)
        token = choose(n, model.head(h[:, -1]))[:, None]
        tokens = torch.cat([tokens, token], dim=1)
        if n < n_new - 1:
            e = model.embedding(token)
            fed = fused(model, h[:, -1:], e) if soft else e
            u = torch.cat([u, fed], dim=1)
    return tokens, u, h, model.head(h)


@torch.no_grad()
def jacobi(model: GPT, tokens: torch.Tensor, k: int, n_plain: int):
    """The inputs and states (B, T, D) of pass k, one position at a time."""
    e = model.embedding(tokens)
    u = e
    h = model.stack(u)
    for _ in range(k - 1):
        columns = []
        for t in range(tokens.size(1)):
            plain = t == 0 or t < n_plain
            columns.append(e[:, t] if plain else fused(model, h[:, t - 1], e[:, t]))
        u = torch.stack(columns, dim=1)
        h = model.stack(u)
    return u, h


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p of each token (B, N) under logits (B, N, V) by the definition, in float64."""
    logits = logits.detach().double()
    rows = []
    for b, row in enumerate(tokens.tolist()):
        found = []
        for n, token in enumerate(row):
            found.append(float(logits[b, n, token] - logits[b, n].exp().sum().log()))
        rows.append(found)
    return torch.tensor(rows, dtype=torch.float64)
