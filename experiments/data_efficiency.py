"""How much more text a plain model needs for the loss of a model with latent feedback.

    python -m experiments.data_efficiency                           three seeds, about 35 min each
    python -m experiments.data_efficiency --fusion=gated --lambda=4 --passes=5

Plain models are trained on the first N tokens of a text, for N at most a factor 1.25 apart, and two
recipes with feedback on some of these: the paper's (gated fusion, lambda 1, three passes) and the
best one found here (--fusion, --lambda, --passes). Every run trains with dropout, and at a constant
rate, a third of the preset's, until 5 evaluations brought no pass anything new, and each pass is
read at its best evaluation: pass 1, pass 2, and the fixed point, which is the loss after 8 feedback
passes. (So a run with feedback continues while any of its nine passes improves, a plain one while
its only one does, and the best of more evaluations is a little lower: this favours feedback
slightly.) The plain models are of equal parameters: their MLP is wider by what the gated fusion's
matrices have.

The factor. The plain models' losses, means over seeds, give a curve over log N: isotonic
regression (scikit-learn) makes it fall, and straight lines join its points. A recipe's mean loss
on N tokens is read off that curve: M tokens, a factor of M / N. Below 1 the recipe loses. The 95%
interval is Student's, of the logarithms of the factors that each seed has by itself, all arms read
at that seed. (A bootstrap over three seeds would give no more than their lowest and highest.) Where
a loss is beyond the curve's end the factor is a bound, `>` or `<`.

Runs go to out/data_efficiency/PRESET. Finished ones are not repeated, interrupted ones continue.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import functools
import hashlib
import importlib.util
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from experiments.ablations.arms import TrainingSettings, changed, gather, need_finished, preset
from experiments.ablations.compare import Runs
from experiments.ablations.runs import with_folder
from experiments.ablations.spec import Spec
from experiments.ablations.sweeps import EQUAL, KINDS, always
from experiments.report import LOSS, save, start, student, table
from harness.configurator import UserError, parse, require, run, setting
from harness.data import load_meta, load_tokens, save_dataset
from model import FusionKind

FACTOR = 1.25  # between neighbouring texts
N_PLAIN = 7  # texts of the plain models
RECIPES_AT = (1, 3)  # which of these texts, counted from 0, the recipes are trained on
FEWEST = {"quick": 4_000, "laptop": 20_000, "gpu": 200_000}  # tokens of the shortest text
LONGEST = 40  # times the preset's steps; patience ends a run long before
PATIENCE = 5  # evaluations without a new best of any pass
FIXED_POINT = 8  # feedback passes
LOSSES = {"pass 1": 0, "pass 2": 1, "fixed point": FIXED_POINT}  # name: feedback passes
PLAIN = "plain, equal parameters"
PAPER = {"fusion": "gated", "lam": 1.0} | always(3)


@dataclass(frozen=True)
class Settings(TrainingSettings):
    out_dir: str = setting("out/data_efficiency", "where the runs go", path=True)
    fusion: FusionKind = setting("residual", f"of the second recipe: {', '.join(KINDS)}")
    lam: float = setting(4.0, "lambda of the second recipe")
    passes: int = setting(3, "passes of the second recipe's steps, 2 or more")

    def __post_init__(self):
        super().__post_init__()
        require(self, "fusion", self.fusion in KINDS, f"one of {', '.join(KINDS)}")
        require(self, "lam", 0 <= self.lam < math.inf, "a number of at least 0")
        require(self, "passes", self.passes >= 2, "at least 2: a single pass is plain")


# Runs


def texts(settings: Settings) -> list[int]:
    """How many tokens each text has, from the shortest."""
    return [round(FEWEST[settings.preset] * FACTOR**step) for step in range(N_PLAIN)]


def recipes(settings: Settings) -> dict[str, dict]:
    """What the arms change in the preset."""
    second = {"fusion": settings.fusion, "lam": settings.lam} | always(settings.passes)
    name = f"{settings.fusion}, lambda {settings.lam:g}, {settings.passes} passes"
    return {PLAIN: EQUAL, "gated, lambda 1, 3 passes (the paper's)": PAPER, name: second}


@functools.cache  # every arm asks for it
def first_tokens(data_dir: str, dataset: str, n_tokens: int, folder: Path) -> str:
    """Makes, under folder, a dataset of another's first n_tokens -> its name.

    Its validation split is the other's. UserError where that has fewer tokens.
    """
    source = Path(data_dir) / dataset
    meta = load_meta(source)
    if n_tokens > meta["train_tokens"]:
        raise UserError(
            f"{source} has {meta['train_tokens']} tokens to train on, and {n_tokens} are asked "
            "for; prepare a longer text"
        )
    name = f"{dataset}_{n_tokens}"
    digest = hashlib.sha256(f"{meta['sha256']} {n_tokens}".encode()).hexdigest()
    meta |= {"train_tokens": n_tokens, "sha256": digest}
    files = {
        "train.bin": load_tokens(source, "train", meta)[:n_tokens].tobytes(),
        "val.bin": load_tokens(source, "val", meta).tobytes(),
        "meta.json": json.dumps(meta).encode(),
    }
    try:
        save_dataset(folder / name, files)
    except OSError as error:
        raise UserError(f"cannot write {folder / name}: {error.strerror}") from None
    return name


def spec_of(recipe: dict, n_tokens: int, seed: int, settings: Settings) -> Spec:
    """One run: a recipe, on the first n_tokens."""
    config, shape = preset(settings)
    folder = Path(settings.out_dir) / settings.preset
    data = folder / "data"
    dataset = first_tokens(settings.data_dir, config.dataset, n_tokens, data)
    base_config = replace(
        config,
        dataset=dataset,
        data_dir=str(data),
        seed=seed,
        max_iters=LONGEST * config.max_iters,
        # Nobody knows beforehand when a run ends, so its rate cannot fall towards the end.
        cooldown=0.0,
        learning_rate=config.learning_rate / 3,
        eval_interval=min(config.eval_interval, config.max_iters),
        eval_iters=math.ceil(settings.n_windows / config.batch_size),
        eval_passes=1 + FIXED_POINT,
    )
    # The text is read many times.
    base_shape = replace(shape, dropout=shape.dropout or 0.1)
    ours, our_shape = changed(base_config, base_shape, recipe)
    base = Spec(base_config, base_shape, settings.n_windows, FIXED_POINT, PATIENCE)
    spec = replace(base, train=ours, model=our_shape, keep=settings.keep)
    return with_folder(spec, replace(base, train=replace(base_config, seed=1)), folder)


def specs_of(settings: Settings) -> dict:
    """All runs: {(recipe, tokens): {seed: spec}}."""
    sizes = texts(settings)
    specs = {}
    for name, recipe in recipes(settings).items():
        ours = sizes if name == PLAIN else [sizes[place] for place in RECIPES_AT]
        for n_tokens in ours:
            by_seed = {}
            for seed in settings.all_seeds:
                by_seed[seed] = spec_of(recipe, n_tokens, seed, settings)
            specs[name, n_tokens] = by_seed
    return specs


# From losses to a factor


def falling(n_tokens: list[int], losses: list[float]) -> np.ndarray:
    """The plain curve: isotonic regression of the losses, which fall with more text, (points,)."""
    from sklearn.isotonic import IsotonicRegression

    return IsotonicRegression(increasing=False).fit_transform(np.log(n_tokens), losses)


def tokens_for(loss: float, n_tokens: list[int], curve: np.ndarray) -> tuple[float, str]:
    """The fewest tokens with which a falling curve (points,) reaches a loss.

    -> tokens, and "" or, where the loss is beyond the curve's end, the bound's sign.
    """
    if loss > curve[0]:
        return float(n_tokens[0]), "<"
    if loss < curve[-1]:
        return float(n_tokens[-1]), ">"
    after = int(np.argmax(curve <= loss))  # the first point that is as good
    if after == 0:
        return float(n_tokens[0]), ""
    high, low = curve[after - 1], curve[after]
    share = (high - loss) / (high - low)
    start = math.log(n_tokens[after - 1])
    end = math.log(n_tokens[after])
    return math.exp(start + share * (end - start)), ""


def loss_of(run: dict, name: str) -> float:
    """One of LOSSES; a plain model's only one stands for all."""
    return run["losses"][min(LOSSES[name], len(run["losses"]) - 1)]


def factor(
    plain: dict[int, Runs], n_tokens: int, ours: Runs, name: str, seeds: Iterable[int]
) -> tuple[float, str]:
    """How many times its text a plain model needs for a recipe's loss, by means over some seeds.

    -> the factor, and "" or a bound's sign. plain: its runs by number of tokens.
    """
    sizes = sorted(plain)
    means = []
    for size in sizes:
        means.append(np.mean([loss_of(plain[size][seed], "pass 1") for seed in seeds]))
    loss = float(np.mean([loss_of(ours[seed], name) for seed in seeds]))
    tokens, bound = tokens_for(loss, sizes, falling(sizes, means))
    return tokens / n_tokens, bound


def factor_numbers(plain: dict[int, Runs], n_tokens: int, ours: Runs, name: str) -> dict:
    """The factor, and its 95% interval over seeds, which needs at least two.

    "beyond": the share of seeds whose loss is beyond their curve, where a bound stands for them.
    plain, ours: of the same seeds.
    """
    seeds = list(ours)
    value, bound = factor(plain, n_tokens, ours, name, seeds)
    numbers = {"factor": value, "bound": bound, "seeds": seeds, "interval": None, "beyond": None}
    if len(seeds) > 1:
        alone = [factor(plain, n_tokens, ours, name, [seed]) for seed in seeds]
        half = student(math.log(found) for found, _ in alone)
        numbers["interval"] = [value * math.exp(-half), value * math.exp(half)]
        numbers["beyond"] = sum(1 for _, sign in alone if sign) / len(alone)
    return numbers


# Results


def of_common_seeds(found: dict) -> dict:
    """The runs of the seeds that every arm has, so that all numbers are of the same seeds.

    A line on stderr for the seeds that are left out. UserError where no seed is common to all.
    """
    seeds = set().union(*found.values())
    common = seeds.intersection(*found.values())
    if not common:
        raise UserError(
            "no seed is finished in every arm, so that they cannot be compared; "
            "leave out --train=false to train the rest"
        )
    if left_out := sorted(seeds - common):
        named = ", ".join(map(str, left_out))
        print(f"seeds left out, because some arm lacks them: {named}", file=sys.stderr)
    of_common = {}
    for arm, runs in found.items():
        of_common[arm] = {seed: run for seed, run in runs.items() if seed in common}
    return of_common


def results_of(found: dict, settings: Settings) -> list[dict]:
    """An arm's mean losses, cost, and factors, one dict per arm; of the seeds that all have."""
    found = of_common_seeds(found)
    plain = {size: runs for (name, size), runs in found.items() if name == PLAIN}
    arms = []
    for (name, size), runs in found.items():
        cost = float(np.mean([run["compute_tokens"] for run in runs.values()]))
        same_text = plain.get(size)
        if same_text:
            plain_cost = np.mean([run["compute_tokens"] for run in same_text.values()])
            relative = float(cost / plain_cost)
        else:
            relative = None
        means = {}
        for loss in LOSSES:
            means[loss] = float(np.mean([loss_of(run, loss) for run in runs.values()]))
        arm = {"recipe": name, "tokens": size, "seeds": sorted(runs), "means": means}
        arm |= {"steps": float(np.mean([run["step"] for run in runs.values()]))}
        arm |= {"compute_tokens": cost, "computation": relative, "factors": {}}
        if name != PLAIN and len(plain) > 1:
            for loss in LOSSES:
                arm["factors"][loss] = factor_numbers(plain, size, runs, loss)
        arm["runs"] = [
            {"seed": seed, "step": run["step"], "seconds": run["seconds"]}
            | {loss: loss_of(run, loss) for loss in LOSSES}
            for seed, run in runs.items()
        ]
        arms.append(arm)
    return arms


def cell(numbers: dict | None) -> str:
    """The table's cell of a factor."""
    if not numbers:
        return ""
    text = f"{numbers['bound']}{numbers['factor']:.2f}"
    if numbers["interval"] is not None and numbers["beyond"] < 1:
        low, high = numbers["interval"]
        text += f" ({low:.2f} to {high:.2f}"
        text += f", {numbers['beyond']:.0%} beyond the curve)" if numbers["beyond"] else ")"
    return text


def print_tables(arms: list[dict]) -> None:
    print("\nbest evaluations, mean over seeds, nats per token")
    print("computation: token-passes of the whole run, as a multiple of plain's on the same text")
    rows = []
    for arm in arms:
        relative = arm["computation"]
        cost = "" if relative is None else f"{relative:.2f}"
        row = [arm["recipe"], f"{arm['tokens']:,}", len(arm["seeds"]), f"{arm['steps']:,.0f}", cost]
        rows.append(row + [f"{arm['means'][name]:.3f}" for name in LOSSES])
    print(table(["recipe", "text", "seeds", "steps", "computation", *LOSSES], rows))
    print("\nhow many times its text a plain model of equal parameters needs for the same loss")
    rows = []
    for arm in arms:
        if arm["recipe"] != PLAIN:
            factors = [cell(arm["factors"].get(name)) for name in LOSSES]
            rows.append([arm["recipe"], f"{arm['tokens']:,}", *factors])
    print(table(["recipe", "text", *LOSSES], rows))
    print("95% interval over seeds; < and >: beyond the plain curve's end")


def draw(figure, arms: list[dict]) -> None:
    """The plain curve over the text, and the recipes at pass 2 and at the fixed point."""
    figure.set_size_inches(7, 4.4)
    axes = figure.subplots()
    plain = sorted((arm for arm in arms if arm["recipe"] == PLAIN), key=lambda arm: arm["tokens"])
    sizes = [arm["tokens"] for arm in plain]
    means = [arm["means"]["pass 1"] for arm in plain]
    for arm in plain:
        losses = [run["pass 1"] for run in arm["runs"]]
        axes.plot([arm["tokens"]] * len(losses), losses, ".", color="grey", markersize=4)
    if plain:
        axes.plot(sizes, falling(sizes, means), color="black", linewidth=1, label="isotonic curve")
        axes.plot(sizes, means, "o", color="black", markersize=5, label=PLAIN)
    others = list(dict.fromkeys(arm["recipe"] for arm in arms if arm["recipe"] != PLAIN))
    for number, recipe in enumerate(others):
        ours = [arm for arm in arms if arm["recipe"] == recipe]
        shift = 1 + 0.012 * (2 * number - 1)  # so that two recipes do not hide each other
        for name, marker in (("pass 2", "s"), ("fixed point", "^")):
            at = [arm["tokens"] * shift for arm in ours]
            losses = [arm["means"][name] for arm in ours]
            axes.plot(at, losses, marker, color=f"C{number}", markersize=6,
                      label=f"{recipe}: {name}")
            for place, arm in zip(at, ours, strict=True):
                seeds = [run[name] for run in arm["runs"]]
                axes.plot([place] * len(seeds), seeds, ".", color=f"C{number}", markersize=3)
    axes.set_xscale("log")
    ticks = sorted({arm["tokens"] for arm in arms})
    axes.set_xticks(ticks, [f"{tick / 1000:.3g}k" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("training text (tokens)")
    axes.set_ylabel(LOSS)
    axes.legend()


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="nothing")
    if words:
        raise UserError(f"unexpected {words[0]!r}; all settings are --name=value, see --help")
    if importlib.util.find_spec("sklearn") is None:
        raise UserError("the curve needs scikit-learn: python -m pip install scikit-learn")
    began, _ = start([], settings)
    found = gather(specs_of(settings), settings)
    need_finished(found, settings, "data_efficiency")
    arms = results_of(found, settings)
    print_tables(arms)
    missing = [f"{size:,}" for size in texts(settings) if (PLAIN, size) not in found]
    if missing:
        print(f"no finished plain run on {', '.join(missing)}: the curve is straight across them")
    save("data_efficiency", settings, began, {"arms": arms}, lambda figure: draw(figure, arms))
    return 0


if __name__ == "__main__":
    run(main)
