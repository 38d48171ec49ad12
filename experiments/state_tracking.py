"""Where is the ball? Accuracy against the moves since the last look, in the shell game of cups.py.

    python -m experiments.state_tracking out/cups_plain out/cups
    python -m experiments.state_tracking out/cups_plain_{1,2,3} out/cups_{1,2,3}
    python -m experiments.state_tracking out/cups --n_moves=4096 --n_prompt=32

A decoder of L layers that may not write can follow a bounded number of moves; the state h, handed
from step to step, has no such bound if the model has learnt the single update
h_t = update(h_{t-1}, move). One that may write its guess down has no bound either: see
experiments/written_looks.py.

Measured on games made anew: a prompt that ends in a look, then n_moves moves without one. After
each move the model's guess is the likeliest of the five cups; chance is 1/5. The gap is exact: the
number of moves since the look.
- Standard, Soft and Fused: the prompt is prefilled and the moves go through the KV cache one by
  one, past block_size too. After a prompt of one character, the default, Fused is Soft and is left
  out.
- k passes: the whole game, up to block_size, is one prompt that Fused reads by k parallel passes in
  all. Each pass hands every state on by one position, and looks back as far as the stack can.
The reach is the longest gap up to which every accuracy is at least 0.9. Of one training, intervals
are Wilson's, 95%, over games. Runs that differ in their seed alone are drawn as one curve, the mean
over trainings, in a band from the lowest to the highest.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from corpora.cups import LOOKS, SYMBOLS, game
from experiments.report import Settings as Shared
from experiments.report import groups, labels, save, start, table
from harness.checkpoint import without_feedback
from harness.configurator import UserError, parse, require, run, setting
from harness.data import load_meta, load_tokens
from harness.tokenizer import CharTokenizer
from model import GPT, Mode

BATCH = 250  # games at a time
REACHED = 0.9  # the accuracy that counts as following the ball
CHANCE = 1 / len(LOOKS)
LOOK_TOKENS = CharTokenizer(SYMBOLS).encode(LOOKS)
LEGEND = 115  # letters that fit beside each other, each name's line counted as 8
STYLES = {"standard": "--", "soft": "-", "fused": ":"}


@dataclass(frozen=True)
class Settings(Shared):
    n_windows: int = setting(1000, "games")
    n_moves: int = setting(512, "moves of a game: the longest gap")
    n_prompt: int = setting(1, "characters before the moves, of which the last is a look")
    prefill_passes: int = setting(1, "Fused: fused passes over the prompt after the plain one")
    passes: tuple[int, ...] = setting((2, 3, 5, 9), "parallel passes k over whole games, in all")

    def __post_init__(self):
        super().__post_init__()
        for name in ("n_moves", "n_prompt", "prefill_passes"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        used = self.n_prompt > 1 or self.prefill_passes == 1
        require(self, "prefill_passes", used, "left out with --n_prompt=1, where Fused is Soft")
        rule = "at least 2 each, because standard is the single plain pass"
        require(self, "passes", min(self.passes) >= 2, rule)


# Games and guesses


def make_games(n_games: int, n_moves: int, n_prompt: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens (N, n_prompt + n_moves) of N games, and the ball's cup 0..4 after each move.

    The cups are (N, n_moves). Game n is the same however many there are.
    """
    encode = CharTokenizer(SYMBOLS).encode
    tokens = []
    cups = []
    for n in range(n_games):
        played, after = game(n_prompt, n_moves, f"game {seed} {n}")
        tokens.append(encode(played))
        cups.append([LOOKS.index(cup) for cup in after])
    return torch.tensor(tokens), torch.tensor(cups)


def guess(model: GPT, h: Tensor) -> Tensor:
    """The likeliest cup 0..4 to be looked at next, by states (..., D) -> (...)."""
    return model.head(h)[..., LOOK_TOKENS].argmax(-1)


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
            h = model.decode_step(part[:, t : t + 1], h, cache, mode)  # (B, 1, D)
            guesses.append(guess(model, h[:, 0]))  # (B,)
        batches.append(torch.stack(guesses, dim=1))
    return torch.cat(batches)  # (N, n_moves)


@torch.no_grad()
def in_parallel(model: GPT, games: Tensor, n_prompt: int, k: int) -> Tensor:
    """Guesses (N, M) after each of the first M moves, all that fit in block_size, by k passes.

    Stacks are causal: the state at t is that of a Fused prompt which ends there.
    """
    batches = []
    fitting = games[:, : model.config.block_size]
    for part in tqdm(fitting.split(BATCH), f"{k} passes", leave=False, disable=None):
        _, h = model.reconstruct(part, n_plain=0, k=k)  # (B, T, D)
        batches.append(guess(model, h[:, n_prompt:]))
    return torch.cat(batches)


# Numbers


def wilson(share: np.ndarray, n: int, z: float = 1.96) -> np.ndarray:
    """95% intervals (M, 2) of shares (M,) of n independent trials each; Wilson (1927)."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return np.stack([middle - half, middle + half], axis=-1)


def scores(guesses: Tensor, cups: Tensor) -> dict:
    """The number of games, the accuracy by gap 1, 2, ..., and the reach.

    Of guesses (N, M) and the true cups (N, M or more).
    """
    right = guesses.cpu() == cups[:, : guesses.size(1)]
    accuracy = right.double().mean(0).numpy()  # (M,)
    missed = np.flatnonzero(accuracy < REACHED)
    return {
        "games": len(guesses),
        "reach": int(missed[0]) if len(missed) else len(accuracy),
        "accuracy": accuracy.tolist(),
    }


def longest_gap(tokens: np.ndarray) -> int:
    """The longest run of moves in a text's tokens (N,)."""
    looks = np.flatnonzero(np.isin(tokens, LOOK_TOKENS))
    return int(np.diff(looks, prepend=-1, append=len(tokens)).max()) - 1


def need_games(path: str, model: GPT, checkpoint: dict, n_prompt: int) -> None:
    """UserError for a run of another text, or one that cannot read the prompt."""
    if checkpoint["tokenizer"] != CharTokenizer(SYMBOLS).spec:
        raise UserError(
            f"{path} was not trained on the shell game; run: python prepare.py cups, "
            "then python train.py config/cups.toml"
        )
    block_size = model.config.block_size
    if n_prompt >= block_size:
        raise UserError(
            f"--n_prompt={n_prompt}: {path} has block_size {block_size}; at most {block_size - 1}"
        )


def measure(
    model: GPT, feeds_back: bool, games: Tensor, cups: Tensor, settings: Settings
) -> dict[str, dict]:
    """One run's `scores` by mode, and by number of parallel passes."""
    on_device = games.to(model.embedding.weight.device)
    n_prompt = settings.n_prompt
    modes: tuple[Mode, ...] = ("standard",)
    if feeds_back:
        modes = get_args(Mode) if n_prompt > 1 else ("standard", "soft")
    scored = {}
    for mode in modes:
        prefill = {"prefill_passes": settings.prefill_passes} if mode == "fused" else {}
        scored[mode] = scores(decoded(model, on_device, n_prompt, mode, **prefill), cups)
    for k in settings.passes if feeds_back else ():
        scored[f"{k} passes"] = scores(in_parallel(model, on_device, n_prompt, k), cups)
    return scored


# Output


def rows_of(results: dict[str, dict], gaps: list[int]) -> list[list]:
    """The table: each run in each mode."""
    rows = []
    for name, result in results.items():
        for mode, scored in result["modes"].items():
            accuracy = scored["accuracy"]
            cells = [f"{accuracy[gap - 1]:.3f}" if gap <= len(accuracy) else "" for gap in gaps]
            rows.append([name, mode, *cells, scored["reach"]])
    return rows


def band(runs: list[dict], mode: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lower and upper edge (M,) of the accuracy of a group's runs.

    Of one training the edges are its interval over games, of several the lowest and highest.
    """
    scored = [run["modes"][mode] for run in runs]
    curves = np.array([one["accuracy"] for one in scored])
    if len(runs) == 1:
        low, high = wilson(curves[0], scored[0]["games"]).T
    else:
        low, high = curves.min(0), curves.max(0)
    return curves.mean(0), low, high


def draw(figure, grouped: dict[str, list[dict]]) -> None:
    """Accuracy against gap: above by decoding, below by parallel passes of one feedback group.

    grouped: the results of each group's runs.
    """
    from matplotlib.transforms import ScaledTranslation  # pictures alone need matplotlib

    with_soft = [label for label, runs in grouped.items() if "soft" in runs[0]["modes"]]
    n_panels = 2 if with_soft else 1
    figure.set_size_inches(7, 4.2 * n_panels)
    panels = figure.subplots(n_panels, 1, squeeze=False)[:, 0]
    for number, (label, runs) in enumerate(grouped.items()):
        color = f"C{number}"
        for mode in [mode for mode in STYLES if mode in runs[0]["modes"]]:
            mean, low, high = band(runs, mode)
            gaps = np.arange(1, len(mean) + 1)
            name = f"{label}, {mode.capitalize()}"
            panels[0].fill_between(gaps, low, high, color=color, alpha=0.2, lw=0)
            panels[0].plot(gaps, mean, STYLES[mode], color=color, label=name)
    panels[0].set(title="Decoded move by move", ylabel="accuracy")
    for label in with_soft[:1]:
        runs = grouped[label]
        modes = [mode for mode in runs[0]["modes"] if mode.endswith("passes")]
        n_read = runs[0]["block_size"] - runs[0]["n_prompt"]
        curves = {"1 pass (plain)": band(runs, "standard")[0][:n_read]}
        curves |= {mode: band(runs, mode)[0] for mode in modes}
        shades = np.linspace(0.3, 1, len(curves))
        for shade, (name, mean) in zip(shades, curves.items(), strict=True):
            gaps = np.arange(1, len(mean) + 1)
            panels[1].plot(gaps, mean, color=(0.1, 0.3, 0.6, shade), label=name)
        panels[1].set(title=f"{label}: read in k parallel passes", ylabel="accuracy")
    results = [run for runs in grouped.values() for run in runs]
    verticals = {"block_size": (":", "block_size"), "longest_gap": ("-.", "longest gap trained on")}
    for panel in panels:
        panel.axhline(CHANCE, color="gray", lw=1, label="chance")
        for name, (style, label) in verticals.items():
            for number, gap in enumerate(sorted({result[name] for result in results})):
                panel.axvline(gap, color="gray", ls=style, lw=1, label="" if number else label)
        panel.set(xlabel="moves since the last look", ylim=(0, 1.04))
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        # Below the panel: within it there is always a curve to cover. In as many columns as fit.
        longest = max(len(name) for name in panel.get_legend_handles_labels()[1])
        n_columns = max(1, min(3, LEGEND // (longest + 8)))
        below_the_label = panel.transAxes + ScaledTranslation(0, -0.5, figure.dpi_scale_trans)
        panel.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            bbox_transform=below_the_label,
            ncols=n_columns,
        )


def players(
    paths: list[str], runs: list[tuple], n_prompt: int
) -> tuple[list[str], dict[str, list[int]]]:
    """The runs' names, and the places of those that differ in their seed alone, by group.

    runs: what `report.start` gives. UserError for one that cannot play, or for a seed given twice.
    """
    for path, (model, checkpoint, _) in zip(paths, runs, strict=True):
        need_games(path, model, checkpoint, n_prompt)
    names = labels(paths)
    return names, groups(names, [checkpoint for _, checkpoint, _ in runs])


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError(
            "name at least one checkpoint, e.g. python -m experiments.state_tracking out/cups"
        )
    began, runs = start(paths, settings)
    names, members = players(paths, runs, settings.n_prompt)
    games, cups = make_games(
        settings.n_windows, settings.n_moves, settings.n_prompt, settings.seed
    )
    results = {}
    for path, name, (model, checkpoint, _) in zip(paths, names, runs, strict=True):
        folder = Path(settings.data_dir) / checkpoint["train_config"]["dataset"]
        trained_on = load_tokens(folder, "train", load_meta(folder))
        feeds_back = not without_feedback(path, checkpoint)
        results[name] = {
            "checkpoint": path,
            "seed": checkpoint["train_config"]["seed"],
            "block_size": model.config.block_size,
            "n_prompt": settings.n_prompt,
            "longest_gap": longest_gap(trained_on),
            "compute_tokens": checkpoint["compute_tokens"],
            "modes": measure(model, feeds_back, games, cups, settings),
        }
    powers = [2**i for i in range(settings.n_moves.bit_length())]
    gaps = sorted({*powers, settings.n_moves})
    print(table(["run", "mode", *(f"gap {gap}" for gap in gaps), "reach"], rows_of(results, gaps)))
    in_order = list(results.values())
    grouped = {label: [in_order[place] for place in places] for label, places in members.items()}
    numbers = {"chance": CHANCE, "games": len(games), "groups": members, "checkpoints": results}
    save("state_tracking", settings, began, numbers, lambda figure: draw(figure, grouped))
    return 0


if __name__ == "__main__":
    run(main)
