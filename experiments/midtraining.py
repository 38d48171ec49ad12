"""Latent feedback added to a plain model that is trained already: with a shock, and without.

    python -m experiments.midtraining                     three seeds, each about 20 min of a core
    python -m experiments.midtraining --preset=quick --seeds=1 --results_dir=out/quick

A plain model trains for twice the preset's steps without a cool-down, as in the paper, whose
mid-training starts from a checkpoint before its cool-down. From there each arm trains on for three
quarters of the preset's steps, the last quarter of them a cool-down:
- plain, continued: as many steps, and as much computation (three times the steps);
- each kind of fusion, newly initialised, three passes at every step (--lambda).
The kinds that begin with W_H = 0 (residual, gated_residual) are the plain model at their first
step, in every pass. The others replace its inputs with something it has never seen.

The arms of a seed start from the same weights and see the same batches, drawn anew for them, so
that differences are paired: from plain, continued, as decoded after a prompt of half a window. The
fusion's matrices are the only parameters that a plain model lacks. ± and * as in
experiments.ablations. The picture: validation loss of passes 1, 2 and 4 over the steps, means over
seeds.

Runs go to out/midtraining/PRESET. Finished ones are not repeated, interrupted ones continue.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import importlib.util
import math
from dataclasses import dataclass, replace

import numpy as np

from experiments.ablations.arms import (
    N_PASSES,
    TrainingSettings,
    changed,
    gather,
    need_finished,
    preset,
)
from experiments.ablations.compare import (
    MODES,
    Runs,
    cell,
    computation,
    levels,
    losses_of,
    mark_survivors,
    paired,
)
from experiments.ablations.runs import with_folder
from experiments.ablations.spec import Spec
from experiments.ablations.sweeps import KINDS, PLAIN, always, equal_compute
from experiments.report import LOSS, save, start, table
from harness.configurator import UserError, parse, require, run, setting
from harness.runlog import read_evaluations
from model import GPTConfig
from train import TrainConfig

PLAIN_ARM = "plain, continued"
COMPUTE_ARM = "plain, continued, equal computation"
BEFORE = 2.0  # times the preset's steps: the plain model that all start from
AFTER = 0.75  # times the preset's steps: what each arm adds
EVALUATIONS = 12  # of an arm, besides that of its start
NEW_BATCHES = 1000  # added to the plain model's seed for the arms that start from it
SHOWN = (1, 2, 4)  # passes in the picture
ABOVE = 0.1  # nats that the picture shows above the loss that all start from


@dataclass(frozen=True)
class Settings(TrainingSettings):
    out_dir: str = setting("out/midtraining", "where the runs go", path=True)
    lam: float = setting(1.0, "lambda of the arms with feedback")

    def __post_init__(self):
        super().__post_init__()
        require(self, "lam", 0 <= self.lam < math.inf, "a number of at least 0")


def arms(settings: Settings) -> dict[str, dict]:
    """What each arm changes in the preset."""
    changes = {PLAIN_ARM: PLAIN, COMPUTE_ARM: equal_compute(PLAIN)}
    for kind in KINDS:
        changes[kind] = {"fusion": kind, "lam": settings.lam} | always(3)
    return changes


def spec(config: TrainConfig, shape: GPTConfig, arm: dict, settings: Settings) -> Spec:
    """A run of this experiment, in its folder: config and shape with an arm's changes."""
    ours, our_shape = changed(config, shape, arm)
    made = Spec(ours, our_shape, settings.n_windows, N_PASSES)
    base_config = replace(config, init_from="", seed=1)
    base = Spec(base_config, shape, settings.n_windows, N_PASSES)
    return with_folder(made, base, Path(settings.out_dir) / settings.preset)


def base_spec(seed: int, settings: Settings) -> Spec:
    """The plain run before its cool-down; its checkpoint is kept, for the arms start from it."""
    config, shape = preset(settings)
    config = replace(
        config, seed=seed, max_iters=round(BEFORE * config.max_iters), cooldown=0.0
    )
    return replace(spec(config, shape, PLAIN, settings), keep=True)


def arm_spec(arm: dict, seed: int, settings: Settings) -> Spec:
    """An arm's run, which starts from its seed's plain run."""
    config, shape = preset(settings)
    steps = round(AFTER * config.max_iters)
    start_folder = base_spec(seed, settings).train.out_dir
    config = replace(
        config,
        init_from=start_folder,
        # A step's batch depends on the seed and the step alone, and the arms begin at step 0 again:
        # another seed, or they would read what their plain model has read.
        seed=seed + NEW_BATCHES,
        max_iters=steps,
        eval_interval=max(1, steps // EVALUATIONS),
        eval_iters=math.ceil(settings.n_windows / config.batch_size),
        eval_passes=max(SHOWN),
    )
    return replace(spec(config, shape, arm, settings), keep=settings.keep)


def curves(runs: Runs, specs: dict[int, Spec]) -> dict:
    """The validation losses by pass over an arm's steps, means over seeds.

    -> "steps" (E,), "losses" (E, passes) of E evaluations, the first before any step.
    """
    all_losses = []
    for seed in runs:
        entries = read_evaluations(Path(specs[seed].train.out_dir))
        steps = [entry["step"] for entry in entries]
        all_losses.append([entry["val_losses"] for entry in entries])
    return {"steps": steps, "losses": np.mean(all_losses, axis=0).tolist()}


def results_of(found: dict, specs: dict) -> dict[str, dict]:
    """By arm: means, paired differences to plain, continued, and curves."""
    baseline = found.get(PLAIN_ARM, {})
    results = {}
    for arm, runs in found.items():
        differences = {}
        for name in MODES:
            plain_twice = arm == COMPUTE_ARM and name != "Standard"
            if arm != PLAIN_ARM and not plain_twice:
                differences[name] = paired(runs, baseline, name)
        results[arm] = {
            "arm": arm,
            "seeds": sorted(runs),
            "computation": computation(runs, baseline),
            "means": levels(runs, baseline),
            "to plain, continued": differences,
            "curves": curves(runs, specs[arm]),
            "runs": [{"seed": seed} | losses_of(numbers) for seed, numbers in runs.items()],
        }
    return results


def print_table(results: dict[str, dict]) -> int:
    """Prints the table -> how many differences Holm's correction is over."""
    shown = []
    for result in results.values():
        shown += result["to plain, continued"].values()
    n_tested = mark_survivors(shown)
    columns = ("pass 1", "pass 2", "pass 4", *MODES)
    rows = []
    for arm, result in results.items():
        cost = result["computation"]
        row = [arm, len(result["seeds"]), "" if cost is None else f"{cost:.2f}"]
        row += [f"{loss:.3f}" for loss in result["curves"]["losses"][0][1:2]] or [""]
        row += [f"{result['means'][name]:.3f}" for name in columns]
        row += [cell(result["to plain, continued"].get(name)) for name in MODES]
        rows.append(row)
    differences = [f"{name} - plain" for name in MODES]
    header = ["arm", "seeds", "computation", "pass 2 at step 0", *columns, *differences]
    print("\nmean loss over seeds, nats per token; paired differences to plain, continued")
    print(table(header, rows))
    print(
        "± is the 95% interval of each difference alone, not corrected for their number; "
        f"* survives Holm's correction over the {n_tested} tested here"
    )
    return n_tested


def draw(figure, results: dict[str, dict]) -> None:
    """The validation losses of passes 1, 2 and 4 over the steps, a panel each."""
    figure.set_size_inches(7, 4.4)
    panels = figure.subplots(1, len(SHOWN), sharey=True)
    lowest = math.inf
    lengths = {arm: result["curves"]["steps"][-1] for arm, result in results.items()}
    steps = min(lengths.values())  # those of all arms but the one with three times as many
    for panel, k in zip(panels, SHOWN, strict=True):
        for number, (arm, result) in enumerate(results.items()):
            losses = [by_pass[min(k, len(by_pass)) - 1] for by_pass in result["curves"]["losses"]]
            lowest = min(lowest, *losses)
            if arm == COMPUTE_ARM:  # three times the steps: where it ends
                panel.axhline(losses[-1], color="black", linestyle=":", linewidth=1, label=arm)
            elif arm == PLAIN_ARM:
                panel.plot(result["curves"]["steps"], losses, color="black", linewidth=1.2,
                           label=arm)
            else:
                panel.plot(result["curves"]["steps"], losses, color=f"C{number - 2}",
                           linewidth=1.2, marker=".", markersize=4, label=arm)
        panel.set_title(f"pass {k}", fontsize=10)
        panel.set_xlim(0, steps)
        panel.set_xlabel("steps")
    if PLAIN_ARM in results:  # a shock may leave the picture
        before = results[PLAIN_ARM]["curves"]["losses"][0][0]
        panels[0].set_ylim(lowest - 0.02, before + ABOVE)
    panels[0].set_ylabel(f"validation {LOSS}")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="nothing")
    if words:
        raise UserError(f"unexpected {words[0]!r}; all settings are --name=value, see --help")
    if settings.seeds > 1 and importlib.util.find_spec("scipy") is None:
        raise UserError("the intervals need scipy: python -m pip install scipy, or --seeds=1")
    began, _ = start([], settings)
    base = {seed: base_spec(seed, settings) for seed in settings.all_seeds}
    gather({"the plain model": base}, settings)
    specs = {}
    for name, arm in arms(settings).items():
        specs[name] = {seed: arm_spec(arm, seed, settings) for seed in settings.all_seeds}
    found = gather(specs, settings)
    need_finished(found, settings, "midtraining")
    results = results_of(found, specs)
    n_tested = print_table(results)
    numbers = {"arms": list(results.values()), "tested": n_tested}
    save("midtraining", settings, began, numbers, lambda figure: draw(figure, results))
    return 0


if __name__ == "__main__":
    run(main)
