"""The paper's ablations in small, and ours: each arm beside plain models, several seeds.

    python -m experiments.ablations detach                            one sweep, several, or all
    python -m experiments.ablations all --preset=quick --seeds=1 --results_dir=out/quick
                                                                      to see that they run
    python -m experiments.ablations fusion --train=false              report what is finished
    python -m experiments.ablations fusion --published                train what is not published

SWEEP is one of detach, warmup, interleave, fusion, jitter, passes, mixin, lambda, depth, window, or
all.
Runs go to out/ablations/PRESET. Finished ones are not repeated, interrupted ones continue, and
sweeps share what they have in common. Each sweep prints two tables and writes ablations/SWEEP.json
and .png, and the numbers of each run to ablations/runs. With --published, runs that are in the
project's own results/ablations/runs are not trained: the same seeds and settings, on the same
tokens (pydocs differs by the version of Python), in the same precision.

Losses are in nats per token, on evenly spaced windows of the validation split; means over the
seeds.

The first table has levels:
- computation: token-passes (tokens x passes x steps) as a multiple of the plain model's;
- pass 1 is plain, pass 2 comes after one feedback pass;
- Standard, Soft, Fused: as decoded, over the second half of the windows after a prompt of the
  first. A plain model has one loss, which stands for all.
In `fusion` also: the share of the fused input's variance that is not the token's, for the trained
and for an untrained model (too low by about 2.5% of itself, because each symbol's mean is fitted to
the same 3,000 positions); the loss of pass 2 with the states as they are, and when every state is
the mean state, both on the first 48 windows; Soft minus the plain model at the start (the first 4
tokens whose own input Soft decides) and at the rest.

The second has paired differences: the arms of a seed see the same batches; arms of one shape begin
with the same weights (except the fusion's), and the plain model of equal parameters has others.
`pairs` says how many seeds both have, and Soft's difference from the control how many those two
have, where it is another number. "plain, equal parameters" is a plain model whose MLP is wider
by what the gated fusion's matrices have; it takes as many steps, or, for the arms of equal
computation in `warmup`, as many as cost the same. After ± stands Student's 95% interval, which
needs two seeds; it is of that difference alone, not corrected for how many stand side by side. A *
marks those that survive Holm's correction over their table. All seeds are measured on the same
windows, and the interval is for these: another 120 of them would move a difference by up to about
0.01 more.

In `depth`, models of 1, 2, 4 and 8 layers have equal parameters: n_embd shrinks as layers are
added, to the nearest multiple of 2 n_head, and n_hidden makes up for the rest. In `window`, an arm
is compared with the plain model of the same window.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import importlib.util
import time
from dataclasses import dataclass

from experiments.ablations.arms import TrainingSettings, gather, need_finished, spec_of
from experiments.ablations.compare import (
    BY_PASS,
    MODES,
    STATE,
    Runs,
    cell,
    computation,
    levels,
    losses_of,
    mark_survivors,
    paired,
)
from experiments.ablations.pictures import draw, label
from experiments.ablations.published import publish, take
from experiments.ablations.sweeps import SWEEPS, Arm, Sweep
from experiments.report import save, start, table, writing_results
from harness.configurator import UserError, parse, run, setting, suggestion

BASELINE = "to plain, equal parameters"
CONTROL = "to the control"
LOSSES = ("pass 1", "pass 2", "32 feedback passes", *MODES)  # the first table's columns
KEPT = ("step", "compute_tokens", "seconds", "finished", "commit", *STATE.values())  # of each run


@dataclass(frozen=True)
class Settings(TrainingSettings):
    published: bool = setting(False, "take runs from results/ablations/runs, if they are there")


def mean_of(runs: Runs, name: str) -> list[float]:
    """The mean over runs of one of their lists, e.g. of the losses by pass; [] without."""
    columns = zip(*(run[name] for run in runs.values() if name in run), strict=True)
    return [sum(column) / len(column) for column in columns]


def evaluate_arm(sweep: Sweep, arm: Arm, found: dict[Arm, Runs]) -> dict:
    """All numbers of one arm of a sweep, for its JSON."""
    ours = found[arm]
    baseline = sweep.baseline_of(arm)
    control = sweep.control_of(arm)
    against = {BASELINE: {}, CONTROL: {}}
    for name in (*BY_PASS, *MODES):
        if arm != baseline and baseline in found:
            against[BASELINE][name] = paired(ours, found[baseline], name)
        if control in found:
            against[CONTROL][name] = paired(ours, found[control], name)
    runs = []
    for seed, numbers in ours.items():
        kept = {key: numbers[key] for key in KEPT if key in numbers}
        runs.append({"seed": seed} | losses_of(numbers) | kept)
    return {
        "series": arm[0],
        "x": arm[1],
        "settings": sweep.arms[arm],
        "seeds": sorted(ours),
        "computation": computation(ours, found.get(sweep.unit_of(arm), {})),
        "means": levels(ours, found.get(baseline, {})),
        "baseline": baseline,
        "control": control,
        **against,
        "losses": mean_of(ours, "losses"),
        "changes": mean_of(ours, "changes"),
        "runs": runs,
    }


def level_rows(sweep: Sweep, results: dict[Arm, dict]) -> list[list]:
    """The first table's rows."""
    rows = []
    for arm, result in results.items():
        cost = result["computation"]
        row = [label(arm), len(result["seeds"]), "" if cost is None else f"{cost:.2f}"]
        for name in (*LOSSES, *sweep.extra):
            value = result["means"].get(name)
            row.append("" if value is None else f"{value:.3f}")
        rows.append(row)
    return rows


def shown_differences(result: dict) -> list[dict | None]:
    """The second table's differences in a row: to plain by mode, and Soft to the control."""
    shown = [result[BASELINE].get(name) for name in MODES]
    if len(result["losses"]) == 1:
        shown[1:] = [None, None]  # a plain model's only loss, once
    return [*shown, result[CONTROL].get("Soft")]


def report(name: str, found: dict[Arm, Runs], settings: Settings, began: float) -> None:
    """One sweep's two tables, its JSON and its picture."""
    sweep = SWEEPS[name]
    results = {arm: evaluate_arm(sweep, arm, found) for arm in found}
    all_shown = []
    for result in results.values():
        all_shown += shown_differences(result)
    n_tested = mark_survivors(all_shown)
    print(f"\n{name}: mean loss over seeds, nats per token")
    columns = [sweep.x, "seeds", "computation", *LOSSES, *sweep.extra]
    print(table(columns, level_rows(sweep, results)))
    rows = []
    for arm, result in results.items():
        differences = [cell(numbers) for numbers in shown_differences(result)]
        control = "" if result["control"] is None else label(tuple(result["control"]))
        pairs = [pair["seeds"] for pair in result[BASELINE].values() if pair is not None]
        n_pairs = max(pairs, default="")
        with_control = result[CONTROL].get("Soft")
        if with_control is not None and with_control["seeds"] != n_pairs:
            differences[-1] += f" ({with_control['seeds']} seeds)"
        rows.append([label(arm), n_pairs, *differences, control])
    header = [sweep.x, "pairs", *MODES, "Soft minus the control's", "control"]
    print(f"\n{name}: paired differences to plain, equal parameters; nats per token")
    print(table(header, rows))
    print(
        f"± is the 95% interval of each difference alone, not corrected for their number; "
        f"* survives Holm's correction over the {n_tested} tested here"
    )
    missing = [label(arm) for arm in sweep.arms if arm not in found]
    if missing:
        print(f"no finished run yet: {'; '.join(missing)}")
    numbers = {"arms": list(results.values()), "tested": n_tested, "missing": missing}
    save(f"ablations/{name}", settings, began, numbers, lambda figure: draw(figure, sweep, results))


def publish_runs(found: dict[Arm, Runs], specs: dict, settings: Settings) -> None:
    """Writes each run's numbers beside the report."""
    folder = Path(settings.results_dir)
    with writing_results(folder):
        for arm, runs in found.items():
            for seed, numbers in runs.items():
                publish(specs[arm][seed], numbers, folder)


def take_published(specs: dict) -> None:
    """Takes what is published of the runs in {arm: {seed: spec}}, and says how many that were."""
    runs = {}
    for by_seed in specs.values():
        for spec in by_seed.values():
            runs[spec.train.out_dir] = spec
    taken = take(list(runs.values()))
    print(f"{taken} of {len(runs)} runs are taken from results/ablations/runs", file=sys.stderr)


def specs_of(name: str, settings: Settings) -> dict:
    """All runs of a sweep: {arm: {seed: spec}}."""
    specs = {}
    for arm, changes in SWEEPS[name].arms.items():
        specs[arm] = {seed: spec_of(changes, seed, settings) for seed in settings.all_seeds}
    return specs


def sweeps_named(words: list[str]) -> list[str]:
    """The sweeps that the command line names, each once. UserError for none or an unknown one."""
    known = ", ".join(SWEEPS)
    for word in words:
        if word not in SWEEPS and word != "all":
            near = suggestion(word, [*SWEEPS, "all"])
            raise UserError(f"unknown sweep {word!r}{near}; there are {known}, and all")
    if not words:
        raise UserError(f"name a sweep: {known}, or all")
    return list(SWEEPS) if "all" in words else list(dict.fromkeys(words))


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="sweep")
    names = sweeps_named(words)
    if settings.seeds > 1 and importlib.util.find_spec("scipy") is None:
        raise UserError("the intervals need scipy: python -m pip install scipy, or --seeds=1")
    start([], settings)
    specs = {name: specs_of(name, settings) for name in names}
    failed = []
    for name in names:
        began = time.perf_counter()
        try:
            if settings.published:
                take_published(specs[name])
            found = gather(specs[name], settings)
            need_finished(found, settings, name)
        except UserError as error:
            failed.append(f"{name}: {error}")
            continue
        report(name, found, settings, began)
        publish_runs(found, specs[name], settings)
    if failed:
        raise UserError("; ".join(failed))
    return 0


if __name__ == "__main__":
    run(main)
