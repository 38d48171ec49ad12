"""Standard, Soft and Fused decoding of the same weights (the paper's Fig. 7 and its comparison of decoding modes).

    python -m experiments.decoding_modes out/demo
    python -m experiments.decoding_modes out/plain out/demo --prefill_passes=3 --temperature=0.8

The paper: Soft and Fused beat Standard on the same weights, and Soft writes shorter reasoning (median rollout length).
A small model does no reasoning; what it can show is likelihood, and the lengths of what it writes.

Measured, in each mode:
- the negative log-likelihood (NLL, nats a token) of held-out text exactly as decoded: the mode prefills a window's
  first n_prompt tokens, then the true tokens go through the KV cache one by one. Position 1 after the prompt is read
  off the prompt's last state, where Soft equals Standard. The 95% interval of the difference to Standard is a paired
  bootstrap: percentiles of the mean over windows, which do not overlap, drawn with replacement;
- of text sampled after n_samples held-out prompts, with one seed for all modes: the median length, in tokens, up to the
  end of the first `stop` (a sample without one counts as max_new_tokens, and the share of those is given), with its
  bootstrap interval over samples, and the share of repeated 4-grams: those of the whole sample's runs of four tokens
  that it had before. The text that really follows the prompts is measured in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from harness.checkpoint import without_feedback
from harness.configurator import UserError, parse, run, setting
from experiments.report import Settings as Shared
from experiments.report import held_out, labels, save, start, table
from model import GPT, Mode, sampler
from harness.tokenizer import Tokenizer, make_tokenizer
from harness.data import even_starts

BATCH = 50  # windows at a time
RESAMPLES = 2000  # of the bootstrap
BINS = 16  # points of a curve, at most


@dataclass(frozen=True)
class Settings(Shared):
    n_windows: int = setting(600, "windows of the validation split, at most as many as fit without overlap")
    n_prompt: int = setting(0, "tokens of a window's prompt; 0: half of block_size")
    prefill_passes: int = setting(1, "Fused: passes over the prompt after the plain one")
    n_samples: int = setting(32, "prompts to sample from")
    temperature: float = setting(1.0, "of the samples; 0: the likeliest token")
    max_new_tokens: int = setting(200, "tokens of a sample")
    stop: str = setting("\n\n", "the string up to which a sample's length is counted")

    def __post_init__(self):
        super().__post_init__()
        sampler(self.temperature)  # its rule
        for name, least in {"n_prompt": 0, "prefill_passes": 1, "n_samples": 1, "max_new_tokens": 4}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not self.stop:
            raise ValueError("stop='' must not be empty")


@torch.no_grad()
def likelihood(model: GPT, idx: Tensor, targets: Tensor, n_prompt: int, mode: Mode, **prefill) -> Tensor:
    """NLL (N, T - n_prompt + 1) after a prompt, of tokens and next tokens (N, T); prefill: options of GPT.prefill."""
    batches = []
    for part, part_targets in zip(tqdm(idx.split(BATCH), mode, leave=False, disable=None), targets.split(BATCH)):
        cache, h = model.prefill(part[:, :n_prompt], mode, **prefill)
        columns = []
        for t in range(n_prompt - 1, part.size(1)):
            if t >= n_prompt:
                h = model.decode_step(part[:, t:t + 1], h, cache, mode)  # (B, 1, D)
            columns.append(F.cross_entropy(model.head(h[:, 0]), part_targets[:, t], reduction="none"))  # (B,)
        batches.append(torch.stack(columns, dim=1))
    return torch.cat(batches)  # (N, T - n_prompt + 1)


def bootstrap(values: np.ndarray, seed: int, statistic: Callable = np.mean) -> list[list[float]]:
    """95% percentile interval of a statistic of each column of values (N, M), over rows drawn with replacement."""
    draw = np.random.default_rng(seed)
    drawn = [statistic(values[draw.integers(len(values), size=len(values))], axis=0) for _ in range(RESAMPLES)]
    return np.percentile(drawn, [2.5, 97.5], axis=0).T.tolist()  # M pairs


def stop_length(tokenizer: Tokenizer, ids: list[int], stop: str) -> int | None:
    """Tokens up to the one that completes the first `stop` in the text; None where there is none."""
    return next((n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n])), None)


def repeated(ids: list[int], n: int = 4) -> float:
    """The share of a text's n-grams of tokens that came before in it."""
    grams = [tuple(ids[start:start + n]) for start in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def statistics(tokenizer: Tokenizer, rows: list[list[int]], settings: Settings) -> dict:
    """Of texts, each of max_new_tokens tokens: lengths to `stop` and repeated 4-grams."""
    lengths = [stop_length(tokenizer, ids, settings.stop) for ids in rows]
    counted = np.array([len(ids) if length is None else length for ids, length in zip(rows, lengths)])
    interval = bootstrap(counted[:, None], settings.seed, np.median)[0]
    return {"median_length": float(np.median(counted)), "interval": interval, "lengths": counted.tolist(),
            "never_stopped": lengths.count(None) / len(rows),
            "repeated_4grams": float(np.mean([repeated(ids) for ids in rows]))}


def cells(samples: dict) -> list:
    """The table's last columns, of what `statistics` returns."""
    median, (low, high) = samples["median_length"], samples["interval"]
    return [f"{median:.4g} ({low:.4g} to {high:.4g})", samples["never_stopped"], samples["repeated_4grams"]]


def measure(model: GPT, tokenizer: Tokenizer, tokens: np.ndarray, modes: tuple[Mode, ...], settings: Settings) -> dict:
    """The numbers of one checkpoint, by mode. UserError where prompts or samples do not fit."""
    block_size, device = model.config.block_size, model.embedding.weight.device
    n_prompt = settings.n_prompt or block_size // 2
    if n_prompt >= block_size:
        raise UserError(f"--n_prompt={n_prompt}: block_size is {block_size}; at most {block_size - 1}, or 0 for half")
    sample_size = n_prompt + settings.max_new_tokens
    if sample_size > len(tokens):
        raise UserError(f"--max_new_tokens={settings.max_new_tokens}: the validation split has {len(tokens)} tokens; "
                        f"after a prompt of {n_prompt} at most {len(tokens) - n_prompt} follow")
    idx, targets = held_out(model, tokens, min(settings.n_windows, (len(tokens) - 1) // block_size))
    texts = tokens[even_starts(tokens, settings.n_samples, sample_size - 1)[:, None] + np.arange(sample_size)]
    prompts = torch.from_numpy(texts[:, :n_prompt].astype(np.int64)).to(device)  # (n_samples, n_prompt)
    result = {"n_prompt": n_prompt, "n_windows": len(idx), "modes": {},
              "held_out_text": statistics(tokenizer, texts[:, n_prompt:].tolist(), settings)}
    nlls, seed = {}, settings.seed
    for mode in modes:
        prefill = {"prefill_passes": settings.prefill_passes} if mode == "fused" else {}
        nlls[mode] = nll = likelihood(model, idx, targets, n_prompt, mode, **prefill).cpu().double().numpy()
        difference = nll - nlls["standard"]  # (N, T - n_prompt + 1): paired
        pick = sampler(settings.temperature, seed=seed)
        steps = tqdm(model.generate(prompts, settings.max_new_tokens, mode, pick, **prefill), f"{mode}, samples",
                     settings.max_new_tokens, leave=False, disable=None)
        drawn = [token.tolist() for token, _ in steps]  # max_new_tokens lists of n_samples
        parts = [slice(None), *np.array_split(np.arange(nll.shape[1]), min(BINS, nll.shape[1]))]  # all, then the bins
        means = np.stack([difference[:, part].mean(1) for part in parts], axis=1)  # (N, 1 + bins)
        intervals = bootstrap(means, seed)
        result["modes"][mode] = {
            "nll": float(nll.mean()), "difference": float(difference.mean()), "interval": intervals[0],
            "nll_by_position": nll.mean(0).tolist(),
            "bins": [{"position": float(part.mean() + 1), "difference": float(mean), "interval": interval}
                     for part, mean, interval in zip(parts[1:], means.mean(0)[1:], intervals[1:])],
            "samples": statistics(tokenizer, np.transpose(drawn).tolist(), settings)}
    return result


def draw(figure, results: dict[str, dict]) -> None:
    """NLL minus Standard's: by position after the prompt, and of all positions."""
    figure.set_size_inches(10, 4.2)
    by_position, overall = figure.subplots(1, 2, width_ratios=[5, 2])
    curves = [(f"{name}, {mode.capitalize()}", numbers) for name, result in results.items()
              for mode, numbers in result["modes"].items() if mode != "standard"]
    for panel in (by_position, overall):
        panel.axhline(0, color="gray", lw=1, label="Standard")
    for number, (label, numbers) in enumerate(curves):
        bins, color = numbers["bins"], f"C{number}"
        position = [part["position"] for part in bins]
        by_position.plot(position, [part["difference"] for part in bins], "o-", ms=3, lw=1.2, color=color, label=label)
        by_position.fill_between(position, *np.transpose([part["interval"] for part in bins]), color=color, alpha=0.15)
        overall.bar(number, numbers["difference"], color=color, alpha=0.6)
        overall.vlines(number, *numbers["interval"], color="black", lw=1.2)
    by_position.set(xlabel="position after the prompt (tokens)", ylabel="NLL minus Standard's (nats a token)",
                    title="Held-out text, as decoded (band: 95%)")
    overall.set(title="All positions (line: 95%)", xticks=[], ylabel="NLL minus Standard's (nats a token)")
    by_position.legend()


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError("name at least one checkpoint, e.g. python -m experiments.decoding_modes out/demo")
    (began, runs), results, rows = start(paths, settings), {}, []
    for path, name, (model, checkpoint, tokens) in zip(paths, labels(paths), runs):
        modes = get_args(Mode)
        if problem := without_feedback(path, checkpoint):
            print(f"{name}, Standard only: {problem}")
            modes = ("standard",)
        tokenizer = make_tokenizer(checkpoint["tokenizer"])
        result = results[name] = {"checkpoint": path} | measure(model, tokenizer, tokens, modes, settings)
        print(f"{name}: {result['n_windows']} windows, prompts of {result['n_prompt']} tokens")
        for mode, numbers in result["modes"].items():
            low, high = numbers["interval"]
            paired = ["", ""] if mode == "standard" else [numbers["difference"], f"{low:.4f} to {high:.4f}"]
            rows.append([name, mode, numbers["nll"], *paired, *cells(numbers["samples"])])
        rows.append([name, "the text itself", "", "", "", *cells(result["held_out_text"])])
    lengths = ["median length (95%)", "never stopped", "repeated 4-grams"]
    print(table(["run", "mode", "NLL", "minus Standard", "95%", *lengths], rows))
    save("decoding_modes", settings, began, {"checkpoints": results}, lambda figure: draw(figure, results))
    return 0


if __name__ == "__main__":
    run(main)
