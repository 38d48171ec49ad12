"""The paper's ablations in small: detach, schedule, fusion, jitter, passes, prefix mixin, and data efficiency.

    python -m experiments.ablations detach                                    one sweep, or several, or all
    python -m experiments.ablations all --preset=quick --seeds=1 --jobs=2     two runs at a time

Runs go to out/ablations/PRESET, finished ones are not repeated, interrupted ones go on, and sweeps share what they have
in common. The arms of a seed see the same batches and begin with the same weights (but the fusion's), so that their
differences are paired: mean over seeds, with Student's 95% interval, which needs at least two seeds.

SWEEP is one of detach, warmup, interleave, fusion, jitter, passes, mixin, data, or all. Each prints a table and writes
ablations/SWEEP.json and .png. Losses are in nats a token, on evenly spaced windows of the validation split: pass 1 is
plain, pass 2 comes after one feedback pass, "32 passes" after 32 of them. A model without feedback has one loss, which
stands for all three. In the sweep `data`, where runs last until 5 evaluations brought no pass anything new, each pass
is read at its best evaluation and "32 passes" means 8. Further columns, see spec.measure: in `mixin` each mode's loss
in the second half of the windows; in `fusion` the share of the fused input's variance that is not the token's, also
untrained, and the loss of pass 2 when every state is the mean state.
"""

import importlib.util
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from harness.configurator import UserError, parse, run, setting, suggestion
from experiments.report import Settings as Shared
from experiments.report import save, start, table
from experiments.ablations.runs import do_all, place
from experiments.ablations.spec import Spec
from experiments.ablations.sweeps import PRESETS, SWEEPS, Sweep, equivalents, first_tokens
from harness.machine import pick_device
from model import GPTConfig
from train import TrainConfig

CONFIG = Path(__file__).parents[2] / "config"
N_PASSES = 100
METRICS = {"pass 1": 0, "pass 2": 1, "32 passes": 32}  # name: feedback passes
EXTRA = {"mixin": ("standard", "soft", "fused"), "fusion": ("share", "untrained_share", "mean_state")}  # more columns
KEPT = ("step", "compute_tokens", "seconds", "finished", "commit", *EXTRA["mixin"], *EXTRA["fusion"])  # of each run
PATIENCE = 5  # evaluations without a new best, in the sweep `data`


@dataclass(frozen=True)
class Settings(Shared):
    n_windows: int = setting(120, "evenly spaced windows of the validation split")
    preset: Literal["quick", "laptop", "gpu"] = setting("laptop", "size and length: config/ablation_PRESET.toml; gpu: "
                                                                  "config/shakespeare_gpu.toml")
    seeds: int = setting(3, "runs of each arm, with seeds seed, seed + 1, ...")
    jobs: int = setting(2, "runs at a time, which share the cores")
    max_iters: int = setting(0, "training steps of a run; 0: the preset's")
    out_dir: str = setting("out/ablations", "where the runs go")

    def __post_init__(self):
        super().__post_init__()
        if self.seeds < 1 or self.jobs < 1 or self.max_iters < 0:
            raise ValueError(f"seeds={self.seeds} and jobs={self.jobs} must be at least 1, max_iters={self.max_iters} "
                             "positive, or 0 for the preset's")


def spec_of(arm: dict, seed: int, settings: Settings) -> Spec:
    """One run of an arm."""
    file, all_tokens = PRESETS[settings.preset]
    config, model_config, _ = parse([str(CONFIG / file)], TrainConfig, GPTConfig)
    folder, arm, patience = Path(settings.out_dir) / settings.preset, dict(arm), 0
    n_iters = settings.max_iters or config.max_iters
    config = replace(config, data_dir=settings.data_dir, device=settings.device, max_iters=n_iters)
    base = Spec(config, model_config, settings.n_windows, N_PASSES)
    changes = {"seed": seed, "max_iters": round(n_iters * arm.pop("steps", 1))}
    if "data" in arm:
        n_tokens, patience = round(all_tokens * arm.pop("data")), PATIENCE
        changes |= {"dataset": first_tokens(settings.data_dir, config.dataset, n_tokens, folder / "data"),
                    "data_dir": str(folder / "data"), "cooldown": 0.0, "learning_rate": config.learning_rate / 3,
                    "max_iters": 40 * n_iters, "dropout": model_config.dropout or 0.1, "eval_passes": 9,
                    "eval_iters": math.ceil(2 * settings.n_windows / config.batch_size)}
    changes |= arm
    ours = {name: value for name, value in changes.items() if name in TrainConfig.__dataclass_fields__}
    shape = {name: value for name, value in changes.items() if name not in ours}
    spec = Spec(replace(config, **ours), replace(model_config, **shape), settings.n_windows, N_PASSES, patience)
    return place(spec, base, folder)


def interval(values: np.ndarray) -> float | None:
    """Half of Student's 95% interval of the mean of values (N,), None for a single one."""
    from scipy.stats import t
    return float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def signed(numbers: dict) -> str:
    """The table's cell of a paired difference."""
    half = numbers["difference_interval"]
    return f"{numbers['difference']:+.3f}" + ("" if half is None else f" ± {half:.3f}")


def read(run: dict) -> list[float]:
    """A run's loss by each of METRICS; after as many passes as it has where these are fewer."""
    return [run["losses"][min(k, len(run["losses"]) - 1)] for k in METRICS.values()]


def summary(runs: list[dict], base: list[dict]) -> dict:
    """An arm's numbers: by metric the mean over seeds, and its paired difference to another arm with its interval."""
    losses, theirs = (np.array([read(run) for run in arm]) for arm in (runs, base))  # (seeds, metrics)
    difference = losses - theirs
    return {name: {"mean": losses[:, i].mean(), "interval": interval(losses[:, i]),
                   "difference": difference[:, i].mean(), "difference_interval": interval(difference[:, i])}
            for i, name in enumerate(METRICS)}


def extra(name: str, runs: list[dict]) -> float | str:
    """The mean of a further number of the runs, '' where they have none."""
    return float(np.mean([run[name] for run in runs])) if name in runs[0] else ""


def draw(figure, sweep: Sweep, results: dict) -> None:
    """Left the arms' losses with intervals; right the loss against feedback passes, a curve an arm."""
    figure.set_size_inches(11, 4.4)
    arms, passes = figure.subplots(1, 2)
    for number, series in enumerate(dict.fromkeys(series for series, _ in sweep.arms)):
        points = {x: results[series, x]["summary"] for s, x in sweep.arms if s == series}
        for color, name in enumerate(METRICS):
            mean, bar = (np.array([numbers[name][key] for numbers in points.values()], float)  # NaN: no interval
                         for key in ("mean", "interval"))
            arms.errorbar(list(points), mean, bar, fmt="osv^"[number], ls=("-", "--", ":")[number],
                          color=f"C{color}", capsize=3, ms=4, lw=1, label=f"{series}, {name}".removeprefix(", "))
    for (series, x), arm in results.items():
        if len(arm["losses"]) > 1:
            passes.plot(arm["losses"], lw=1.2, label=f"{series}, {x}".removeprefix(", "))
        else:
            shade = 0.2 + 0.6 * list(results).index((series, x)) / len(results)
            passes.axhline(arm["losses"][0], color=str(shade), ls="--", lw=1, label=f"{series}, {x}".removeprefix(", "))
    arms.set(xlabel=sweep.x, ylabel="validation loss (nats a token)", title="Mean over seeds (bar: 95%)")
    if sweep is SWEEPS["data"]:
        arms.set_xscale("log")
    passes.set(xlabel="feedback passes k", title="Loss after k passes")
    passes.set_xscale("symlog", linthresh=1)
    passes.set_xlim(0, max(len(arm["losses"]) for arm in results.values()) - 1)
    low = min(min(arm["losses"]) for arm in results.values())
    passes.set_ylim(low - 0.03, min(passes.get_ylim()[1], low + 0.7))  # a diverging arm may leave the picture
    for panel in (arms, passes):
        panel.legend(fontsize="x-small")


def report(name: str, runs: dict, settings: Settings, began: float) -> None:
    """One sweep's table, JSON and figure."""
    sweep, results, rows = SWEEPS[name], {}, []
    for (series, x), arm in sweep.arms.items():
        ours, base = runs[series, x], sweep.base(series, x)
        results[series, x] = {
            "series": series, sweep.x: x, "settings": arm, "base": base, "summary": summary(ours, runs[base]),
            **{part: extra(part, ours) for part in EXTRA["mixin"] + EXTRA["fusion"]},
            **{part: np.mean([run[part] for run in ours], axis=0).tolist() for part in ("losses", "changes")
               if part in ours[0]},  # by feedback pass
            "runs": [dict(zip(METRICS, read(run))) | {part: run[part] for part in KEPT if part in run} for run in ours]}
        numbers = results[series, x]["summary"].values()
        rows.append([f"{series} {x}".strip(), *(f"{part['mean']:.3f}" for part in numbers),
                     *(signed(part) if base != (series, x) else "" for part in numbers),
                     *(results[series, x][part] for part in EXTRA.get(name, ()))])
    by_x = ", of the second series to the first's at the same x" if sweep.by_x else ""
    print(f"\n{name}; seeds: {settings.seeds}; ± is the 95% interval of the paired difference to the first arm{by_x}")
    print(table([sweep.x, *METRICS, *(f"{metric} - base" for metric in METRICS), *EXTRA.get(name, ())], rows))
    if name == "data":
        print("\n".join(equivalents(results, settings.seeds)))
    save(f"ablations/{name}", settings, began, {"arms": list(results.values())},
         lambda figure: draw(figure, sweep, results))


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="sweep")
    for word in words:
        if word not in SWEEPS and word != "all":
            raise UserError(f"unknown sweep {word!r}{suggestion(word, SWEEPS)}; there are {', '.join(SWEEPS)}, and all")
    if not words:
        raise UserError(f"name a sweep: {', '.join(SWEEPS)}, or all")
    names = list(SWEEPS) if "all" in words else list(dict.fromkeys(words))
    if settings.seeds > 1 and importlib.util.find_spec("scipy") is None:
        raise UserError("the intervals need scipy: python -m pip install scipy, or --seeds=1")
    pick_device(settings.device)
    (began, _), failed = start([], settings), []
    seeds = range(settings.seed, settings.seed + settings.seeds)
    specs = {name: {arm: [spec_of(changes, seed, settings) for seed in seeds]
                    for arm, changes in SWEEPS[name].arms.items()} for name in names}
    for name, arms in specs.items():
        try:
            done = iter(do_all([spec for specs in zip(*arms.values()) for spec in specs], settings.jobs))
        except UserError as error:
            failed.append(f"{name}: {error}")
            continue
        by_seed = [dict(zip(arms, done)) for _ in seeds]
        report(name, {arm: [runs[arm] for runs in by_seed] for arm in arms}, settings, began)
    if failed:
        raise UserError("; ".join(failed))
    return 0


if __name__ == "__main__":
    run(main)
