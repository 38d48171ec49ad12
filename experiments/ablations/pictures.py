"""The pictures of the sweeps: what `report.save` is given to draw."""

import numpy as np

from experiments.ablations.compare import MODES
from experiments.ablations.sweeps import EQUAL_ARM, PLAIN_ARM, Arm, Sweep
from experiments.report import LOSS, POINTS

COLORS = {"Standard": "C0", "Soft": "C1", "Fused": "C2"}
MARKERS = {"Standard": "o", "Soft": "s", "Fused": "^"}
LINEAR = 0.1  # nats: larger differences are drawn by their logarithm where both sizes occur
WIDEST = 0.45  # nats above the best point that a picture of losses shows; a diverging arm leaves it


def label(arm: Arm) -> str:
    """An arm's name in tables and pictures."""
    series, x = arm
    x = f"{x:g}" if isinstance(x, float) else str(x)
    return f"{series}, {x}" if series else x


def draw(figure, sweep: Sweep, results: dict[Arm, dict]) -> None:
    """A sweep's picture."""
    if sweep.picture == "frontier":
        draw_frontier(figure, results)
    elif sweep.picture == "lines":
        draw_lines(figure, sweep, results)
    else:
        draw_dots(figure, results)


def draw_dots(figure, results: dict[Arm, dict]) -> None:
    """Above, a point per arm and mode: its difference to plain, equal parameters. Below, passes.

    The bars are the paired differences' 95% intervals.
    """
    n_arms = len(results)
    figure.set_size_inches(7, 4.4 + 0.3 * n_arms)
    series = list(dict.fromkeys(arm[0] for arm, result in results.items() if is_fed(result)))
    grid = figure.add_gridspec(2, max(1, len(series)), height_ratios=[1.0 + 0.3 * n_arms, 3.0])
    dots = figure.add_subplot(grid[0, :])
    panels = {}
    for column, name in enumerate(series or [""]):
        first = next(iter(panels.values()), None)
        panels[name] = figure.add_subplot(grid[1, column], sharey=first)
        panels[name].tick_params(labelleft=first is None)
    for number, (arm, result) in enumerate(results.items()):
        plain = not is_fed(result)
        for place, name in enumerate(MODES):
            numbers = result["to plain, equal parameters"].get(name)
            if arm[1] == EQUAL_ARM[1]:  # a baseline: nothing but itself to compare it with
                numbers = {"mean": 0.0, "interval": None}
            if numbers is None or (plain and name != "Standard"):
                continue
            height = number + 0.22 * (place - 1) * (not plain)
            dots.errorbar(
                numbers["mean"],
                height,
                xerr=numbers["interval"],
                fmt=MARKERS[name],
                color="black" if plain else COLORS[name],
                linestyle="none",
                capsize=2,
                markersize=5,
                elinewidth=1,
                label=label_once(dots, "plain" if plain else name),
            )
    dots.axvline(0, color="black", linestyle="--", linewidth=1)
    dots.set_yticks(range(n_arms), [label(arm) for arm in results])
    dots.set_ylim(n_arms - 0.5, -0.5)
    dots.grid(axis="y", linewidth=0.3)
    dots.set_xlabel("minus plain, equal parameters (nats per token)")
    dots.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)
    draw_passes(panels, results)


def is_fed(result: dict) -> bool:
    """Whether an arm trains feedback; a plain one has a single loss."""
    return len(result["losses"]) > 1


def label_once(axes, name: str) -> str | None:
    """The name where the legend does not have it yet."""
    _, names = axes.get_legend_handles_labels()
    return None if name in names else name


def draw_passes(panels: dict, results: dict[Arm, dict]) -> None:
    """The loss after 0, 1, 2, ... feedback passes: a panel per series, a colour per x."""
    names = list(dict.fromkeys(arm[1] for arm, result in results.items() if is_fed(result)))
    low = min(min(result["losses"]) for result in results.values())
    shown = {}
    for series, axes in panels.items():
        for arm, result in results.items():
            if arm[0] == series and is_fed(result):
                color = f"C{names.index(arm[1]) % 10}"
                line = axes.plot(result["losses"], color=color, linewidth=1.3)[0]
                shown[label(("", arm[1]))] = line
        for arm, style in ((PLAIN_ARM, ":"), (EQUAL_ARM, "--")):
            own = series, arm[1]  # a series of equal computation has plain models of its own
            plain = results.get(own, results.get(arm))
            if plain is not None:
                level = plain["losses"][0]
                line = axes.axhline(level, color="black", linestyle=style, linewidth=1)
                shown[label(arm)] = line
        longest = max(len(result["losses"]) for result in results.values()) - 1
        axes.set_xscale("symlog", linthresh=1, linscale=0.4)
        axes.set_xlim(0, max(longest, 1))
        ticks = [k for k in (0, 1, 2, 4, 8, 32, 100) if k <= longest]
        axes.set_xticks(ticks, [str(k) for k in ticks])
        axes.minorticks_off()
        axes.set_xlabel("feedback passes")
        axes.set_title(series, fontsize=POINTS)
    first = next(iter(panels.values()))
    first.set_ylim(low - 0.02, min(first.get_ylim()[1], low + WIDEST))
    first.set_ylabel(LOSS)
    first.figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3)


def draw_frontier(figure, results: dict[Arm, dict]) -> None:
    """Standard against Soft, a point per lambda and a line per kind; lambda grows to the right."""
    axes = figure.subplots()
    feedback = [arm for arm, result in results.items() if is_fed(result)]
    for number, kind in enumerate(dict.fromkeys(series for series, _ in feedback)):
        arms = sorted(arm for arm in feedback if arm[0] == kind)
        standard = [results[arm]["means"]["Standard"] for arm in arms]
        for mode, style in (("Soft", "-"), ("Fused", ":")):
            ours = [results[arm]["means"][mode] for arm in arms]
            axes.plot(standard, ours, marker=MARKERS[mode], linestyle=style, color=f"C{number}",
                      linewidth=1.2, label=f"{kind}: {mode}")
            if mode == "Soft":
                for arm, x, y in zip(arms, standard, ours, strict=True):
                    axes.annotate(f"{arm[1]:g}", (x, y), xytext=(4, 5), textcoords="offset points")
    for arm, marker in ((PLAIN_ARM, "x"), (EQUAL_ARM, "*")):
        if arm in results:
            level = results[arm]["means"]["Standard"]
            axes.plot([level], [level], marker, color="black", markersize=9, linestyle="none",
                      label=label(arm))
    if EQUAL_ARM in results:
        level = results[EQUAL_ARM]["means"]["Standard"]
        axes.axhline(level, color="black", linestyle="--", linewidth=0.8)
        axes.axvline(level, color="black", linestyle="--", linewidth=0.8)
    axes.set_xlabel(f"Standard: {LOSS}")
    axes.set_ylabel(f"Soft and Fused: {LOSS}")
    axes.set_title("The numbers are lambda; left and low is better")
    axes.legend()


def draw_lines(figure, sweep: Sweep, results: dict[Arm, dict]) -> None:
    """The loss as decoded, and its difference to plain, equal parameters: a line per series.

    The values of x stand at equal distances. Differences are linear up to LINEAR nats, so that
    small ones can be read beside large ones.
    """
    figure.set_size_inches(7, 6.4)
    losses, differences = figure.subplots(2, 1, sharex=True)
    ticks = list(dict.fromkeys(x for _, x in results))
    for number, series in enumerate(dict.fromkeys(series for series, _ in results)):
        arms = [arm for arm in results if arm[0] == series]
        feedback = is_fed(results[arms[0]])
        mode = "Soft" if feedback else "Standard"
        places = [ticks.index(arm[1]) for arm in arms]
        name = f"{series}: Soft" if feedback else series
        look = {"marker": MARKERS[mode], "color": f"C{number}", "linewidth": 1.2, "label": name}
        losses.plot(places, [results[arm]["means"][mode] for arm in arms], **look)
        paired = [results[arm]["to plain, equal parameters"].get(mode) for arm in arms]
        known = [(x, pair) for x, pair in zip(places, paired, strict=True) if pair is not None]
        means = [pair["mean"] for _, pair in known]
        bars = np.array([pair["interval"] for _, pair in known], float)  # NaN: no interval
        differences.errorbar([x for x, _ in known], means, bars, capsize=3, **look)
    differences.axhline(0, color="black", linestyle="--", linewidth=1)
    differences.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    differences.set_xlabel(sweep.x)
    losses.set_ylabel(LOSS)
    differences.set_ylabel("minus plain, equal parameters")
    differences.set_yscale("symlog", linthresh=LINEAR)
    differences.margins(y=0.1)
    low, high = differences.get_ylim()
    sizes = np.array([0.05, 0.1, 0.2, 0.5, 1.0])
    marks = [mark for mark in (*-sizes[::-1], 0.0, *sizes) if low <= mark <= high]
    differences.set_yticks(marks, [f"{mark:g}" for mark in marks])
    differences.minorticks_off()
    handles, names = losses.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2)
