"""What feedback saves is the writing: accuracy against the moves per look that a model writes.

    python -m experiments.written_looks out/cups_plain out/cups
    python -m experiments.written_looks out/cups_plain_{1,2,3} out/cups_{1,2,3}

The paper's argument in small. Latent feedback adds no depth to a decoder that may write its state
down (Sec. 3.2): a plain model that writes the ball's cup after every move reads it back at the next
and follows any game. What the state saves is this writing.

Measured on games made anew, as in state_tracking.py: a look, then n_moves moves. After every 1st,
2nd, 4th, ..., 32nd move the model writes its own guess, the likeliest of the five cups, as a look
token that it then reads like any other; or it never writes. Nobody corrects a wrong guess. The
accuracy is that of the guess after the last move, for each run in Standard and Soft; chance is 1/5.
`Written` counts the look tokens of a game; decoding takes one more step for each. Of one training,
intervals are Wilson's, 95%, over games; of runs that differ in their seed alone, the mean and the
range over trainings.
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

from experiments.report import Settings as Shared
from experiments.report import save, start, table
from experiments.state_tracking import (
    BATCH,
    CHANCE,
    LOOK_TOKENS,
    guess,
    make_games,
    players,
    wilson,
)
from harness.checkpoint import without_feedback
from harness.configurator import UserError, parse, require, run, setting
from model import GPT, Mode

NEVER = 0  # moves per written look, of a model that writes none


@dataclass(frozen=True)
class Settings(Shared):
    n_windows: int = setting(500, "games")
    n_moves: int = setting(512, "moves of a game; the guess after the last one counts")
    n_prompt: int = setting(1, "characters before the moves, of which the last is a look")
    every: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32, NEVER), "moves per look; 0: never")

    def __post_init__(self):
        super().__post_init__()
        for name in ("n_moves", "n_prompt"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        require(self, "every", min(self.every) >= 0, "numbers of moves, or 0 for never")


def n_written(n_moves: int, every: int) -> int:
    """The looks that a model writes before its guess after the last move."""
    return 0 if every == NEVER else (n_moves - 1) // every


@torch.no_grad()
def guesses_writing(model: GPT, games: Tensor, n_prompt: int, mode: Mode, every: int) -> Tensor:
    """Guesses (N,) after the last move of games (N, n_prompt + n_moves).

    After every `every`-th move but the last the model reads its own guess as a look.
    """
    looks = torch.tensor(LOOK_TOKENS, device=games.device)  # (5,)
    n_moves = games.size(1) - n_prompt
    batches = []
    for part in tqdm(games.split(BATCH), f"{mode}, every {every}", leave=False, disable=None):
        cache, h = model.prefill(part[:, :n_prompt], mode)
        for n in range(1, n_moves + 1):
            move = part[:, n_prompt + n - 1 : n_prompt + n]  # (B, 1)
            h = model.decode_step(move, h, cache, mode)  # (B, 1, D)
            if every != NEVER and n % every == 0 and n < n_moves:
                look = looks[guess(model, h)]  # (B, 1)
                h = model.decode_step(look, h, cache, mode)  # (B, 1, D)
        batches.append(guess(model, h[:, 0]))  # (B,)
    return torch.cat(batches)


def measure(
    model: GPT, modes: tuple[Mode, ...], games: Tensor, cups: Tensor, settings: Settings
) -> dict[str, dict]:
    """By mode: accuracy after the last move, a list in the order of settings.every."""
    on_device = games.to(model.embedding.weight.device)
    numbers = {}
    for mode in modes:
        accuracies = []
        for every in settings.every:
            guesses = guesses_writing(model, on_device, settings.n_prompt, mode, every)
            accuracies.append((guesses.cpu() == cups[:, -1]).double().mean().item())
        numbers[mode] = {"accuracy": accuracies}
    return numbers


def series_of(grouped: dict[str, list[dict]], n_games: int) -> dict[str, dict]:
    """By "group, Mode": the mean accuracy over runs, and its lower and upper edge, (M,) each."""
    series = {}
    for label, runs in grouped.items():
        for mode in runs[0]["modes"]:
            values = np.array([run["modes"][mode]["accuracy"] for run in runs])  # (runs, M)
            mean = values.mean(0)
            if len(runs) == 1:
                low, high = wilson(mean, n_games).T
            else:
                low, high = values.min(0), values.max(0)
            edges = {"mean": mean.tolist(), "low": low.tolist(), "high": high.tolist()}
            series[f"{label}, {mode.capitalize()}"] = edges
    return series


def draw(figure, series: dict[str, dict], every: tuple[int, ...], n_moves: int) -> None:
    """Accuracy against moves per written look, a curve per series; "never" stands apart."""
    axes = figure.subplots()
    written = sorted(moves for moves in every if moves != NEVER)
    never_at = 4 * max(written, default=1)
    for number, (name, edges) in enumerate(series.items()):
        style = {"color": f"C{number}", "marker": "osv^"[number % 4], "capsize": 3, "ms": 5}
        by_moves = dict(zip(every, np.transpose(list(edges.values())), strict=True))
        # Neighbouring series are set a little apart, so that equal accuracies stay visible.
        apart = 1.04 ** (number - (len(series) - 1) / 2)
        for moves_group, places in ((written, written), ([NEVER], [never_at])):
            drawn = [by_moves[moves] for moves in moves_group if moves in by_moves]
            if not drawn:
                continue
            mean, low, high = np.transpose(drawn)
            bars = np.clip([mean - low, high - mean], 0, None)
            at = np.array(places) * apart
            label = name if moves_group is written else None
            axes.errorbar(at, mean, bars, lw=1.2, label=label, **style)
    axes.axhline(CHANCE, color="gray", lw=1, label="chance")
    axes.set_xscale("log", base=2)
    ticks = [*written, never_at] if NEVER in every else written
    names = [*map(str, written), "never"] if NEVER in every else [*map(str, written)]
    axes.set_xticks(ticks, names)
    axes.minorticks_off()
    axes.set(
        xlabel="moves per look that the model writes down",
        ylabel=f"accuracy after {n_moves} moves",
        title="Writing works; feedback saves the writing",
        ylim=(0, 1.04),
    )
    axes.legend(loc="center left")


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError(
            "name checkpoints, a plain one first: "
            "python -m experiments.written_looks out/cups_plain out/cups"
        )
    began, runs = start(paths, settings)
    names, members = players(paths, runs, settings.n_prompt)
    games, cups = make_games(
        settings.n_windows, settings.n_moves, settings.n_prompt, settings.seed
    )
    results = {}
    for path, name, (model, checkpoint, _) in zip(paths, names, runs, strict=True):
        feeds_back = not without_feedback(path, checkpoint)
        modes = ("standard", "soft") if feeds_back else ("standard",)
        results[name] = {
            "checkpoint": path,
            "seed": checkpoint["train_config"]["seed"],
            "compute_tokens": checkpoint["compute_tokens"],
            "modes": measure(model, modes, games, cups, settings),
        }
    in_order = list(results.values())
    grouped = {label: [in_order[place] for place in places] for label, places in members.items()}
    series = series_of(grouped, len(games))
    written = [n_written(settings.n_moves, every) for every in settings.every]
    rows = []
    for place, every in enumerate(settings.every):
        cells = [f"{edges['mean'][place]:.3f}" for edges in series.values()]
        rows.append([every or "never", written[place], *cells])
    print(f"accuracy after {settings.n_moves} moves, {len(games)} games")
    print(table(["moves per written look", "looks written", *series], rows))
    numbers = {
        "chance": CHANCE,
        "games": len(games),
        "every": settings.every,
        "written": written,
        "series": series,
        "groups": members,
        "checkpoints": results,
    }
    save(
        "written_looks",
        settings,
        began,
        numbers,
        lambda figure: draw(figure, series, settings.every, settings.n_moves),
    )
    return 0


if __name__ == "__main__":
    run(main)
