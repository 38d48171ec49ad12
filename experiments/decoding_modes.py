"""Standard, Soft and Fused decoding beside a plain model (the paper's Fig. 7 and its modes).

    python -m experiments.decoding_modes out/demo_plain out/demo
    python -m experiments.decoding_modes out/plain_{1,2,3} out/full_{1,2,3} --temperature=0.8

The paper: Soft and Fused mostly beat Standard on the same weights, and Soft often writes shorter
reasoning. A small model does no reasoning; what it can show is likelihood, and how long it writes.

Name a plain run of equal parameters first: Standard decoding of a feedback model can be worse than
such a run, so that beating Standard is not yet a gain. Differences are to the plain run, or to
Standard of the same weights where none is named. Runs that differ in their seed alone are one row:
the mean over trainings with Student's 95% interval, each run against the plain one of its seed. A
single training has an interval over windows: the 95% percentiles of a paired bootstrap over
windows, which do not overlap. It says nothing of what another training would give. Differences
stand side by side and are not corrected for their number. Computation is the token-passes of the
training, as a multiple of the plain run's.

Measured, in each mode:
- the negative log-likelihood (NLL, nats per token) of held-out text exactly as decoded: the mode
  prefills a window's first n_prompt tokens, then the true tokens go through the KV cache one by
  one. Position 1 after the prompt is read off the prompt's last state, where Soft equals Standard;
- of text sampled after n_samples held-out prompts, with one seed for all modes: the median length,
  in tokens, up to the end of the first `stop` (a sample without one counts as max_new_tokens, and
  the share of those is given), with its bootstrap interval over samples, and the share of repeated
  4-grams: those of the sample's runs of four tokens that it had before. The text that really
  follows the prompts is measured in the same way.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from experiments.report import Settings as Shared
from experiments.report import groups, held_out, labels, save, start, student, table
from harness.checkpoint import without_feedback
from harness.configurator import UserError, parse, require, run, setting
from harness.data import even_starts
from harness.tokenizer import Tokenizer, make_tokenizer
from model import GPT, Mode, sampler

BATCH = 50  # windows at a time
RESAMPLES = 2000  # of the bootstrap
BINS = 16  # points of a curve, at most


@dataclass(frozen=True)
class Settings(Shared):
    n_windows: int = setting(600, "validation windows, at most as many as fit without overlap")
    n_prompt: int = setting(0, "tokens of a window's prompt; 0: half of block_size")
    prefill_passes: int = setting(1, "Fused: fused passes over the prompt after the plain one")
    n_samples: int = setting(32, "prompts to sample from")
    temperature: float = setting(1.0, "of the samples; 0: the likeliest token")
    max_new_tokens: int = setting(200, "tokens of a sample")
    stop: str = setting("\n\n", "the string up to which a sample's length is counted")

    def __post_init__(self):
        super().__post_init__()
        sampler(self.temperature)  # its rule
        least = {"n_prompt": 0, "prefill_passes": 1, "n_samples": 1, "max_new_tokens": 4}
        for name, low in least.items():
            require(self, name, getattr(self, name) >= low, f"at least {low}")
        require(self, "stop", len(self.stop) > 0, "a string that is not empty")


# Likelihood


@torch.no_grad()
def likelihood(
    model: GPT, idx: Tensor, targets: Tensor, n_prompt: int, mode: Mode, **prefill
) -> Tensor:
    """NLL (N, T - n_prompt + 1) after a prompt, of tokens and next tokens (N, T).

    prefill: options of GPT.prefill.
    """
    batches = []
    pairs = list(zip(idx.split(BATCH), targets.split(BATCH), strict=True))
    for part, part_targets in tqdm(pairs, mode, leave=False, disable=None):
        cache, h = model.prefill(part[:, :n_prompt], mode, **prefill)
        columns = [model.nll(h, part_targets[:, n_prompt - 1 : n_prompt])]  # (B, 1) each
        for t in range(n_prompt, part.size(1)):
            h = model.decode_step(part[:, t : t + 1], h, cache, mode)  # (B, 1, D)
            columns.append(model.nll(h, part_targets[:, t : t + 1]))
        batches.append(torch.cat(columns, dim=1))
    return torch.cat(batches)  # (N, T - n_prompt + 1)


def bootstrap(values: np.ndarray, seed: int, statistic: Callable = np.mean) -> list[list[float]]:
    """95% percentile interval of a statistic of each column of values (N, M): M pairs.

    Over rows drawn with replacement.
    """
    rng = np.random.default_rng(seed)
    resampled = []
    for _ in range(RESAMPLES):
        rows = rng.integers(len(values), size=len(values))
        resampled.append(statistic(values[rows], axis=0))
    return np.percentile(resampled, [2.5, 97.5], axis=0).T.tolist()


# Samples


def stop_length(tokenizer: Tokenizer, ids: list[int], stop: str) -> int | None:
    """Tokens up to the one that completes the first `stop` in the text; None without one."""
    for n in range(1, len(ids) + 1):
        if stop in tokenizer.decode(ids[:n]):
            return n
    return None


def repeated(ids: list[int], n: int = 4) -> float:
    """The share of a text's n-grams of tokens that came before in it."""
    grams = [tuple(ids[first : first + n]) for first in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def statistics(tokenizer: Tokenizer, rows: list[list[int]], settings: Settings) -> dict:
    """Of texts, each of max_new_tokens tokens: lengths to `stop` and repeated 4-grams."""
    lengths = [stop_length(tokenizer, ids, settings.stop) for ids in rows]
    counted = []
    for ids, length in zip(rows, lengths, strict=True):
        counted.append(len(ids) if length is None else length)
    (interval,) = bootstrap(np.array(counted)[:, None], settings.seed, np.median)
    return {
        "median_length": float(np.median(counted)),
        "interval": interval,
        "lengths": counted,
        "never_stopped": lengths.count(None) / len(rows),
        "repeated_4grams": float(np.mean([repeated(ids) for ids in rows])),
    }


def sampled(model: GPT, prompts: Tensor, mode: Mode, settings: Settings, **prefill) -> list:
    """n_samples lists of max_new_tokens tokens, after prompts (n_samples, n_prompt)."""
    pick = sampler(settings.temperature, seed=settings.seed)
    n_new = settings.max_new_tokens
    pairs = model.generate(prompts, n_new, mode, pick, **prefill)
    steps = []
    for token, _ in tqdm(pairs, f"{mode}, samples", n_new, leave=False, disable=None):
        steps.append(token.tolist())
    return np.transpose(steps).tolist()


# One run


def prompt_length(model: GPT, tokens: np.ndarray, settings: Settings) -> int:
    """Tokens of a prompt. UserError where prompts or samples do not fit."""
    block_size = model.config.block_size
    n_prompt = settings.n_prompt or block_size // 2
    if n_prompt >= block_size:
        raise UserError(
            f"--n_prompt={n_prompt}: block_size is {block_size}; "
            f"at most {block_size - 1}, or 0 for half"
        )
    if n_prompt + settings.max_new_tokens > len(tokens):
        raise UserError(
            f"--max_new_tokens={settings.max_new_tokens}: the validation split has {len(tokens)} "
            f"tokens; after a prompt of {n_prompt} at most {len(tokens) - n_prompt} follow"
        )
    return n_prompt


def measure(
    model: GPT, checkpoint: dict, tokens: np.ndarray, modes: tuple[Mode, ...], settings: Settings
) -> tuple[dict, dict[Mode, np.ndarray]]:
    """One run's numbers, and by mode the NLL of each window and position, (N, T - n_prompt + 1)."""
    tokenizer = make_tokenizer(checkpoint["tokenizer"])
    n_prompt = prompt_length(model, tokens, settings)
    n_fitting = (len(tokens) - 1) // model.config.block_size
    idx, targets = held_out(model, tokens, min(settings.n_windows, n_fitting))
    sample_size = n_prompt + settings.max_new_tokens
    starts = even_starts(tokens, settings.n_samples, sample_size - 1)
    texts = tokens[starts[:, None] + np.arange(sample_size)]  # (n_samples, sample_size)
    prompts = torch.from_numpy(texts[:, :n_prompt].astype(np.int64)).to(idx.device)
    result = {
        "n_prompt": n_prompt,
        "n_windows": len(idx),
        "parameters": sum(p.numel() for p in model.parameters()),
        "compute_tokens": checkpoint["compute_tokens"],
        "begun_from": checkpoint["train_config"]["init_from"],
        "seed": checkpoint["train_config"]["seed"],
        "modes": {},
        "held_out_text": statistics(tokenizer, texts[:, n_prompt:].tolist(), settings),
    }
    nlls = {}
    for mode in modes:
        prefill = {"prefill_passes": settings.prefill_passes} if mode == "fused" else {}
        nll = likelihood(model, idx, targets, n_prompt, mode, **prefill).cpu().double().numpy()
        nlls[mode] = nll
        difference = (nll - nlls["standard"]).mean(1)  # (N,), paired
        (interval,) = bootstrap(difference[:, None], settings.seed)
        rows = sampled(model, prompts, mode, settings, **prefill)
        result["modes"][mode] = {
            "nll": float(nll.mean()),
            "difference": float(difference.mean()),  # to Standard of the same weights
            "interval": interval,
            "nll_by_position": nll.mean(0).tolist(),
            "samples": statistics(tokenizer, rows, settings),
        }
    return result, nlls


# All runs: rows of the table


def against(ours: list[np.ndarray], theirs: list[np.ndarray], seed: int) -> dict:
    """The paired difference of trainings to their baselines, each (N, M) NLLs of the same windows.

    Over all positions and in bins of them. The interval of a single training is over windows, of
    several over trainings.
    """
    n_positions = ours[0].shape[1]
    bins = np.array_split(np.arange(n_positions), min(BINS, n_positions))
    parts = [np.arange(n_positions), *bins]
    by_training = []
    for mine, base in zip(ours, theirs, strict=True):
        difference = mine - base  # (N, M)
        by_training.append(np.stack([difference[:, part].mean(1) for part in parts], axis=1))
    means = np.mean([values.mean(0) for values in by_training], axis=0)  # (1 + bins,)
    if len(ours) == 1:
        intervals = bootstrap(by_training[0], seed)
    else:
        intervals = []
        for column, mean in enumerate(means):
            half = student(values[:, column].mean() for values in by_training)
            intervals.append([float(mean - half), float(mean + half)])
    points = []
    for part, mean, interval in zip(bins, means[1:], intervals[1:], strict=True):
        points.append({"position": float(part.mean() + 1), "minus": mean, "interval": interval})
    return {
        "minus": float(means[0]),
        "interval": intervals[0],
        "interval_over": "windows" if len(ours) == 1 else "trainings",
        "bins": points,
    }


def partners(places: list[int], base: list[int], seeds: list[int]) -> list[int]:
    """The baseline run that each run of a group is paired with: that of its seed.

    A single run pairs with a single baseline whatever their seeds. UserError without a partner.
    """
    if len(places) == len(base) == 1:
        return base
    by_seed = {seeds[place]: place for place in base}
    ours = [seeds[place] for place in places]
    if len(set(ours)) < len(ours) or not set(ours) <= set(by_seed):
        raise UserError(
            f"runs with seeds {sorted(ours)} are compared with plain ones with seeds "
            f"{sorted(by_seed)}; name one plain run for each seed"
        )
    return [by_seed[seed] for seed in ours]


def plain_groups(grouped: dict[str, list[int]], by_mode: list) -> list[str]:
    """The labels of the groups whose runs are decoded in one mode; the first is the baseline.

    by_mode: a collection for each run, with an entry for each mode.
    """
    return [label for label, places in grouped.items() if len(by_mode[places[0]]) == 1]


def rows_of(
    grouped: dict[str, list[int]], results: list[dict], nlls: list[dict], settings: Settings
) -> list[dict]:
    """What the last table shows, a dict per row: the groups in each mode, against the first plain.

    Where no group is plain, against Standard of the same weights.
    """
    seeds = [result["seed"] for result in results]
    plain = plain_groups(grouped, nlls)
    base = grouped[plain[0]] if plain else None
    rows = []
    for label in sorted(grouped, key=lambda label: label not in plain):
        places = grouped[label]
        pairs = partners(places, base, seeds) if base else places
        computation = sum(results[place]["compute_tokens"] for place in places)
        base_computation = 0  # nothing to be a multiple of, as of a pretrained model
        # What a run began from is not counted in its own computation, so there is no ratio to give.
        if base and not any(results[place]["begun_from"] for place in (*places, *pairs)):
            base_computation = sum(results[place]["compute_tokens"] for place in pairs)
        for mode in nlls[places[0]]:
            row = {
                "decoded": label if label in plain else f"{label}, {mode.capitalize()}",
                "plain": label in plain,
                "runs": [results[place]["checkpoint"] for place in places],
                "nll": float(np.mean([nlls[place][mode].mean() for place in places])),
                "parameters": results[places[0]]["parameters"],
                "computation": computation / base_computation if base_computation else None,
            }
            is_base = label == plain[0] if plain else mode == "standard"
            if not is_base:
                ours = [nlls[place][mode] for place in places]
                theirs = [nlls[place]["standard"] for place in pairs]
                row |= against(ours, theirs, settings.seed)
                row["baseline_nll"] = float(np.mean([nll.mean() for nll in theirs]))
            rows.append(row)
    return rows


def check(
    paths: list[str], runs: list, grouped: dict[str, list[int]], modes: list, settings: Settings
) -> None:
    """UserError, before any work, where runs cannot be measured or compared."""
    same_windows(paths, runs)
    for model, _, tokens in runs:
        prompt_length(model, tokens, settings)
    seeds = [checkpoint["train_config"]["seed"] for _, checkpoint, _ in runs]
    plain = plain_groups(grouped, modes)
    for places in grouped.values():
        if plain:
            partners(places, grouped[plain[0]], seeds)


def same_windows(paths: list[str], runs: list) -> None:
    """UserError where runs are of different text or windows, so that they cannot be paired."""
    first_model, first_checkpoint, first_tokens = runs[0]
    for path, (model, checkpoint, tokens) in zip(paths, runs, strict=True):
        same_size = model.config.block_size == first_model.config.block_size
        same_symbols = checkpoint["tokenizer"] == first_checkpoint["tokenizer"]
        # The tokens themselves: a pretrained model has no text of its own to name.
        same_text = same_symbols and np.array_equal(tokens, first_tokens)
        if not (same_size and same_text):
            raise UserError(
                f"{path} and {paths[0]} have different texts or block_sizes, so that their losses "
                "cannot be compared; measure them in two commands"
            )


# Output


def sample_rows(name: str, result: dict) -> list[list]:
    """A run's rows of the table of samples."""
    rows = []
    texts = {mode: numbers["samples"] for mode, numbers in result["modes"].items()}
    for mode, samples in (texts | {"the text itself": result["held_out_text"]}).items():
        low, high = samples["interval"]
        median = f"{samples['median_length']:.4g} ({low:.4g} to {high:.4g})"
        label = f"{name}, {mode.capitalize()}" if mode in texts else f"{name}, {mode}"
        rows.append([label, median, samples["never_stopped"], samples["repeated_4grams"]])
    return rows


def likelihood_table(rows: list[dict], baseline: str) -> str:
    """The table of all runs and modes, at most five columns, and what its intervals are over."""
    cells = []
    over = []
    for row in rows:
        difference = interval = ""
        if "minus" in row:
            low, high = row["interval"]
            difference = f"{row['minus']:+.3f}"
            interval = f"{low:+.3f} to {high:+.3f}"
            over.append(len(row["runs"]))
        times = f"{row['computation']:.3g}x" if row["computation"] else ""
        cells.append([row["decoded"], f"{row['nll']:.3f}", difference, interval, times])
    header = ["decoded as", "loss", f"minus {baseline}", "95%", "computation"]
    lines = [table(header, cells)]
    for n_trainings in dict.fromkeys(over):
        what = f"{n_trainings} trainings" if n_trainings > 1 else "the windows of one training"
        lines.append(f"95% is over {what}")
    for row in rows:
        # Where a group lacks some of the baseline's seeds, its column does not subtract to the row.
        elsewhere = "minus" in row and abs(row["baseline_nll"] - rows[0]["nll"]) > 5e-4
        if rows[0]["plain"] and elsewhere:
            lines.append(
                f"{row['decoded']} is compared with the {baseline} of its own seeds, whose loss is "
                f"{row['baseline_nll']:.3f}"
            )
    return "\n".join(lines)


def draw(figure, rows: list[dict], baseline: str) -> None:
    """NLL minus the baseline's: by position after the prompt, and of all positions."""
    figure.set_size_inches(7, 7.6)
    by_position, overall = figure.subplots(2, 1, height_ratios=[3, 2])
    compared = [row for row in rows if "minus" in row]
    for number, row in enumerate(compared):
        color = f"C{number}"
        position = [point["position"] for point in row["bins"]]
        low, high = np.transpose([point["interval"] for point in row["bins"]])
        minus = [point["minus"] for point in row["bins"]]
        by_position.plot(position, minus, "o-", ms=3, lw=1.2, color=color, label=row["decoded"])
        by_position.fill_between(position, low, high, color=color, alpha=0.15, lw=0)
        overall.plot(row["minus"], number, "o", color=color)
        overall.hlines(number, *row["interval"], color=color, lw=2)
    by_position.axhline(0, color="black", lw=1, label=baseline)
    overall.axvline(0, color="black", lw=1)
    by_position.set(
        xlabel="position after the prompt (tokens)",
        ylabel=f"loss minus {baseline}\n(nats per token)",
        title="Held-out text, as decoded (band, bar: 95%)",
    )
    overall.set(
        xlabel=f"loss minus {baseline} (nats per token), all positions",
        yticks=range(len(compared)),
        yticklabels=[row["decoded"] for row in compared],
        ylim=(max(len(compared), 1) - 0.5, -0.5),
    )
    figure.legend(loc="outside lower center", ncols=2)  # beside the curves it would hide some


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError(
            "name at least one checkpoint, best a plain one first: "
            "python -m experiments.decoding_modes out/demo_plain out/demo"
        )
    began, runs = start(paths, settings)
    names = labels(paths)
    grouped = groups(names, [checkpoint for _, checkpoint, _ in runs])
    modes = []
    for path, (_, checkpoint, _) in zip(paths, runs, strict=True):
        modes.append(("standard",) if without_feedback(path, checkpoint) else get_args(Mode))
    check(paths, runs, grouped, modes, settings)
    results: list[dict] = []
    nlls: list[dict] = []
    samples: list[list] = []
    for place, name in enumerate(names):
        if len(modes[place]) == 1:
            print(f"{name} never trained latent feedback: it is decoded plainly")
        result, by_mode = measure(*runs[place], modes[place], settings)
        results.append({"checkpoint": paths[place]} | result)
        nlls.append(by_mode)
        samples += sample_rows(name, result)
    rows = rows_of(grouped, results, nlls, settings)
    baseline = rows[0]["decoded"] if rows[0]["plain"] else "Standard"
    header = ["samples of", "median length (95%)", "never stopped", "repeated 4-grams"]
    print(table(header, samples))
    n_windows, n_prompt = results[0]["n_windows"], results[0]["n_prompt"]
    print(f"\nheld-out text, {n_windows} windows, after prompts of {n_prompt} tokens")
    print(likelihood_table(rows, baseline))
    if baseline == "Standard":
        print("no plain run was named; one of equal parameters, named first, is the fair baseline")
    numbers = {
        "baseline": baseline,
        "rows": rows,
        "checkpoints": dict(zip(names, results, strict=True)),
    }
    save("decoding_modes", settings, began, numbers, lambda figure: draw(figure, rows, baseline))
    return 0


if __name__ == "__main__":
    run(main)
