"""Where is the ball? Accuracy against the number of moves since the last look, in the shell game of cups.py.

    python -m experiments.state_tracking out/cups_plain out/cups
    python -m experiments.state_tracking out/cups --n_moves=4096 --n_prompt=32

A decoder of L layers can follow a bounded number of moves; the state h, handed from step to step, has no such bound
if the model has learned the single update h_t = update(h_{t-1}, move).

Measured on games made anew: a prompt that ends in a look, then n_moves moves without one. After each move the model's
guess is the likeliest of the five cups; chance is 1/5. The gap is exact: the number of moves since the look.
- Standard, Soft and Fused: the prompt is prefilled and the moves go through the KV cache one by one, past block_size
  too. After a prompt of one character, the default, Fused is Soft and is left out.
- k passes: the whole game, up to block_size, is one prompt that Fused reads by k parallel passes, one plain and k - 1
  more. Each pass hands every state on by one position, and looks back as far as the stack can.
The reach is the longest gap up to which every accuracy is at least 0.9. Intervals are Wilson's, 95%, over games.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from harness.checkpoint import without_feedback
from harness.configurator import UserError, parse, run, setting
from corpora.cups import LOOKS, SYMBOLS, game
from experiments.report import Settings as Shared
from experiments.report import labels, save, start, table
from model import GPT, Mode
from harness.data import load_meta, load_tokens
from harness.tokenizer import CharTokenizer

BATCH = 250  # games at a time
REACHED = 0.9  # the accuracy that counts as following the ball


@dataclass(frozen=True)
class Settings(Shared):
    n_windows: int = setting(1000, "games")
    n_moves: int = setting(512, "moves of a game: the longest gap")
    n_prompt: int = setting(1, "characters before the moves, of which the last is a look")
    prefill_passes: int = setting(1, "Fused: passes over the prompt after the plain one")
    passes: tuple[int, ...] = setting((2, 3, 5, 9), "parallel passes over whole games, the plain one included")

    def __post_init__(self):
        super().__post_init__()
        for name in ("n_moves", "n_prompt", "prefill_passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if min(self.passes) < 2:
            raise ValueError(f"passes={list(self.passes)} must be at least 2 each; standard is the one plain pass")


def make_games(settings: Settings) -> tuple[Tensor, Tensor]:
    """Tokens (N, n_prompt + n_moves) of N games, and the ball's cup 0..4 after each of the moves, (N, n_moves)."""
    encode = CharTokenizer(SYMBOLS).encode
    games = [game(settings.n_prompt, settings.n_moves, f"game {settings.seed} {n}") for n in range(settings.n_windows)]
    return (torch.tensor([encode(text) for text, _ in games]),
            torch.tensor([[LOOKS.index(cup) for cup in cups] for _, cups in games]))


def guess(model: GPT, h: Tensor) -> Tensor:
    """The likeliest cup 0..4 to be looked at next, by states (..., D) -> (...)."""
    return model.head(h)[..., CharTokenizer(SYMBOLS).encode(LOOKS)].argmax(-1)


@torch.no_grad()
def decoded(model: GPT, games: Tensor, n_prompt: int, mode: Mode, **prefill) -> Tensor:
    """Guesses (N, n_moves) after each move of the games (N, n_prompt + n_moves), fed one by one.

    prefill: options of GPT.prefill.
    """
    batches = []
    for part in tqdm(games.split(BATCH), mode, leave=False, disable=None):
        cache, h = model.prefill(part[:, :n_prompt], mode, **prefill)
        guesses = []
        for t in range(n_prompt, part.size(1)):
            h = model.decode_step(part[:, t:t + 1], h, cache, mode)  # (B, 1, D)
            guesses.append(guess(model, h[:, 0]))  # (B,)
        batches.append(torch.stack(guesses, dim=1))
    return torch.cat(batches)  # (N, n_moves)


@torch.no_grad()
def read(model: GPT, games: Tensor, n_prompt: int, k: int) -> Tensor:
    """Guesses (N, M) after each of the first M moves, all that fit in block_size, by a Fused prefill of k passes."""
    batches = []
    for part in tqdm(games[:, :model.config.block_size].split(BATCH), f"{k} passes", leave=False, disable=None):
        _, h = model.reconstruct(part, 0, k)  # (B, T, D); causal: the state at t is that of a prompt which ends there
        batches.append(guess(model, h[:, n_prompt:]))
    return torch.cat(batches)


def wilson(share: np.ndarray, n: int, z: float = 1.96) -> np.ndarray:
    """95% intervals (M, 2) of shares (M,) of n independent trials each; Wilson (1927)."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return np.stack([middle - half, middle + half], axis=-1)


def scores(guesses: Tensor, cups: Tensor) -> dict:
    """Accuracy by gap 1, 2, ... with its interval, and the reach, of guesses (N, M) and the true cups (N, >= M)."""
    accuracy = (guesses.cpu() == cups[:, :guesses.size(1)]).double().mean(0).numpy()  # (M,)
    missed = np.flatnonzero(accuracy < REACHED)
    return {"reach": int(missed[0]) if len(missed) else len(accuracy), "accuracy": accuracy.tolist(),
            "interval": wilson(accuracy, len(guesses)).round(4).tolist()}


def longest_gap(tokens: np.ndarray) -> int:
    """The longest run of moves in a text's tokens (N,)."""
    looks = np.flatnonzero(np.isin(tokens, CharTokenizer(SYMBOLS).encode(LOOKS)))
    return int(np.diff(looks, prepend=-1, append=len(tokens)).max()) - 1


def draw(figure, results: dict[str, dict]) -> None:
    """Accuracy against gap: left by decoding, a colour a run; right by parallel passes, of the first run with any."""
    figure.set_size_inches(11, 4.4)
    panels = figure.subplots(1, 2, sharey=True, width_ratios=[6, 5])
    for color, (name, result) in enumerate(results.items()):
        for mode, style in (("standard", "--"), ("soft", "-"), ("fused", ":")):
            if mode in result["modes"]:
                scored = result["modes"][mode]
                gaps, (low, high) = np.arange(1, len(scored["accuracy"]) + 1), np.transpose(scored["interval"])
                panels[0].fill_between(gaps, low, high, color=f"C{color}", alpha=0.2, lw=0)
                panels[0].plot(gaps, scored["accuracy"], style, color=f"C{color}", label=f"{name}, {mode.capitalize()}")
    panels[0].set(title="Decoded move by move", ylabel="accuracy", ylim=(0, 1.04))
    with_passes = {name: result for name, result in results.items() if "soft" in result["modes"]}
    for name, result in list(with_passes.items())[:1]:
        curves = [(1, result["modes"]["standard"]["accuracy"][:result["block_size"] - result["n_prompt"]])]
        curves += [(int(mode.split()[0]), scored["accuracy"])
                   for mode, scored in result["modes"].items() if mode.endswith("passes")]
        for shade, (k, accuracy) in zip(np.linspace(0.3, 1, len(curves)), curves):
            label = f"{k} passes" if k > 1 else "1 pass, plain"
            panels[1].plot(np.arange(1, len(accuracy) + 1), accuracy, color=(0.1, 0.3, 0.6, shade), label=label)
        panels[1].set(title=f"{name}: read in k parallel passes")
    for panel in panels[:1 + bool(with_passes)]:
        panel.axhline(1 / len(LOOKS), color="gray", lw=1, label="chance")
        for name, style, label in (("block_size", ":", "block_size"), ("longest_gap", "-.", "longest gap trained on")):
            for number, gap in enumerate(sorted({result[name] for result in results.values()})):
                panel.axvline(gap, color="gray", ls=style, lw=1, label="" if number else label)
        panel.set(xlabel="moves since the last look")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.legend(fontsize=8, loc="center left")
    if not with_passes:
        figure.delaxes(panels[1])


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError("name at least one checkpoint, e.g. python -m experiments.state_tracking out/cups")
    (began, runs), results, rows = start(paths, settings), {}, []
    for path, (model, checkpoint, _) in zip(paths, runs):
        if checkpoint["tokenizer"] != CharTokenizer(SYMBOLS).spec:
            raise UserError(f"{path} was not trained on the shell game; run: python prepare.py cups, "
                            "then python train.py config/cups.toml")
        if settings.n_prompt >= model.config.block_size:
            raise UserError(f"--n_prompt={settings.n_prompt}: {path} has block_size {model.config.block_size}; "
                            f"at most {model.config.block_size - 1}")
    games, cups = make_games(settings)
    shown = sorted({*(2 ** i for i in range(settings.n_moves.bit_length())), settings.n_moves})
    for path, name, (model, checkpoint, _) in zip(paths, labels(paths), runs):
        feeds_back, on_device = not without_feedback(path, checkpoint), games.to(model.embedding.weight.device)
        own_modes = get_args(Mode)[:2 + (settings.n_prompt > 1)] if feeds_back else ("standard",)
        options = {"fused": {"prefill_passes": settings.prefill_passes}}
        modes = {mode: scores(decoded(model, on_device, settings.n_prompt, mode, **options.get(mode, {})), cups)
                 for mode in own_modes}
        modes |= {f"{k} passes": scores(read(model, on_device, settings.n_prompt, k), cups)
                  for k in settings.passes if feeds_back}
        folder = Path(settings.data_dir) / checkpoint["train_config"]["dataset"]
        trained_on = load_tokens(folder, "train", load_meta(folder))
        results[name] = {"checkpoint": path, "block_size": model.config.block_size, "n_prompt": settings.n_prompt,
                         "longest_gap": longest_gap(trained_on), "modes": modes}
        rows += [[name, mode, *(f"{scored['accuracy'][gap - 1]:.3f}" if gap <= len(scored["accuracy"]) else ""
                                for gap in shown), scored["reach"]] for mode, scored in modes.items()]
    print(table(["run", "mode", *(f"gap {gap}" for gap in shown), "reach"], rows))
    save("state_tracking", settings, began, {"chance": 1 / len(LOOKS), "games": len(games), "checkpoints": results},
         lambda figure: draw(figure, results))
    return 0


if __name__ == "__main__":
    run(main)
