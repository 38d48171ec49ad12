"""From the numbers of runs to an arm's means, and to paired differences with their intervals."""

import math

import numpy as np

from experiments.report import student

# How many feedback passes a loss is read after, and the modes as decoded. A plain model has one
# loss, which stands for all.
BY_PASS = {"pass 1": 0, "pass 2": 1, "pass 3": 2, "pass 4": 3, "32 feedback passes": 32}
MODES = {"Standard": "standard", "Soft": "soft", "Fused": "fused"}
STATE = {
    "share": "share",
    "untrained share": "untrained_share",
    "mean state": "mean_state",
    "own state": "own_state",
}
FIRST = 4  # tokens that count as the start: the first whose own input the mode decides
LEVEL = 0.05  # of Holm's correction over a table

Runs = dict[int, dict]  # an arm's finished runs, by seed


def losses_of(run: dict) -> dict[str, float]:
    """A run's losses by name, in nats per token."""
    losses = {}
    last = len(run["losses"]) - 1
    for name, k in BY_PASS.items():
        losses[name] = run["losses"][min(k, last)]
    for name, mode in MODES.items():
        losses[name] = run.get(mode, run["standard"])
    return losses


def difference(ours: list[float], theirs: list[float]) -> dict:
    """The mean of paired differences, with Student's 95% interval and p; None for a single pair."""
    pairs = np.subtract(ours, theirs)  # (seeds,)
    mean = float(pairs.mean())
    return {"mean": mean, "interval": student(pairs), "p": p_value(pairs), "seeds": len(pairs)}


def p_value(pairs: np.ndarray) -> float | None:
    """Student's two-sided p of a mean of 0, of differences (N,); None for a single one."""
    if len(pairs) < 2:
        return None
    if np.ptp(pairs) == 0:  # where the test divides by zero
        return 0.0 if pairs.any() else 1.0
    from scipy.stats import ttest_1samp  # here: with one seed, scipy is not needed

    return float(ttest_1samp(pairs, 0.0).pvalue)


def paired(ours: Runs, theirs: Runs, name: str) -> dict | None:
    """`difference` over the seeds that both arms have, of one of `losses_of`; None without any."""
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return None
    our_losses = [losses_of(ours[seed])[name] for seed in seeds]
    their_losses = [losses_of(theirs[seed])[name] for seed in seeds]
    return difference(our_losses, their_losses)


def holm(p_values: list[float], level: float = LEVEL) -> list[bool]:
    """Which of several hypotheses Holm's step-down procedure rejects, at one level for them all.

    S. Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).
    A p that is not a number, of losses that are none, counts as the largest.
    """
    rejected = [False] * len(p_values)
    places = range(len(p_values))
    order = sorted(places, key=lambda place: (math.isnan(p_values[place]), p_values[place]))
    for rank, place in enumerate(order):
        if not p_values[place] <= level / (len(p_values) - rank):
            break  # this one and all with a larger p stay
        rejected[place] = True
    return rejected


def mark_survivors(differences: list[dict | None]) -> int:
    """Adds "holm" to a table's differences -> how many were tested together."""
    there = [numbers for numbers in differences if numbers is not None]
    tested = [numbers for numbers in there if numbers["p"] is not None]
    survive = holm([numbers["p"] for numbers in tested])
    for numbers in there:
        numbers["holm"] = False
    for numbers, survives in zip(tested, survive, strict=True):
        numbers["holm"] = survives
    return len(tested)


def cell(numbers: dict | None) -> str:
    """The table's cell of a paired difference."""
    if numbers is None:
        return ""
    text = f"{numbers['mean']:+.3f}"
    if numbers["interval"] is not None:
        text += f" ± {numbers['interval']:.3f}"
    return text + ("*" if numbers["holm"] else "")


def start_penalty(ours: Runs, baseline: Runs) -> dict[str, float]:
    """Soft minus the baseline's Standard after a plain prompt: at its start, and at the rest.

    {} where the runs were not measured by position.
    """
    gaps = []
    for seed, run in ours.items():
        theirs = baseline.get(seed, {})
        if "soft" in run.get("by_position", {}) and "by_position" in theirs:
            soft = np.array(run["by_position"]["soft"])  # (T / 2,)
            gaps.append(soft - np.array(theirs["by_position"]["standard"]))
    if not gaps:
        return {}
    gap = np.mean(gaps, axis=0)  # (T / 2,)
    return {"start": float(gap[:FIRST].mean()), "rest": float(gap[FIRST:].mean())}


def computation(ours: Runs, baseline: Runs) -> float | None:
    """Token-passes (tokens x passes x steps) as a multiple of the plain model's; means of both.

    Where the number of passes is drawn, or a run ends by patience, seeds differ in theirs.
    """
    if not baseline:
        return None
    run = np.mean([numbers["compute_tokens"] for numbers in ours.values()])
    plain = np.mean([numbers["compute_tokens"] for numbers in baseline.values()])
    return float(run / plain)


def levels(ours: Runs, baseline: Runs) -> dict:
    """An arm's means over seeds: losses by name, how the states are used, Soft's start."""
    all_losses = [losses_of(run) for run in ours.values()]
    means = {}
    for name in all_losses[0]:
        means[name] = float(np.mean([losses[name] for losses in all_losses]))
    for name, key in STATE.items():
        if all(key in run for run in ours.values()):
            means[name] = float(np.mean([run[key] for run in ours.values()]))
    return means | start_penalty(ours, baseline)
