"""The log-probability of a rollout under Soft by k parallel passes, against the exact one (the paper on off-policy RL).

    python -m experiments.likelihood out/demo
    python -m experiments.likelihood out/demo --sampler=out/other     also rollouts that another checkpoint sampled

Policy gradients weigh a rollout by a ratio of likelihoods. A Soft rollout's own is recorded while it is sampled, but
under other weights it takes a replay of O(T) dependent steps, since every input needs the state before it. The paper
proposes k parallel passes instead (Eqs. 7-9, prompt plain, response fused), a recipe that it has not tried in training.

Here: rollouts sampled at temperature 1 from held-out prompts, in float32. Exact is the replay, which on the model's
own rollouts has to agree with what was recorded. Against it, for each k: the mean absolute error of a token's
log-probability, and the mean +- standard deviation of the whole response's error, in nats; the importance ratio
w = exp(approximate - exact) of a response, by its median and 5% to 95%; the effective sample size of these as a share
of n rollouts, (sum w)^2 / (n sum w^2). One pass is ordinary teacher forcing: Standard's likelihood. Prompt and response
fit into block_size; as many passes as there are sampled tokens are exact, so a k near that number proves nothing.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from harness.checkpoint import load_model
from harness.configurator import UserError, parse, run, setting
from experiments import report
from experiments.kv_replay import RolloutSettings, lengths, replay
from harness.machine import pick_device
from model import GPT, Mode, sampler


@dataclass(frozen=True)
class Settings(RolloutSettings):
    sampler: str = setting("", "a checkpoint with the same tokenizer, whose rollouts are scored too (off-policy)")
    sampler_mode: Literal["soft", "standard"] = setting("soft", "how that one decodes")
    tolerance: float = setting(0.01, "a ratio within 1 +- this is trustworthy ...")
    share: float = setting(0.95, "... and a k, if for this share of the rollouts it is")

    def __post_init__(self):
        super().__post_init__()
        if not self.tolerance > 0 or not 0 < self.share <= 1:
            raise ValueError(f"tolerance={self.tolerance} must be positive, share={self.share} above 0 and at most 1")


@torch.no_grad()
def log_probs(model: GPT, h: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities (B, N) of tokens (B, N), in nats, float64, given the states before each, h (B, N, D)."""
    rows = [model.head(states).float().log_softmax(-1).gather(1, row[:, None])[:, 0]  # (N,)
            for states, row in zip(h, tokens, strict=True)]  # one by one: logits of a large vocabulary take memory
    return torch.stack(rows).cpu().double()


def effective_sample_size(log_weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of n weights exp(log_weights): 1 when all are equal, 1/n when one has all."""
    w = (log_weights - log_weights.max()).exp()  # the size does not matter, and exp overflows
    return (w.sum().square() / (len(w) * w.square().sum())).item()


def statistics(approximate: Tensor, exact: Tensor, tolerance: float) -> dict[str, float]:
    """How far the log-probabilities (B, N) of responses are from the exact ones, and what becomes of their ratios."""
    error = (approximate - exact).sum(1)  # (B,)
    low, median, high = error.quantile(error.new_tensor([0.05, 0.5, 0.95])).exp().tolist()
    return {"token_error": (approximate - exact).abs().mean().item(), "mean_error": error.mean().item(),
            "error_std": error.std(correction=0).item(), "ratio_5": low, "ratio_median": median, "ratio_95": high,
            "within": ((error.exp() - 1).abs() <= tolerance).double().mean().item(),
            "ess": effective_sample_size(error)}


def sample_rollouts(model: GPT, prompts: Tensor, n_new: int, mode: Mode, seed: int) -> tuple[Tensor, Tensor]:
    """Prompts (B, n_prompt) and N tokens drawn at temperature 1 -> both (B, T), log-probabilities (B, N) of these."""
    steps = model.generate(prompts, n_new, mode, sampler(1.0, seed=seed))
    columns, recorded = zip(*steps)
    return torch.cat([prompts, torch.stack(columns, dim=1)], dim=1), torch.stack(recorded, dim=1).cpu().double()


def score(model: GPT, idx: Tensor, n_prompt: int, settings: Settings) -> tuple[Tensor, dict[int, dict[str, float]]]:
    """The exact log-probabilities (B, N) of the rollouts idx (B, T) under Soft, and the statistics of k passes by k."""
    response = idx[:, n_prompt:]  # (B, N)
    exact = log_probs(model, replay(model, idx, n_prompt)[1][:, n_prompt - 1:], response)
    rows = {}
    for k in tqdm(settings.passes, "passes", leave=False, disable=None):
        h = model.reconstruct(idx[:, :-1], n_prompt, k)[1]  # (B, T-1, D)
        rows[k] = statistics(log_probs(model, h[:, n_prompt - 1:], response), exact, settings.tolerance)
    return exact, rows


def trustworthy(rows: dict[int, dict[str, float]], share: float) -> int | None:
    """The smallest k whose ratio is within the tolerance for that share of the rollouts, or None."""
    return min((k for k, row in rows.items() if row["within"] >= share), default=None)


def summary(name: str, result: dict[str, Any], settings: Settings) -> str:
    """One line: whether recorded and replayed agree, and which k is trustworthy."""
    difference, k = result["largest_difference"], result["trustworthy"]
    by = "its sampler" if difference is None else f"recording (largest difference of a token: {difference:.2g})"
    found = f"k = {k} is the smallest" if k else f"none of k = {', '.join(map(str, settings.passes))}"
    return (f"{name}: {result['exact']:.4f} nats a token by replay, {result['recorded']:.4f} by {by}; ratio within 1 "
            f"+- {settings.tolerance} for {settings.share:.0%} of the rollouts: {found}")


def load_sampler(settings: Settings, path: str, tokenizer: dict) -> GPT:
    """The other checkpoint's model; UserError where it reads other tokens or cannot decode as it is asked to."""
    model, checkpoint = load_model(settings.sampler, pick_device(settings.device))
    if checkpoint["tokenizer"] != tokenizer:
        raise UserError(f"--sampler={settings.sampler}: its tokenizer is not that of {path}; take one of its data")
    if settings.sampler_mode == "soft" and (model.fusion is None or not checkpoint["feedback_steps"]):
        raise UserError(f"--sampler={settings.sampler} never trained latent feedback; give --sampler_mode=standard")
    return model


def draw(figure, results: dict[str, dict[str, Any]], tolerance: float) -> None:
    figure.set_size_inches(12, 4.2)
    by_token, by_ratio, by_size = figure.subplots(1, 3)
    for color, (name, result) in enumerate(results.items()):
        ks = list(result["passes"])
        column = {key: [row[key] for row in result["passes"].values()] for key in result["passes"][ks[0]]}
        for axes, key in ((by_token, "token_error"), (by_ratio, "ratio_median"), (by_size, "ess")):
            axes.plot(ks, column[key], "o-", ms=4, color=f"C{color}", label=name)
        by_ratio.fill_between(ks, column["ratio_5"], column["ratio_95"], color=f"C{color}", alpha=0.2,
                              label=f"{name}: 5% to 95%")
    by_ratio.axhspan(1 - tolerance, 1 + tolerance, color="0.5", alpha=0.4, label=f"1 +- {tolerance}")
    for axes in (by_token, by_ratio, by_size):
        axes.set(xscale="log", xlabel="parallel passes k (1: Standard's likelihood)", xticks=ks, xticklabels=ks)
        axes.minorticks_off()
    by_token.set(yscale="log", ylabel="mean error of a token's log-probability (nats)")
    by_ratio.set(yscale="log", ylabel="importance ratio of a response")
    by_size.set(ylim=(0, 1.03), ylabel="effective sample size (share of the rollouts)")
    by_ratio.legend(fontsize=8)
    by_size.legend(fontsize=8)


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if len(words) != 1:
        raise UserError("name one checkpoint, as in: python -m experiments.likelihood out/demo --sampler=out/other")
    began, [(model, checkpoint, tokens)] = report.start(words, settings)
    report.need_feedback(words[0], checkpoint)
    samplers: dict[str, tuple[GPT, Mode]] = {"its own": (model, "soft")}
    if settings.sampler:
        other = load_sampler(settings, words[0], checkpoint["tokenizer"])
        label = report.labels([words[0], settings.sampler])[1]
        samplers[f"{label}'s, {settings.sampler_mode}"] = other, settings.sampler_mode
    n_prompt, n_new = lengths(settings, min(who.config.block_size for who, _ in samplers.values()))
    prompts = report.held_out(model, tokens, settings.n_windows)[0][:, :n_prompt]
    results, lines, rows = {}, [], []
    for name, (who, mode) in samplers.items():
        idx, recorded = sample_rollouts(who, prompts, n_new, mode, settings.seed)
        exact, by_passes = score(model, idx, n_prompt, settings)
        trusted = trustworthy(by_passes, settings.share)
        results[name] = {"recorded": recorded.mean().item(), "exact": exact.mean().item(), "trustworthy": trusted,
                         "largest_difference": (recorded - exact).abs().max().item() if who is model else None,
                         "passes": by_passes}
        rows += [[name, k, row["token_error"], f"{row['mean_error']:.3g} +- {row['error_std']:.3g}", row["ratio_5"],
                  row["ratio_median"], row["ratio_95"], 100 * row["within"], 100 * row["ess"]]
                 for k, row in by_passes.items()]
        lines += [summary(name, results[name], settings)]
    header = ["rollouts", "passes", "error of a token", "of a response", "ratio, 5%", "median", "95%",
              f"in 1 +- {settings.tolerance}, %", "ESS, %"]
    about = (f"{words[0]}: log-probabilities (nats) of {len(prompts)} rollouts of {n_new} tokens after {n_prompt} of "
             f"prompt; {n_new} passes are exact by construction")
    print(about, report.table(header, rows), "\n".join(lines), sep="\n\n")
    numbers = {"checkpoint": words[0], "rollouts": len(prompts), "n_prompt": n_prompt, "n_new": n_new,
               "results": results}
    report.save("likelihood", settings, began, numbers, lambda figure: draw(figure, results, settings.tolerance))
    return 0


if __name__ == "__main__":
    run(main)
