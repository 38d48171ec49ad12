"""The log-probability of a Soft rollout by k parallel passes, against the exact one.

    python experiments/likelihood.py out/demo
    python experiments/likelihood.py out/demo --sampler=out/other    also another one's rollouts

Policy gradients weigh what was sampled by a ratio of likelihoods. A Soft rollout's own is recorded
while it is sampled, but under other weights it takes a replay of O(T) dependent steps, because
every input needs the state before it. The paper proposes k parallel passes instead (Eqs. 7-9,
prompt plain, response fused). The public reproduction by its first author reports an error of
0.0106 nats per token at three passes, no ratio of 128 tokens outside 0.8 to 1.2, and trains with
three detached passes.

Here: rollouts sampled at temperature 1 from held-out prompts, in float32. Exact is the replay,
which on the model's own rollouts has to agree with what was recorded. Against it, for each k:
- tokens: the mean absolute error of a token's log-probability, in nats, and the share of tokens
  whose ratio w = exp(approximate - exact) is outside 0.8 to 1.2, where PPO and GRPO clip;
- responses: the mean +- standard deviation of a whole response's error, in nats; the ratio of a
  response, which is the product over its N tokens, by its median and 5% to 95%; the effective
  sample size of these as a share of n rollouts, (sum w)^2 / (n sum w^2), which is at least 1/n by
  construction and below about 10/n no more than an upper bound.
Enough for the one need not be enough for the other: errors of N tokens add up in a product.
One pass (k = 1) is ordinary teacher forcing: Standard's likelihood. Prompt and response fit into
block_size; as many passes as there are sampled tokens are exact, so a k near that number proves
nothing.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from tqdm import tqdm

from experiments import report
from experiments.kv_replay import RolloutSettings, prompt_and_response, replay
from harness.checkpoint import load_model, without_feedback
from harness.configurator import UserError, parse, require, run, setting
from harness.machine import pick_device
from model import GPT, Mode, sampler


@dataclass(frozen=True)
class Settings(RolloutSettings):
    sampler: str = setting(
        "",
        "a checkpoint with the same tokenizer, whose rollouts are scored too (off-policy)",
        path=True,
    )
    sampler_mode: Literal["soft", "standard"] = setting("soft", "how that one decodes")
    clip: float = setting(0.2, "a token's ratio outside 1 +- this is clipped, as in PPO and GRPO")
    tolerance: float = setting(0.01, "a response's ratio within 1 +- this is trustworthy ...")
    share: float = setting(0.95, "... and a k, if for this share of the rollouts it is")

    def __post_init__(self):
        super().__post_init__()
        used = self.sampler != "" or self.sampler_mode == "soft"
        require(self, "sampler_mode", used, "left out without --sampler, whose mode it is")
        require(self, "clip", self.clip > 0, "positive, e.g. 0.2")
        require(self, "tolerance", self.tolerance > 0, "positive, e.g. 0.01")
        require(self, "share", 0 < self.share <= 1, "above 0 and at most 1")


@torch.no_grad()
def log_probs(model: GPT, h: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities (B, N) of tokens (B, N), in nats, given the states before each (B, N, D).

    In float64.
    """
    rows = []
    for n in range(len(tokens)):  # row by row: the logits of a large vocabulary take memory
        rows.append(-model.nll(h[n : n + 1], tokens[n : n + 1])[0])  # (N,)
    return torch.stack(rows).cpu().double()


def effective_sample_size(log_weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of n weights exp(log_weights).

    1 when all are equal, 1/n when one has all.
    """
    w = (log_weights - log_weights.max()).exp()  # the size does not matter, and exp overflows
    return (w.sum().square() / (len(w) * w.square().sum())).item()


def ratio_statistics(
    approximate: Tensor, exact: Tensor, tolerance: float, clip: float
) -> dict[str, float]:
    """How far log-probabilities (B, N) of responses are from the exact ones, and their ratios."""
    error = approximate - exact  # (B, N)
    ratio = error.exp()  # of a token
    summed = error.sum(dim=1)  # (B,): the log of a response's ratio
    low, median, high = summed.quantile(summed.new_tensor([0.05, 0.5, 0.95])).exp().tolist()
    within = (summed.exp() - 1).abs() <= tolerance  # (B,)
    return {
        "token_error": error.abs().mean().item(),
        "tokens_outside": ((ratio - 1).abs() > clip).double().mean().item(),
        "mean_error": summed.mean().item(),
        "error_std": summed.std(correction=0).item(),
        "ratio_5": low,
        "ratio_median": median,
        "ratio_95": high,
        "within": within.double().mean().item(),
        "ess": effective_sample_size(summed),
    }


def sample_rollouts(
    model: GPT, prompts: Tensor, n_new: int, mode: Mode, seed: int
) -> tuple[Tensor, Tensor]:
    """Prompts (B, n_prompt) and N tokens drawn at temperature 1.

    -> both together (B, T), and the log-probabilities (B, N) of the drawn ones, in float64.
    """
    tokens = []
    recorded = []
    for token, log_prob in model.generate(prompts, n_new, mode, sampler(1.0, seed=seed)):
        tokens.append(token)
        recorded.append(log_prob)
    drawn = torch.stack(tokens, dim=1)  # (B, N)
    return torch.cat([prompts, drawn], dim=1), torch.stack(recorded, dim=1).cpu().double()


def score(
    model: GPT, idx: Tensor, n_prompt: int, settings: Settings
) -> tuple[Tensor, dict[int, dict[str, float]]]:
    """The exact log-probabilities (B, N) of rollouts (B, T) under Soft, and k -> its statistics."""
    response = idx[:, n_prompt:]  # (B, N)
    _, exact_h = replay(model, idx, n_prompt)  # (B, T-1, D)
    exact = log_probs(model, exact_h[:, n_prompt - 1 :], response)
    by_passes = {}
    for k in tqdm(settings.passes, "passes", leave=False, disable=None):
        _, h = model.reconstruct(idx[:, :-1], n_prompt, k)  # (B, T-1, D)
        approximate = log_probs(model, h[:, n_prompt - 1 :], response)
        by_passes[k] = ratio_statistics(approximate, exact, settings.tolerance, settings.clip)
    return exact, by_passes


def smallest_from_which_on(enough: dict[int, bool]) -> int | None:
    """The smallest k that is enough, as every larger one is that was tried; None without."""
    found = None
    for k in sorted(enough, reverse=True):
        if not enough[k]:
            break
        found = k
    return found


def trustworthy(by_passes: dict[int, dict[str, float]], share: float) -> int | None:
    """The smallest k from which on responses are within the tolerance for that share of them."""
    return smallest_from_which_on({k: row["within"] >= share for k, row in by_passes.items()})


def unclipped(by_passes: dict[int, dict[str, float]]) -> int | None:
    """The smallest k from which on no token's ratio is outside the clip range."""
    return smallest_from_which_on({k: row["tokens_outside"] == 0 for k, row in by_passes.items()})


def verdict(name: str, result: dict[str, Any], n_new: int, settings: Settings) -> str:
    """Three sentences: do recorded and replayed agree, and which k suffices for what."""

    def smallest(k: int | None) -> str:
        if k is None:
            return f"none of k = {', '.join(map(str, settings.passes))} is enough"
        return f"k = {k} is the smallest"

    if result["largest_difference"] is None:
        by = "by its sampler"
    else:
        difference = result["largest_difference"]
        by = f"by recording (largest difference of a token: {difference:.2g})"
    clip = settings.clip
    return (
        f"{name}: {result['exact']:.4f} nats per token by replay, {result['recorded']:.4f} {by}. "
        f"No token's ratio outside {1 - clip:g} to {1 + clip:g}: {smallest(result['unclipped'])}. "
        f"A response's ratio, the product over {n_new} tokens of this model, within 1 +- "
        f"{settings.tolerance} for {settings.share:.0%} of the rollouts: "
        f"{smallest(result['trustworthy'])}."
    )


def load_sampler(settings: Settings, path: str, tokenizer: dict) -> GPT:
    """The other checkpoint's model.

    UserError where it reads other tokens or cannot decode as it is asked to.
    """
    model, checkpoint = load_model(settings.sampler, pick_device(settings.device))
    if checkpoint["tokenizer"] != tokenizer:
        raise UserError(
            f"--sampler={settings.sampler}: its tokenizer is not that of {path}; name a checkpoint "
            "of the same data"
        )
    if settings.sampler_mode == "soft" and without_feedback(settings.sampler, checkpoint):
        raise UserError(
            f"--sampler={settings.sampler} never trained latent feedback; give "
            "--sampler_mode=standard"
        )
    return model


# --------------------------------------------------------------------------------------------------


def plot(figure, results: dict[str, dict[str, Any]], settings: Settings) -> None:
    """Above what a token loses, below what a response loses, against the number of passes."""
    figure.set_size_inches(7, 6.4)
    (token_error, outside), (ratio, size) = figure.subplots(2, 2)
    for color, (name, result) in enumerate(results.items()):
        ks = list(result["passes"])
        rows = list(result["passes"].values())
        look = {"marker": "o", "ms": 4, "color": f"C{color}"}
        token_error.plot(ks, [row["token_error"] for row in rows], label=name, **look)
        outside.plot(ks, [100 * row["tokens_outside"] for row in rows], **look)
        ratio.plot(ks, [row["ratio_median"] for row in rows], **look)
        low = [row["ratio_5"] for row in rows]
        high = [row["ratio_95"] for row in rows]
        ratio.fill_between(ks, low, high, color=f"C{color}", alpha=0.2)
        size.plot(ks, [row["ess"] for row in rows], **look)
    tolerance = settings.tolerance
    ratio.axhspan(1 - tolerance, 1 + tolerance, color="0.5", alpha=0.4)
    clip = settings.clip
    token_error.set(yscale="log", ylabel="nats", title="error of a token")
    outside.set(ylabel="%", title=f"tokens outside {1 - clip:g} to {1 + clip:g}")
    outside.set_ylim(bottom=0)
    ratio.set(yscale="log", ylabel="median; 5% to 95%", title="ratio of a response")
    size.set(ylim=(0, 1.03), ylabel="share of the rollouts", title="effective sample size")
    for panel in (token_error, outside, ratio, size):
        panel.set(xscale="log", xlabel="parallel passes k", xticks=ks, xticklabels=ks)
        panel.minorticks_off()
    handles, labels = token_error.get_legend_handles_labels()
    title = "rollouts (k = 1: plain, Standard's likelihood)"
    figure.legend(handles, labels, title=title, loc="outside lower center", ncols=2)


def table_rows(name: str, by_passes: dict[int, dict[str, float]]) -> list[list]:
    rows = []
    for k, row in by_passes.items():
        token = [row["token_error"], 100 * row["tokens_outside"]]
        response = f"{row['mean_error']:.3g} +- {row['error_std']:.3g}"
        ratios = [row["ratio_5"], row["ratio_median"], row["ratio_95"]]
        shares = [100 * row["within"], 100 * row["ess"]]
        rows.append([name, k, *token, response, *ratios, *shares])
    return rows


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if len(paths) != 1:
        raise UserError("name one checkpoint, as in: python experiments/likelihood.py out/demo")
    began, [(model, checkpoint, tokens)] = report.start(paths, settings)
    report.need_feedback(paths[0], checkpoint)
    samplers: dict[str, tuple[GPT, Mode]] = {"its own": (model, "soft")}
    block_size = model.config.block_size
    if settings.sampler:
        other = load_sampler(settings, paths[0], checkpoint["tokenizer"])
        label = report.labels([paths[0], settings.sampler])[1]
        samplers[f"{label}'s, {settings.sampler_mode}"] = other, settings.sampler_mode
        block_size = min(block_size, other.config.block_size)
    n_prompt, n_new = prompt_and_response(settings, block_size)
    held_out, _ = report.held_out(model, tokens, settings.n_windows)
    prompts = held_out[:, :n_prompt]
    results = {}
    rows = []
    for name, (who, mode) in samplers.items():
        idx, recorded = sample_rollouts(who, prompts, n_new, mode, settings.seed)
        exact, by_passes = score(model, idx, n_prompt, settings)
        difference = (recorded - exact).abs().max().item() if who is model else None
        results[name] = {
            "recorded": recorded.mean().item(),
            "exact": exact.mean().item(),
            "largest_difference": difference,
            "unclipped": unclipped(by_passes),
            "trustworthy": trustworthy(by_passes, settings.share),
            "passes": by_passes,
        }
        rows += table_rows(name, by_passes)
    print(
        f"{paths[0]}: log-probabilities (nats) of {len(prompts)} rollouts of {n_new} tokens after "
        f"{n_prompt} tokens of prompt; {n_new} passes are exact by construction\n"
    )
    header = ["rollouts", "passes", "error of a token", f"outside 1 +- {settings.clip}, %"]
    header += ["error of a response", "its ratio, 5%", "median", "95%"]
    header += [f"in 1 +- {settings.tolerance}, %", "ESS, %"]
    print(report.table(header, rows))
    for name, result in results.items():
        print("\n" + verdict(name, result, n_new, settings))
    numbers = {"checkpoint": paths[0], "rollouts": len(prompts), "n_prompt": n_prompt}
    numbers |= {"n_new": n_new, "results": results}
    report.save(
        "likelihood", settings, began, numbers, lambda figure: plot(figure, results, settings)
    )
    return 0


if __name__ == "__main__":
    run(main)
