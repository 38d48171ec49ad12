"""What `python -m experiments.ablations` runs, as data: to add a sweep, add an entry to SWEEPS."""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.configurator import UserError
from harness.data import load_meta, load_tokens, save_dataset

PRESETS = {"quick": ("ablation_quick.toml", 40_000), "laptop": ("ablation_laptop.toml", 200_000),
           "gpu": ("shakespeare_gpu.toml", 500_000)}  # the arms' common settings, and the tokens of data's "100%"
PLAIN = {"fusion": "none", "pass_mix": (1.0,)}
RATIOS = (0.0, 0.25, 0.5, 0.75)


def staged(ratio: float) -> dict:
    """Three passes after a share of single-pass steps, the warmup ratio."""
    return {"pass_mix": (ratio, 0.0, 1 - ratio)}


def equal_compute(settings: dict) -> dict:
    """The settings with as many steps as cost what three passes throughout cost."""
    passes = sum(k * share for k, share in enumerate(settings["pass_mix"], start=1))
    return settings | {"steps": 3 / passes}


@dataclass(frozen=True)
class Sweep:
    """Arms by (series, x): what they change in the preset, of both configs; `steps`, `data`: shares of its own."""

    x: str  # the label of the axis
    arms: dict[tuple[str, float | str], dict]
    by_x: bool = False  # compare a later series with the first one's arm at the same x

    def base(self, series: str, x: float | str) -> tuple[str, float | str]:
        """The arm that an arm is compared with: the first one, unless `by_x`."""
        first = next(iter(self.arms))
        return (first[0], x) if self.by_x and series != first[0] else first


SWEEPS = {
    "detach": Sweep("warmup ratio", {
        (name, ratio): staged(ratio) | {"detach": name == "detached"}
        for name in ("not detached", "detached") for ratio in RATIOS}, by_x=True),
    "warmup": Sweep("warmup ratio (1: a plain model)", {
        (name, ratio): equal(arm) for name, equal in (("equal steps", dict), ("equal computation", equal_compute))
        for ratio, arm in [*((ratio, staged(ratio)) for ratio in RATIOS), (1.0, PLAIN)]}),
    "interleave": Sweep("share of single-pass steps", {
        ("interleaved" if interleave else "staged", ratio): staged(ratio) | {"interleave": interleave}
        for interleave in (False, True) for ratio in (0.5, 0.75)}, by_x=True),
    "fusion": Sweep("fusion", {
        **{("", kind): staged(0) | {"fusion": kind} for kind in ("gated", "add", "concat")}, ("", "none"): PLAIN}),
    "jitter": Sweep("jitter", {("", str(sigma)): staged(0) | {"jitter": sigma} for sigma in (0.02, 0.0, 0.1)}),
    "passes": Sweep("passes of the steps", {
        ("", "3"): staged(0), ("", "1"): PLAIN, ("", "2"): {"pass_mix": (0.0, 1.0)},
        ("", "2 and 3 (22:3)"): {"pass_mix": (0.0, 0.88, 0.12)},
        ("", "1 to 5"): {"pass_mix": (0.2,) * 5, "interleave": True}}),
    "mixin": Sweep("share of steps with prefix mixin", {
        ("", share): staged(0) | {"prefix_mixin": share} for share in (0.0, 0.5, 1.0)}),
    "data": Sweep("training text (share of the preset's)", {
        (name, share): arm | {"data": share} for name, arm in (("plain", PLAIN), ("full-bandwidth", staged(0)))
        for share in (0.1, 0.3, 1.0, 2.0) if share <= 1 or arm is PLAIN}, by_x=True),
}


@functools.cache  # every seed asks for it
def first_tokens(data_dir: str, dataset: str, n_tokens: int, folder: Path) -> str:
    """Makes, under folder, a dataset of the first n_tokens of another's train split and all of its val -> its name."""
    source, name = Path(data_dir) / dataset, f"{dataset}_{n_tokens}"
    meta = load_meta(source)
    if n_tokens > meta["train_tokens"]:
        raise UserError(f"{source} has {meta['train_tokens']} tokens to train on, and {n_tokens} are asked for; "
                        "prepare a longer text, or leave out the sweep `data`")
    files = {"train.bin": load_tokens(source, "train", meta)[:n_tokens].tobytes(),
             "val.bin": load_tokens(source, "val", meta).tobytes()}
    meta |= {"train_tokens": n_tokens, "sha256": hashlib.sha256(f"{meta['sha256']} {n_tokens}".encode()).hexdigest()}
    try:
        save_dataset(folder / name, files | {"meta.json": json.dumps(meta).encode()})
    except OSError as error:
        raise UserError(f"cannot write {folder / name}: {error.strerror}") from None
    return name


def equivalents(results: dict, n_seeds: int) -> list[str]:
    """By full-bandwidth arm and metric: how many times its text the plain model needs for that loss.

    Each seed's loss is placed on the line through that seed's plain losses, over the logarithm of the text, of which
    those count that are better than all with less text. Adds "plain_needs", a factor a seed, None outside of the line.
    """
    plain = sorted((x, arm) for (series, x), arm in results.items() if series == "plain")
    lines = []
    for (series, x), arm in results.items():
        for name, numbers in arm["summary"].items() if series != "plain" else ():
            numbers["plain_needs"] = []
            for seed in range(n_seeds):
                line = []  # (loss, share) from more text to less
                for share, theirs in plain:
                    loss = theirs["runs"][seed]["pass 1"]
                    line = [(loss, share), *line] if not line or loss < line[0][0] else line
                losses, shares = np.array(line).T
                ours = arm["runs"][seed][name]
                within = losses[0] <= ours <= losses[-1]
                factor = float(np.exp(np.interp(ours, losses, np.log(shares)))) / x
                numbers["plain_needs"].append(factor if within else None)
            factors = " ".join("outside" if f is None else f"{f:.2f}" for f in numbers["plain_needs"])
            lines.append(f"{name} at {x:g}: a plain model needs this many times the text, by seed: {factors}")
    return lines
