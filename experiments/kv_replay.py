"""The KV cache of a Soft rollout, rebuilt from its tokens alone by k parallel passes (Fig. 8).

    python experiments/kv_replay.py out/demo

In Soft a generated token enters fused with the state before it, so ordinary prefill of the stored
tokens (k = 1) does not give the cache back. Replaying the recurrence does, one dependent step per
token; k parallel passes (Eqs. 7-9, prompt plain, response fused) come close. In percent:

    passes            1      2      3      4     32    one pass fed the recorded states
    error of keys  21.93   2.66   1.17   1.08   1.07   0.99
    of values      27.73   3.17   1.22   1.09   1.08   0.95
    same argmax    98.74  99.76  99.88  99.94  99.88  99.94

These are from the public reproduction by the paper's first author (0.95B parameters after SFT and
RL, bfloat16, four greedy rollouts of 420 tokens on average). The paper's own text has only the
values of 3 and 4 passes, the control and the argmax of 99.88%.

Here: Soft rollouts from held-out prompts, recorded token by token with cache and states, in float32
and in bfloat16. Measured over the response, except its last token, which was never fed:
- the relative l2 error ||rebuilt - exact|| / ||exact|| of keys and of values, also by layer and by
  position;
- the share of equal next-token argmaxes, and the mean KL(exact || rebuilt) in nats;
- the time of k passes over one rollout / that of its replay.
The control, one pass fed the recorded states, shows what rounding does. Pass k is exact at the
response's first k - 1 tokens. All fits into block_size: the cache never slides.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.linalg import vector_norm
from tqdm import tqdm

from experiments import report
from experiments.timing import ratio, turns
from harness.configurator import UserError, parse, require, run, setting
from model import GPT, KVCache, sampler

States = tuple[KVCache, Tensor]  # a cache and the states h (B, T, D) of its positions


@dataclass(frozen=True)
class RolloutSettings(report.Settings):
    """What the experiments on recorded rollouts share."""

    n_prompt: int = setting(0, "tokens of a prompt; 0: a quarter of block_size")
    max_new_tokens: int = setting(
        0, "tokens to sample, at least 2; 0: as many as fit, block_size - n_prompt + 1"
    )
    passes: tuple[int, ...] = setting(
        (1, 2, 3, 4, 8, 16, 32), "numbers k of parallel passes to try, in all; 1 is plain prefill"
    )

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "passes", tuple(sorted(set(self.passes))))
        require(self, "n_prompt", self.n_prompt >= 0, "positive, or 0 for a quarter of block_size")
        enough = self.max_new_tokens == 0 or self.max_new_tokens >= 2
        require(self, "max_new_tokens", enough, "at least 2, or 0 for as many as fit")
        require(self, "passes", self.passes[0] >= 1, "at least 1 each; 1 is plain prefill")


@dataclass(frozen=True)
class Settings(RolloutSettings):
    n_windows: int = setting(
        24, "rollouts, from as many evenly spaced windows of the validation split"
    )
    temperature: float = setting(0.0, "of the rollouts; 0: greedy")
    repeats: int = setting(15, "turns of the timed runs; the median ratio counts")

    def __post_init__(self):
        super().__post_init__()
        sampler(self.temperature)  # ValueError for what cannot be a temperature
        require(self, "repeats", self.repeats >= 1, "at least 1")


def prompt_and_response(settings: RolloutSettings, block_size: int) -> tuple[int, int]:
    """How many tokens a prompt has, and how many are sampled after it.

    The last one is not fed, so block_size + 1 fit in all. UserError beyond that.
    """
    n_prompt = settings.n_prompt or max(1, block_size // 4)
    room = block_size - n_prompt + 1
    if n_prompt >= block_size:
        raise UserError(
            f"--n_prompt={n_prompt} leaves no room in block_size={block_size}, because the cache "
            f"must not slide; give at most --n_prompt={block_size - 1}"
        )
    if settings.max_new_tokens > room:
        raise UserError(
            f"--max_new_tokens={settings.max_new_tokens} after {n_prompt} tokens of prompt exceeds "
            f"block_size={block_size}, because the cache must not slide; give at most "
            f"--max_new_tokens={room}"
        )
    return n_prompt, settings.max_new_tokens or room


# --------------------------------------------------------------------------------------------------
# Rollouts, and three ways to their states


@torch.no_grad()
def decode(
    model: GPT, prompt: Tensor, n_new: int, choose: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, States]:
    """Soft, one token at a time: a prompt (B, n_prompt) -> all tokens (B, T), and their states.

    The states are those of all tokens but the last, which is never fed. choose: (n, the state
    (B, D)) -> new token n (B,), n = 0..n_new-1; it samples in a rollout and reads in a replay.
    """
    cache, h = model.reconstruct(prompt, n_plain=prompt.size(1), k=1)  # ordinary prefill
    token = choose(0, h[:, -1])[:, None]  # (B, 1)
    tokens = [prompt, token]
    states = [h]
    for n in range(1, n_new):
        h = model.decode_step(token, h[:, -1:], cache, "soft")  # (B, 1, D)
        token = choose(n, h[:, -1])[:, None]  # (B, 1)
        tokens.append(token)
        states.append(h)
    return torch.cat(tokens, dim=1), (cache, torch.cat(states, dim=1))


def replay(model: GPT, idx: Tensor, n_prompt: int) -> States:
    """The states (B, T-1, D) of Soft rollouts (B, T), by the sequential recurrence: O(T) steps."""

    def recorded(n: int, h: Tensor) -> Tensor:
        return idx[:, n_prompt + n]

    _, states = decode(model, idx[:, :n_prompt], idx.size(1) - n_prompt, recorded)
    return states


@torch.no_grad()
def pass_from_states(model: GPT, idx: Tensor, n_prompt: int, h: Tensor) -> States:
    """The control: one parallel pass over tokens (B, T) fed their recorded states h (B, T, D)."""
    cache = KVCache(model.config, idx.size(0), like=h)
    plain = torch.arange(idx.size(1), device=idx.device) < n_prompt  # (T,)
    u = model.next_inputs(h, model.embed(idx), plain)  # (B, T, D)
    return cache, model.stack(u, cache)


# --------------------------------------------------------------------------------------------------
# How far they are from each other


def relative_l2(rebuilt: Tensor, exact: Tensor, over: tuple[int, ...]) -> Any:
    """||rebuilt - exact|| / ||exact||, with norms over these dimensions.

    -> a number, or a list along the one dimension that is left.
    """
    error = vector_norm(rebuilt - exact, dim=over)
    return (error / vector_norm(exact, dim=over)).tolist()


def filled(cache: KVCache) -> dict[str, Tensor]:
    """The filled part of a cache, (L, B, H_kv, T, D_h) each, in float64."""
    return {
        "keys": cache.k[:, :, :, : cache.length].cpu().double(),
        "values": cache.v[:, :, :, : cache.length].cpu().double(),
    }


@torch.no_grad()
def compare(model: GPT, rebuilt: States, exact: States, n_prompt: int) -> dict[str, Any]:
    """Errors of a cache and of the predictions from its states, over the response.

    The errors by position are those of the prompt too.
    """
    rebuilt_cache, rebuilt_h = rebuilt
    exact_cache, exact_h = exact
    numbers: dict[str, Any] = {}
    ours_by_name = filled(rebuilt_cache)
    for name, theirs in filled(exact_cache).items():
        ours = ours_by_name[name]  # (L, B, H_kv, T, D_h)
        response = ours[:, :, :, n_prompt:], theirs[:, :, :, n_prompt:]
        numbers[name] = relative_l2(*response, over=(0, 1, 2, 3, 4))
        numbers[f"{name}_by_layer"] = relative_l2(*response, over=(1, 2, 3, 4))
        numbers[f"{name}_by_position"] = relative_l2(ours, theirs, over=(0, 1, 2, 4))
    same = []
    kl = []
    # Row by row, because the logits of a large vocabulary take memory.
    for our_h, their_h in zip(rebuilt_h[:, n_prompt:], exact_h[:, n_prompt:], strict=True):
        log_q = model.head(our_h).cpu().double().log_softmax(-1)  # (T - n_prompt, V)
        log_p = model.head(their_h).cpu().double().log_softmax(-1)  # (T - n_prompt, V)
        same.append((log_q.argmax(-1) == log_p.argmax(-1)).double().mean())
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    numbers["argmax"] = torch.stack(same).mean().item()
    numbers["kl"] = torch.stack(kl).mean().item()
    return numbers


def time_ratios(model: GPT, idx: Tensor, n_prompt: int, settings: Settings) -> dict[int, float]:
    """k -> time of k passes over one rollout (1, T) / that of its sequential replay."""
    things = {"replay": partial(replay, model, idx, n_prompt)}
    for k in settings.passes:
        things[f"{k} passes"] = partial(model.reconstruct, idx[:, :-1], n_prompt, k)
    seconds = turns(things, settings.repeats, idx.device)
    return {k: ratio(seconds, f"{k} passes", "replay") for k in settings.passes}


def rollout_errors(model: GPT, prompts: Tensor, n_new: int, settings: Settings) -> dict[str, Any]:
    """Rollouts from prompts (B, n_prompt), in the model's own dtype.

    -> {"passes": {k: numbers}, "control": numbers}.
    """
    n_prompt = prompts.size(1)
    pick = sampler(settings.temperature, seed=settings.seed)

    def sample(n: int, h: Tensor) -> Tensor:
        return pick(model.head(h).float())

    idx, exact = decode(model, prompts, n_new, sample)
    fed = idx[:, :-1]  # (B, T-1)
    ratios = time_ratios(model, idx[:1], n_prompt, settings)
    by_passes = {}
    for k in tqdm(settings.passes, "passes", leave=False, disable=None):
        rebuilt = model.reconstruct(fed, n_prompt, k)
        by_passes[k] = compare(model, rebuilt, exact, n_prompt)
        by_passes[k]["time"] = ratios[k]
    _, exact_h = exact
    control = compare(model, pass_from_states(model, fed, n_prompt, exact_h), exact, n_prompt)
    return {"passes": by_passes, "control": control}


# --------------------------------------------------------------------------------------------------


def plot(figure, results: dict[str, dict], n_prompt: int) -> None:
    """Errors by passes, in each dtype; below, in float32, by layer and by position."""
    figure.set_size_inches(7, 7.6)
    layout = [["passes", "passes"], ["layer", "position"]]
    panels = figure.subplot_mosaic(layout, height_ratios=[1, 1.1])
    styles = {"keys": "-", "values": "--"}
    for color, (dtype, result) in enumerate(results.items()):
        ks = list(result["passes"])
        for name, style in styles.items():
            errors = [row[name] for row in result["passes"].values()]
            label = f"{name}, {dtype}"
            panels["passes"].plot(ks, errors, f"o{style}", color=f"C{color}", ms=4, label=label)
        control = result["control"]["keys"]
        label = f"keys, recorded states, {dtype}"
        panels["passes"].axhline(control, color=f"C{color}", ls=":", label=label)
    for color, (k, row) in enumerate(results["float32"]["passes"].items()):
        for name, style in styles.items():
            by_layer = row[f"{name}_by_layer"]
            by_position = row[f"{name}_by_position"]
            layers = range(1, 1 + len(by_layer))
            positions = range(1 - n_prompt, 1 - n_prompt + len(by_position))
            label = f"k = {k}" if name == "keys" else None
            look = {"ls": style, "color": f"C{color}"}
            panels["layer"].plot(layers, by_layer, marker="o", ms=4, label=label, **look)
            panels["position"].plot(positions, by_position, **look)
    panels["passes"].set(
        xscale="log", xlabel="parallel passes k (1: plain prefill)", xticks=ks, xticklabels=ks
    )
    panels["passes"].minorticks_off()
    panels["layer"].set(xlabel="layer", xticks=layers, title="by layer, float32")
    panels["position"].set(
        xlabel="token of the response", xlim=(1, None), title="by position, float32"
    )
    for panel in panels.values():
        panel.set(yscale="log", ylabel="relative l2 error")
    panels["passes"].legend(loc="lower left")
    handles, labels = panels["layer"].get_legend_handles_labels()
    title = "by layer and by position: keys solid, values dashed"
    figure.legend(handles, labels, title=title, loc="outside lower center", ncols=4)


def table_rows(results: dict[str, dict]) -> list[list]:
    rows = []
    for dtype, result in results.items():
        named = result["passes"] | {"recorded states": result["control"]}
        for name, row in named.items():
            percent = [100 * row[key] for key in ("keys", "values", "argmax")]
            rows.append([dtype, name, *percent, row["kl"], row.get("time", "")])
    return rows


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if len(paths) != 1:
        raise UserError("name one checkpoint, as in: python experiments/kv_replay.py out/demo")
    began, [(model, checkpoint, tokens)] = report.start(paths, settings)
    report.need_feedback(paths[0], checkpoint)
    n_prompt, n_new = prompt_and_response(settings, model.config.block_size)
    idx, _ = report.held_out(model, tokens, settings.n_windows)
    prompts = idx[:, :n_prompt]
    results = {}
    for dtype in ("float32", "bfloat16"):
        results[dtype] = rollout_errors(
            model.to(getattr(torch, dtype)), prompts, n_new, settings
        )
    print(
        f"{paths[0]}: {len(prompts)} Soft rollouts of {n_new} tokens after {n_prompt} tokens of "
        "prompt\n"
    )
    header = ["dtype", "passes", "error of keys, %", "of values, %", "same argmax, %", "KL, nats"]
    print(report.table([*header, "time / replay's"], table_rows(results)))
    numbers = {"checkpoint": paths[0], "rollouts": len(prompts), "n_prompt": n_prompt}
    numbers |= {"n_new": n_new} | results
    report.save(
        "kv_replay", settings, began, numbers, lambda figure: plot(figure, results, n_prompt)
    )
    return 0


if __name__ == "__main__":
    run(main)
