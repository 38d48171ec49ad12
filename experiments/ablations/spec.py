"""One run of many: what it is, and what is measured of it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from harness.checkpoint import load_model
from harness.configurator import build
from experiments.decoding_modes import likelihood
from experiments.prefill_passes import measure as measure_passes
from experiments.report import commit, held_out
from harness.machine import pick_device
from model import GPT, GPTConfig
from harness.data import load_meta, load_tokens
from train import INIT, TrainConfig, seed_torch


@dataclass(frozen=True)
class Spec:
    """One run: its two configs, and how it is measured."""

    train: TrainConfig
    model: GPTConfig
    n_windows: int  # of the validation split
    n_passes: int  # feedback passes to measure
    patience: int = 0  # evaluations without a new best of any pass after which to stop; 0: to the end

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> "Spec":
        parts = json.loads(text)
        return Spec(build(TrainConfig, parts.pop("train")), build(GPTConfig, parts.pop("model")), **parts)


@torch.no_grad()
def state_share(model: GPT, idx: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """How much pass 2 lives on the states, on tokens and next tokens (N, T).

    "share": of the variance of its fused inputs u, the part within a token, 0 where the states are ignored and 1 where
    the tokens are. "mean_state": its loss, in nats a token, when every state is the mean state.
    """
    e = model.embed(idx)
    h = model.stack(e)
    level = h.mean(dim=(0, 1)).expand_as(h)
    u, tokens = model.next_inputs(h, e)[:, 1:].flatten(0, 1), idx[:, 1:].flatten()  # without the first, which is plain
    groups = F.one_hot(tokens).to(u)  # (N (T - 1), V)
    means = (groups.T @ u) / groups.sum(0)[:, None].clamp(min=1)  # (V, D)
    share = (u - means[tokens]).square().sum() / (u - u.mean(0)).square().sum()
    logits = model.head(model.next_pass(level, e))
    return {"share": share.item(), "mean_state": F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()}


def measure(spec: Spec, counters: dict) -> dict:
    """A run's numbers: losses by feedback passes, of each mode after a prompt of half a window, and the state share.

    A run with patience is measured by its evaluations, the best of each pass, since its last weights are not its best.
    """
    kept = {name: counters[name] for name in ("step", "tokens", "compute_tokens", "seconds", "finished")}
    kept["commit"] = commit()
    if spec.patience:
        return kept | {"losses": counters["best_val_losses"]}
    model, _ = load_model(spec.train.out_dir, str(pick_device(spec.train.device)))
    folder = Path(spec.train.data_dir) / spec.train.dataset
    idx, targets = held_out(model, load_tokens(folder, "val", load_meta(folder)), spec.n_windows)
    feedback = spec.model.fusion != "none" and sum(spec.train.pass_mix[1:]) > 0
    losses, changes = measure_passes(model, idx, targets, spec.n_passes if feedback else 0)
    half = model.config.block_size // 2
    modes = {mode: likelihood(model, idx, targets, half, mode)[:, 1:].mean().item()  # the first is read off the prompt
             for mode in (("standard", "soft", "fused") if feedback else ("standard",))}
    more = {}
    if feedback:
        seed_torch(spec.train.seed, INIT)
        untrained = GPT(model.config).to(idx.device).eval()
        more = state_share(model, idx[:48], targets[:48])
        more["untrained_share"] = state_share(untrained, idx[:48], targets[:48])["share"]
    return kept | {"losses": losses, "changes": changes} | modes | more
