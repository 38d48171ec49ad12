"""What the tests of the shell game share: a short game prepared, runs on it, a naive player."""

from pathlib import Path

import torch

import prepare
from corpora.cups import text
from harness.checkpoint import load_checkpoint, save_checkpoint

SYMBOLS = "12345rs"
T = 16  # block_size of the fixtures' runs


def prepared(folder: Path) -> str:
    """The data_dir of a short shell game named `cups`."""
    (folder / "cups.txt").write_text(text(6000))
    prepare.main([f"--input={folder}/cups.txt", f"--data_dir={folder}"])
    return str(folder)


def two_runs(data: str, make_run) -> dict[str, str]:
    """A plain run and one with feedback; large embeddings make their guesses differ."""
    shared = {"data_dir": data, "dataset": "cups", "max_iters": 2, "eval_iters": 0}
    folders = {
        "plain": make_run(fusion="none", pass_mix=(1.0,), **shared),
        "full": make_run(**shared),
    }
    for folder in folders.values():
        checkpoint = load_checkpoint(folder)
        weight = checkpoint["model"]["embedding.weight"]
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        save_checkpoint(Path(folder), checkpoint)
    return folders


def after(cup: int, move: str) -> int:
    """The ball's cup 0..4 after a move."""
    if move == "r":
        return (cup + 1) % 5
    return {0: 1, 1: 0}.get(cup, cup)


@torch.no_grad()
def naive(model, games, n_prompt: int, feedback: bool, every: int = 0) -> list[list[int]]:
    """The guesses after each move of games (N, T), from the stack run anew over all inputs so far.

    With every > 0 the guess is fed as a look after every `every`-th move but the last.
    """
    E = model.embedding.weight
    inputs = [E[games[:, t]] for t in range(n_prompt)]  # (N, D) each
    guesses = []

    def feed(tokens) -> None:
        e = E[tokens]  # (N, D)
        if feedback:
            h = model.stack(torch.stack(inputs, dim=1))[:, -1]
            normed = e / (e.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * model.input_norm.weight
            gate = torch.sigmoid(normed @ model.fusion.W_G.weight.T)
            e = (h @ model.fusion.W_H.weight.T) * gate
        inputs.append(e)

    n_moves = games.size(1) - n_prompt
    for n in range(1, n_moves + 1):
        feed(games[:, n_prompt + n - 1])
        h = model.stack(torch.stack(inputs, dim=1))[:, -1]
        guesses.append((h @ E[:5].T).argmax(-1))  # the looks are the first five symbols
        if every and n % every == 0 and n < n_moves:
            feed(guesses[-1])
    return torch.stack(guesses, dim=1).tolist()
