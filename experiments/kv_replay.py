"""The KV cache of a Soft rollout, rebuilt from its tokens alone by k parallel passes (the paper's Fig. 8).

    python -m experiments.kv_replay out/demo

In Soft a generated token enters fused with the state before it, so ordinary prefill of the stored tokens does not give
the cache back. Replaying the recurrence does, one dependent step a token; k parallel passes (Eqs. 7-9, prompt plain,
response fused) come close. The paper (1B parameters, bfloat16, four greedy rollouts of 420 tokens on average), in %:

    passes            1      2      3      4     32    one pass fed the recorded states
    error of keys  21.93   2.66   1.17   1.08   1.07   0.99
    of values      27.73   3.17   1.22   1.09   1.08   0.95
    same argmax    98.74  99.76  99.88  99.94  99.88  99.94

Here: Soft rollouts from held-out prompts, recorded token by token with cache and states, in float32 and in bfloat16.
Over the response, but for its last token, which was never fed: the relative l2 error ||rebuilt - exact|| / ||exact|| of
keys and of values, also by layer and by position; the share of equal next-token argmaxes; the mean KL(exact || rebuilt)
in nats; the time of k passes over one rollout / its replay's. The control, one pass fed the recorded states, shows what
rounding does. Pass k is exact at the response's first k - 1 tokens. All fits into block_size: the cache never slides.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from tqdm import tqdm

from harness.configurator import UserError, parse, run, setting
from experiments import report
from model import GPT, KVCache, sampler

States = tuple[KVCache, Tensor]  # a cache and the states h (B, T, D) of its positions


@dataclass(frozen=True)
class RolloutSettings(report.Settings):
    """What the experiments on recorded rollouts share."""

    n_prompt: int = setting(0, "tokens of a prompt; 0: a quarter of block_size")
    max_new_tokens: int = setting(0, "tokens to sample, at least 2; 0: as many as fit, block_size - n_prompt + 1")
    passes: tuple[int, ...] = setting((1, 2, 3, 4, 8, 16, 32), "numbers of parallel passes to try")

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "passes", tuple(sorted(set(self.passes))))
        if min(self.n_prompt, self.max_new_tokens, self.passes[0] - 1) < 0 or self.max_new_tokens == 1:
            raise ValueError(f"n_prompt={self.n_prompt} must be at least 0, passes={list(self.passes)} at least 1, "
                             f"max_new_tokens={self.max_new_tokens} at least 2, or 0 for as many as fit")


@dataclass(frozen=True)
class Settings(RolloutSettings):
    n_windows: int = setting(24, "rollouts, from as many evenly spaced windows of the validation split")
    temperature: float = setting(0.0, "of the rollouts; 0: greedy")
    repeats: int = setting(15, "timed runs, of which the median counts")

    def __post_init__(self):
        super().__post_init__()
        sampler(self.temperature)  # refuses what no temperature can be
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be at least 1")


def lengths(settings: RolloutSettings, block_size: int) -> tuple[int, int]:
    """Tokens of a prompt, and tokens to sample: the last is not fed, so block_size + 1 fit. UserError beyond that."""
    n_prompt = settings.n_prompt or max(1, block_size // 4)
    room = block_size - n_prompt + 1
    if n_prompt >= block_size or settings.max_new_tokens > room:
        way_out = f"n_prompt={block_size - 1}" if n_prompt >= block_size else f"max_new_tokens={room}"
        raise UserError(f"--n_prompt={n_prompt} --max_new_tokens={settings.max_new_tokens}: prompt and response must "
                        f"fit into block_size={block_size}, as the cache must not slide; give at most --{way_out}")
    return n_prompt, settings.max_new_tokens or room


@torch.no_grad()
def decode(model: GPT, prompt: Tensor, n_new: int, choose: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, States]:
    """Soft, one token at a time -> all tokens (B, T), and the states of all but the last, which is never fed.

    choose: (n, state h (B, D)) -> new token n (B,), n = 0..n_new-1; it samples in a rollout and reads in a replay.
    """
    cache, h = model.reconstruct(prompt, prompt.size(1), 1)  # ordinary prefill
    columns, states = [prompt, choose(0, h[:, -1])[:, None]], [h]
    for n in range(1, n_new):
        states.append(model.decode_step(columns[-1], states[-1][:, -1:], cache, "soft"))  # (B, 1, D)
        columns.append(choose(n, states[-1][:, -1])[:, None])  # (B, 1)
    return torch.cat(columns, dim=1), (cache, torch.cat(states, dim=1))


def replay(model: GPT, idx: Tensor, n_prompt: int) -> States:
    """The states (B, T-1, D) of the Soft rollouts idx (B, T), by the sequential recurrence: O(T) steps."""
    return decode(model, idx[:, :n_prompt], idx.size(1) - n_prompt, lambda n, _: idx[:, n_prompt + n])[1]


@torch.no_grad()
def pass_from_states(model: GPT, idx: Tensor, n_prompt: int, h: Tensor) -> States:
    """The control: one parallel pass over tokens (B, T) fed their recorded states h (B, T, D)."""
    cache = KVCache(model.config, idx.size(0), like=h)
    plain = torch.arange(idx.size(1), device=idx.device) < n_prompt  # (T,)
    return cache, model.stack(model.next_inputs(h, model.embed(idx), plain), cache)


def relative_l2(rebuilt: Tensor, exact: Tensor, over: tuple[int, ...]) -> Any:
    """||rebuilt - exact|| / ||exact||, with norms over these dimensions: a number, or a list along the one left."""
    return (vector_norm(rebuilt - exact, dim=over) / vector_norm(exact, dim=over)).tolist()


@torch.no_grad()
def compare(model: GPT, rebuilt: States, exact: States, n_prompt: int) -> dict[str, Any]:
    """Errors of a cache and of the predictions from its states, over the response; by position over the prompt too."""
    numbers: dict[str, Any] = {}
    for name in ("keys", "values"):
        pair = [getattr(cache, name[0])[:, :, :, :exact[0].length].cpu().double() for cache, _ in (rebuilt, exact)]
        response = [whole[:, :, :, n_prompt:] for whole in pair]  # (L, B, H_kv, T - n_prompt, D_h)
        numbers |= {name: relative_l2(*response, over=(0, 1, 2, 3, 4)),
                    f"{name}_by_layer": relative_l2(*response, over=(1, 2, 3, 4)),
                    f"{name}_by_position": relative_l2(*pair, over=(0, 1, 2, 4))}
    same, kl = [], []
    for rows in zip(rebuilt[1], exact[1], strict=True):  # one by one: the logits of a large vocabulary take memory
        ours, theirs = (model.head(h[n_prompt:]).cpu().double().log_softmax(-1) for h in rows)  # (T - n_prompt, V)
        same.append((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
        kl.append((theirs.exp() * (theirs - ours)).sum(-1).mean())
    return numbers | {"argmax": torch.stack(same).mean().item(), "kl": torch.stack(kl).mean().item()}


def time_ratios(model: GPT, idx: Tensor, n_prompt: int, settings: Settings) -> dict[int, float]:
    """Time of k passes over one rollout (1, T) / time of its sequential replay: medians of interleaved runs."""
    seconds: dict[int, list[float]] = {k: [] for k in (0, *settings.passes)}  # 0: the replay
    for _ in tqdm(range(settings.repeats), "timing", leave=False, disable=None):
        for k, runs in seconds.items():
            began = time.perf_counter()
            _, h = model.reconstruct(idx[:, :-1], n_prompt, k) if k else replay(model, idx, n_prompt)
            h.sum().item()  # waits for the device
            runs.append(time.perf_counter() - began)
    return {k: statistics.median(seconds[k]) / statistics.median(seconds[0]) for k in settings.passes}


def measure(model: GPT, prompts: Tensor, n_new: int, settings: Settings) -> dict[str, Any]:
    """Rollouts from prompts (B, n_prompt) in the model's own dtype -> {"passes": {k: numbers}, "control": numbers}."""
    n_prompt = prompts.size(1)
    pick = sampler(settings.temperature, seed=settings.seed)
    idx, exact = decode(model, prompts, n_new, lambda n, h: pick(model.head(h).float()))
    fed, ratios = idx[:, :-1], time_ratios(model, idx[:1], n_prompt, settings)  # (B, T-1)
    passes = {k: compare(model, model.reconstruct(fed, n_prompt, k), exact, n_prompt) | {"time": ratios[k]}
              for k in tqdm(settings.passes, "passes", leave=False, disable=None)}
    control = compare(model, pass_from_states(model, fed, n_prompt, exact[1]), exact, n_prompt)
    return {"passes": passes, "control": control}


def draw(figure, results: dict[str, dict], n_prompt: int) -> None:
    figure.set_size_inches(12, 4.2)
    by_passes, by_layer, by_position = figure.subplots(1, 3, sharey=True)
    kinds = {"keys": "o-", "values": "s--"}
    for color, (dtype, result) in enumerate(results.items()):
        for name, style in kinds.items():
            ks, errors = zip(*((k, row[name]) for k, row in result["passes"].items()))
            by_passes.plot(ks, errors, style, color=f"C{color}", ms=4, label=f"{name}, {dtype}")
        by_passes.axhline(result["control"]["keys"], color=f"C{color}", ls=":", label="keys, from recorded states")
    for color, (k, row) in enumerate(results["float32"]["passes"].items()):
        for name, style in kinds.items():
            for axes, by, first in ((by_layer, "layer", 1), (by_position, "position", 1 - n_prompt)):
                line = row[f"{name}_by_{by}"]
                axes.plot(range(first, first + len(line)), line, style[1:], color=f"C{color}", label=f"{name}, k={k}")
    by_passes.set(xscale="log", yscale="log", xlabel="parallel passes k", ylabel="relative l2 error over the response",
                  xticks=ks, xticklabels=ks)
    by_passes.minorticks_off()
    by_passes.legend(fontsize=7)
    by_layer.set(xlabel="layer", title="float32", xticks=range(1, 1 + len(row["keys_by_layer"])))
    by_position.set(xlabel="position after the prompt (tokens)", title="float32", xlim=(1, None))
    by_position.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if len(words) != 1:
        raise UserError("name one checkpoint, as in: python -m experiments.kv_replay out/demo")
    began, [(model, checkpoint, tokens)] = report.start(words, settings)
    report.need_feedback(words[0], checkpoint)
    n_prompt, n_new = lengths(settings, model.config.block_size)
    prompts = report.held_out(model, tokens, settings.n_windows)[0][:, :n_prompt]
    results = {dtype: measure(model.to(getattr(torch, dtype)), prompts, n_new, settings)
               for dtype in ("float32", "bfloat16")}
    rows = [[dtype, name, *(100 * row[key] for key in ("keys", "values", "argmax")), row["kl"], row.get("time", "")]
            for dtype, result in results.items()
            for name, row in (result["passes"] | {"recorded states": result["control"]}).items()]
    header = ["dtype", "passes", "error of keys, %", "of values, %", "same argmax, %", "KL, nats", "time / replay's"]
    print(f"{words[0]}: {len(prompts)} Soft rollouts of {n_new} tokens after {n_prompt} of prompt\n")
    print(report.table(header, rows))
    numbers = {"checkpoint": words[0], "rollouts": len(prompts), "n_prompt": n_prompt, "n_new": n_new} | results
    report.save("kv_replay", settings, began, numbers, lambda figure: draw(figure, results, n_prompt))
    return 0


if __name__ == "__main__":
    run(main)
