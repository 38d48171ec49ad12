"""One run of many: what it is, and what is measured of it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.decoding_modes import likelihood
from experiments.fusion_spectrum import untrained
from experiments.prefill_passes import measure
from experiments.report import commit, held_out
from harness.checkpoint import load_model
from harness.configurator import build
from harness.data import load_meta, load_tokens
from harness.machine import pick_device
from model import GPT, GPTConfig
from train import TrainConfig

KEPT_COUNTERS = ("step", "tokens", "compute_tokens", "seconds", "finished")
SHARE_WINDOWS = 48  # the first of the windows: those that `state_share` looks at


@dataclass(frozen=True)
class Spec:
    """One run: its two configs, how it is measured, and when it ends."""

    train: TrainConfig
    model: GPTConfig
    n_windows: int  # of the validation split
    n_passes: int  # feedback passes to measure
    patience: int = 0  # evaluations without a new best of any pass that end it; 0: train to the end
    keep: bool = False  # the checkpoint, once the run is measured

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Spec":
        parts = json.loads(text)
        train = build(TrainConfig, parts.pop("train"))
        model = build(GPTConfig, parts.pop("model"))
        return Spec(train, model, **parts)

    @property
    def feedback(self) -> bool:
        """Whether the run trains feedback at all."""
        return self.model.fusion != "none" and sum(self.train.pass_mix[1:]) > 0

    def held_out(self, model: GPT) -> tuple[Tensor, Tensor]:
        """Tokens and next tokens (n_windows, T) that the model is measured on."""
        folder = Path(self.train.data_dir) / self.train.dataset
        tokens = load_tokens(folder, "val", load_meta(folder))
        return held_out(model, tokens, self.n_windows)


@torch.no_grad()
def state_share(model: GPT, idx: Tensor, targets: Tensor) -> dict[str, float]:
    """How much pass 2 lives on the states, on tokens and next tokens (N, T).

    "share": the part within a token of the variance of pass 2's fused inputs u: 0 where the states
    are ignored, and below 1 even where the tokens are, because a state predicts the next token.
    "mean_state": pass 2's loss, in nats per token, when every state is the mean state;
    "own_state": the same loss with the states as they are.
    """
    e = model.embed(idx)  # (N, T, D)
    h = model.stack(e)  # (N, T, D)
    u = model.next_inputs(h, e)[:, 1:].flatten(0, 1)  # (N (T - 1), D): the first is plain
    tokens = idx[:, 1:].flatten()  # (N (T - 1),)
    groups = F.one_hot(tokens).to(u)  # (N (T - 1), V)
    counts = groups.sum(0)[:, None].clamp(min=1)  # (V, 1)
    means = (groups.T @ u) / counts  # (V, D)
    within = (u - means[tokens]).square().sum()
    total = (u - u.mean(0)).square().sum()
    level = h.mean(dim=(0, 1)).expand_as(h)  # (N, T, D)
    mean_state = model.nll(model.next_pass(level, e), targets).mean()
    own_state = model.nll(model.next_pass(h, e), targets).mean()
    return {
        "share": (within / total).item(),
        "mean_state": mean_state.item(),
        "own_state": own_state.item(),
    }


def losses_by_position(
    model: GPT, idx: Tensor, targets: Tensor, feedback: bool
) -> dict[str, list[float]]:
    """Each mode's loss at the tokens after a prompt of half a window, (T / 2,) each.

    idx, targets: tokens and next tokens (N, T). The first loss is that of the first token whose
    own input the mode decides; the one before it, which decoding_modes counts as well, is read off
    the prompt. Standard alone without feedback.
    """
    half = model.config.block_size // 2
    modes = ("standard", "soft", "fused") if feedback else ("standard",)
    positions = {}
    for mode in modes:
        losses = likelihood(model, idx, targets, half, mode)  # (N, T - half + 1)
        positions[mode] = losses[:, 1:].mean(dim=0).tolist()
    return positions


def measure_run(spec: Spec, counters: dict) -> dict:
    """A trained run's numbers: by feedback passes, by mode, and how much the states are used.

    counters: what its training returned.
    """
    numbers = {name: counters[name] for name in KEPT_COUNTERS}
    numbers["commit"] = commit()
    model, _ = load_model(spec.train.out_dir, str(pick_device(spec.train.device)))
    idx, targets = spec.held_out(model)
    n_passes = spec.n_passes if spec.feedback else 0
    by_pass = measure(model, idx, targets, n_passes)
    numbers["losses"] = by_pass["losses"]
    numbers["changes"] = by_pass["changes"]
    numbers["by_position"] = losses_by_position(model, idx, targets, spec.feedback)
    for mode, losses in numbers["by_position"].items():
        numbers[mode] = sum(losses) / len(losses)
    if spec.feedback:
        few = slice(SHARE_WINDOWS)
        numbers |= state_share(model, idx[few], targets[few])
        if not spec.train.init_from:  # else it did not begin with random weights
            initial = untrained(model, spec.train.seed)
            numbers["untrained_share"] = state_share(initial, idx[few], targets[few])["share"]
    return numbers
