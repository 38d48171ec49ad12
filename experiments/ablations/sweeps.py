"""What `python -m experiments.ablations` runs, as data: to add a sweep, add an entry to SWEEPS."""

from dataclasses import dataclass
from typing import Literal, get_args

from model import FusionKind

# The settings that a preset's arms have in common: a file of config/.
PRESETS = {
    "quick": "ablation_quick.toml",
    "laptop": "ablation_laptop.toml",
    "gpu": "shakespeare_gpu.toml",
}
KINDS = tuple(kind for kind in get_args(FusionKind) if kind != "none")
RATIOS = (0.0, 0.25, 0.5, 0.75)
LAMBDAS = (0.3, 1.0, 4.0, 12.0)
DEPTHS = (1, 2, 4, 8)
WINDOWS = (1, 4, 16, 0)  # tokens that a layer attends to; 0: all

Arm = tuple[str, float | str]  # (series, x): how tables and pictures name an arm

# A plain model of the same shape, and one whose MLP is wider by what the gated fusion's matrices
# have (n_hidden, see shapes.equal_hidden). Both take one pass per step, as many steps, the same
# batches.
PLAIN = {"fusion": "none", "pass_mix": (1.0,)}
EQUAL = PLAIN | {"equal_parameters": True}
PLAIN_ARM: Arm = ("", "plain")
EQUAL_ARM: Arm = ("", "plain, equal parameters")
BASELINES = {PLAIN_ARM: PLAIN, EQUAL_ARM: EQUAL}


def staged(ratio: float) -> dict:
    """Three passes after a share of single-pass steps, the warmup ratio."""
    return {"pass_mix": (ratio, 0.0, 1 - ratio)}


def always(k: int) -> dict:
    """k passes at every step."""
    return {"pass_mix": (0.0,) * (k - 1) + (1.0,)}


def equal_compute(settings: dict) -> dict:
    """The settings with as many steps as cost what three passes throughout cost."""
    passes = sum(k * share for k, share in enumerate(settings["pass_mix"], start=1))
    return settings | {"steps": 3 / passes}


@dataclass(frozen=True)
class Sweep:
    """The arms of a sweep: what each changes in the preset, in either config.

    Three keys are not settings but are made into some: `steps` (a factor on max_iters),
    `equal_parameters` (n_hidden) and `layers` (n_layer, n_embd and n_hidden; shapes.equal_depth).
    """

    x: str  # what the second part of an arm's name is
    arms: dict[Arm, dict]
    control: Literal["series", "x"] = "series"  # what an arm is compared with besides plain
    picture: Literal["dots", "frontier", "lines"] = "dots"
    extra: tuple[str, ...] = ()  # more columns, of compare.levels

    def unit_of(self, arm: Arm) -> Arm:
        """The plain model of equal parameters and equal steps, whose computation is 1."""
        at_same_x = (EQUAL_ARM[1], arm[1])
        return at_same_x if at_same_x in self.arms else EQUAL_ARM

    def baseline_of(self, arm: Arm) -> Arm:
        """The plain model of equal parameters that an arm is compared with.

        It has equal steps, or equal computation in a series that has such a one.
        """
        in_series = (arm[0], EQUAL_ARM[1])
        return in_series if in_series in self.arms else self.unit_of(arm)

    def control_of(self, arm: Arm) -> Arm | None:
        """The other arm that an arm is compared with, None for plain ones and for itself.

        "series": the first arm of its series; "x": that of the first series at the same x.
        """
        feedback = [name for name in self.arms if self.arms[name].get("fusion") != "none"]
        if arm not in feedback:
            return None
        if self.control == "x":
            control = (feedback[0][0], arm[1])
        else:
            control = next(name for name in feedback if name[0] == arm[0])
        return control if control in feedback and control != arm else None


def detach_arms() -> dict[Arm, dict]:
    arms = {}
    for series in ("not detached", "detached"):
        for ratio in RATIOS:
            arms[series, ratio] = staged(ratio) | {"detach": series == "detached"}
    return arms


def warmup_arms() -> dict[Arm, dict]:
    arms = {}
    for ratio in RATIOS:
        arms["equal steps", ratio] = staged(ratio)
    for ratio in RATIOS:
        arms["equal computation", ratio] = equal_compute(staged(ratio))
    arms["equal computation", "plain"] = equal_compute(PLAIN)
    arms["equal computation", "plain, equal parameters"] = equal_compute(EQUAL)
    return arms


def interleave_arms() -> dict[Arm, dict]:
    arms = {}
    for series in ("staged", "interleaved"):
        for ratio in (0.5, 0.75):
            arms[series, ratio] = staged(ratio) | {"interleave": series == "interleaved"}
    return arms


def fusion_arms() -> dict[Arm, dict]:
    arms = {}
    for lam, k in ((1.0, 3), (4.0, 3), (4.0, 5)):
        for kind in KINDS:
            arms[f"lambda {lam:g}, {k} passes", kind] = always(k) | {"lam": lam, "fusion": kind}
    return arms


def lambda_arms() -> dict[Arm, dict]:
    arms = {}
    for kind in ("gated", "residual"):
        for lam in LAMBDAS:
            arms[kind, lam] = staged(0) | {"lam": lam, "fusion": kind}
    return arms


def depth_arms() -> dict[Arm, dict]:
    arms = {}
    for depth in DEPTHS:
        arms[PLAIN_ARM[1], depth] = PLAIN | {"layers": depth}
        arms[EQUAL_ARM[1], depth] = EQUAL | {"layers": depth}
        for kind in ("gated", "residual"):
            arms[kind, depth] = staged(0) | {"layers": depth, "fusion": kind}
    return arms


def window_arms() -> dict[Arm, dict]:
    arms = {}
    for window in WINDOWS:
        x = window or "all"
        arms[PLAIN_ARM[1], x] = PLAIN | {"window": window}
        arms[EQUAL_ARM[1], x] = EQUAL | {"window": window}
        for kind in ("gated", "residual"):
            arms[kind, x] = staged(0) | {"window": window, "fusion": kind}
    return arms


SWEEPS = {
    "detach": Sweep("warmup ratio", BASELINES | detach_arms(), control="x"),
    "warmup": Sweep("warmup ratio", BASELINES | warmup_arms()),
    "interleave": Sweep(
        "share of single-pass steps", BASELINES | interleave_arms(), control="x"
    ),
    "fusion": Sweep(
        "fusion",
        BASELINES | fusion_arms(),
        extra=(
            "pass 3",
            "pass 4",
            "share",
            "untrained share",
            "own state",
            "mean state",
            "start",
            "rest",
        ),
    ),
    "jitter": Sweep(
        "jitter",
        BASELINES | {("", f"{sigma}"): staged(0) | {"jitter": sigma} for sigma in (0.02, 0.0, 0.1)},
    ),
    "passes": Sweep(
        "passes of the steps",
        BASELINES
        | {
            ("", "3"): staged(0),
            ("", "2"): {"pass_mix": (0.0, 1.0)},
            ("", "2 and 3 (22:3)"): {"pass_mix": (0.0, 0.88, 0.12)},
            ("", "1 to 5"): {"pass_mix": (0.2,) * 5, "interleave": True},
            ("", "5"): always(5),
        },
    ),
    "mixin": Sweep(
        "share of steps with prefix mixin",
        BASELINES
        | {("", f"{share:g}"): staged(0) | {"prefix_mixin": share} for share in (0.0, 0.5, 1.0)},
        extra=("start", "rest"),
    ),
    "lambda": Sweep("lambda", BASELINES | lambda_arms(), control="x", picture="frontier"),
    "depth": Sweep("layers", depth_arms(), control="x", picture="lines"),
    "window": Sweep(
        "tokens that a layer attends to", window_arms(), control="x", picture="lines"
    ),
}
