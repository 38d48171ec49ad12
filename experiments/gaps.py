"""Where training from scratch fails and staging does not: the shell game at mean gaps 4 to 24.

    python -m experiments.gaps                                  all arms, three seeds
    python -m experiments.gaps --gaps=4,12 --seeds=1 --jobs=1

The rarer the looks, the longer a state must already be right before a loss tells it so. Arms, with
the shape of config/cups.toml, all at equal computation (token-passes):
- plain: single-pass steps alone;
- gated, residual: three passes from the first step;
- gated, residual, staged: single-pass steps for the first 60% of the steps, three passes after
  them. The rate stays constant until the last quarter.

Each mean gap has a text of its own, of 20,000,000 characters. A run draws windows of it, 4.6
million characters in all at most, so that about nine tenths of what it reads is new to it. A run's
number is its accuracy after 1, 32 and 128 moves, decoded move by move in Soft (plain: in Standard),
as in state_tracking.py; chance is 1/5. The picture has every move: thick lines are means over
seeds.

Texts go to out_dir/data, runs to out_dir/NAME; finished ones are not repeated, interrupted ones
continue. A run that fails is named, and the table is of the others. Cost: a run reads 4.6 million
token-passes, and config/cups.toml takes 1.5 minutes of one idle core for 3.07 million; so about 2.3
minutes per run, of which there are 60, and 2.3 hours of one core, or half of that with two cores
and --jobs=2.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

import prepare
from corpora import cups
from experiments.report import ROOT, save, start, table, write
from experiments.report import Settings as Shared
from experiments.state_tracking import CHANCE, decoded, make_games
from harness.checkpoint import load_model, without_feedback
from harness.configurator import UserError, parse, require, run, setting
from harness.machine import pick_device

N_CHARS = 20_000_000  # of each text
AFTER = (1, 32, 128)  # moves after which accuracies are given
STAGED = 0.6  # share of the steps that take one pass, where feedback comes after


@dataclass(frozen=True)
class Settings(Shared):
    data_dir: str = setting("data", "not used: the texts are in out_dir", flag=False)
    n_windows: int = setting(500, "games to test with")
    gaps: tuple[int, ...] = setting((4, 8, 12, 24), "mean gaps of the texts")
    seeds: int = setting(3, "runs of each arm, with seeds seed, seed + 1, ...")
    passes: int = setting(4500, "passes over a batch that a run makes in all its steps")
    jobs: int = setting(2, "runs at a time, which share the cores")
    out_dir: str = setting("out/gaps", "where texts and runs go", path=True)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "gaps", tuple(sorted(set(self.gaps))))
        require(self, "gaps", min(self.gaps) >= 1, "at least 1 each")
        require(self, "seeds", self.seeds >= 1, "at least 1")
        require(self, "passes", self.passes >= 9, "at least 9")
        require(self, "jobs", self.jobs >= 1, "at least 1")


def arms(n_passes: int) -> dict[str, list[str]]:
    """The arms' settings: as many steps as cost n_passes passes over a batch."""
    plain = ["--fusion=none", "--pass_mix=1", f"--max_iters={n_passes}"]
    full = ["--pass_mix=0,0,1", f"--max_iters={round(n_passes / 3)}"]
    per_step = STAGED + 3 * (1 - STAGED)
    mix = f"--pass_mix={STAGED},0,{1 - STAGED:g}"
    staged = [mix, f"--max_iters={round(n_passes / per_step)}"]
    return {
        "plain": plain,
        "gated": ["--fusion=gated", *full],
        "gated, staged": ["--fusion=gated", *staged],
        "residual": ["--fusion=residual", *full],
        "residual, staged": ["--fusion=residual", *staged],
    }


@dataclass(frozen=True)
class Arm:
    """One run: an arm at one mean gap, with one seed."""

    name: str
    gap: int
    seed: int
    command: list[str]
    folder: Path


def all_arms(settings: Settings) -> list[Arm]:
    """Every run of the experiment, seed by seed."""
    out = Path(settings.out_dir)
    config = str(ROOT / "config/cups.toml")
    runs = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        for gap in settings.gaps:
            for name, changes in arms(settings.passes).items():
                words = name.replace(", ", "_")
                folder = out / f"{dataset(gap)}_{words}_{settings.passes}_{seed}"
                command = [sys.executable, str(ROOT / "train.py"), config, *changes]
                command += [f"--seed={seed}", f"--dataset={dataset(gap)}", f"--data_dir={out}/data"]
                command += [f"--out_dir={folder}", f"--device={settings.device}"]
                runs.append(Arm(name, gap, seed, command, folder))
    return runs


def dataset(gap: int) -> str:
    """The name of the text with this mean gap. A text of another length has another name."""
    return f"cups_{gap}_{N_CHARS}"


def make_text(gap: int, data_dir: Path) -> None:
    """Prepares data_dir/DATASET, unless it is there."""
    if (data_dir / dataset(gap) / "meta.json").exists():
        return
    file = data_dir / f"{dataset(gap)}.txt"
    try:
        write(file, cups.text(N_CHARS, mean_gap=gap))
    except OSError as error:
        raise UserError(f"--out_dir={data_dir.parent}: {error}; name another folder") from None
    prepare.main([f"--input={file}", f"--data_dir={data_dir}"])
    file.unlink()


def train_arm(arm: Arm) -> None:
    """Trains a run to its end, or from where it stopped. UserError with what it said last.

    A finished run is resumed too, which compares its settings and text, and ends at once.
    """
    arm.folder.mkdir(parents=True, exist_ok=True)
    resume = "--resume" if (arm.folder / "ckpt.pt").exists() else "--overwrite"
    output = arm.folder / "output.txt"
    if run_beside([*arm.command, resume], output):
        last = output.read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"{arm.folder}: {' '.join(last)}")


def problem_of(arm: Arm) -> str:
    """Trains a run to its end -> '', or what went wrong: the other runs do not wait for it."""
    try:
        train_arm(arm)
    except UserError as error:
        return str(error)
    return ""


def run_beside(command: list[str], output: Path) -> int:
    """Runs a command in a process of its own, what it says into a file -> its exit code."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with open(output, "w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False)
    return done.returncode


def measure(arm: Arm, settings: Settings) -> dict:
    """A run's accuracy by moves since the look, (max(AFTER),)."""
    model, checkpoint = load_model(arm.folder, str(pick_device(settings.device)))
    mode = "standard" if without_feedback(str(arm.folder), checkpoint) else "soft"
    games, truth = make_games(settings.n_windows, max(AFTER), 1, settings.seed)
    guesses = decoded(model, games.to(model.embedding.weight.device), 1, mode).cpu()
    accuracy = (guesses == truth).double().mean(0)  # (max(AFTER),)
    return {
        "arm": arm.name,
        "gap": arm.gap,
        "seed": arm.seed,
        "mode": mode,
        "compute_tokens": checkpoint["compute_tokens"],
        "accuracy": accuracy.tolist(),
    }


def accuracies_of(results: list[dict], arm: str, gap: int) -> np.ndarray:
    """The accuracies (seeds, max(AFTER)) of an arm's runs at one mean gap, by moves."""
    chosen = [run["accuracy"] for run in results if (run["arm"], run["gap"]) == (arm, gap)]
    return np.array(chosen).reshape(len(chosen), max(AFTER))


def rows_of(results: list[dict], names: list[str], gaps: tuple[int, ...]) -> list[list]:
    """The table: mean over seeds, and lowest to highest of several; only arms that have runs."""
    rows = []
    for gap in gaps:
        for name in names:
            accuracies = accuracies_of(results, name, gap)
            if not len(accuracies):
                continue
            cells = []
            for moves in AFTER:
                values = accuracies[:, moves - 1]
                cell = f"{values.mean():.2f}"
                if len(values) > 1:
                    cell += f" ({values.min():.2f} to {values.max():.2f})"
                cells.append(cell)
            rows.append([gap, name, len(accuracies), *cells])
    return rows


def draw(figure, results: list[dict], names: list[str], gaps: tuple[int, ...]) -> None:
    """Accuracy against the moves since the look: a panel per mean gap, a colour per arm.

    Thick lines are means over seeds, thin ones the seeds.
    """
    figure.set_size_inches(7, 1.6 + 2.4 * len(gaps))
    panels = figure.subplots(len(gaps), 1, sharex=True, squeeze=False)[:, 0]
    moves = range(1, max(AFTER) + 1)
    for panel, gap in zip(panels, gaps, strict=True):
        for number, name in enumerate(names):
            accuracies = accuracies_of(results, name, gap)
            if not len(accuracies):
                continue
            color = "black" if name == "plain" else f"C{number - 1}"
            style = "-" if "staged" in name or name == "plain" else "--"
            panel.plot(moves, accuracies.mean(0), style, lw=1.8, color=color, label=name)
            if len(accuracies) > 1:
                panel.plot(moves, accuracies.T, style, lw=0.5, color=color)
        panel.axhline(CHANCE, color="gray", lw=1, label="chance")
        panel.set(ylabel="accuracy", ylim=(0, 1.04), title=f"mean gap {gap} in training")
    panels[-1].set_xscale("log", base=2)
    ticks = [2**n for n in range(8)]
    panels[-1].set_xticks(ticks, [str(tick) for tick in ticks])
    panels[-1].set(xlabel="moves since the look")
    lines = {}
    for panel in panels:
        for line, name in zip(*panel.get_legend_handles_labels(), strict=True):
            lines.setdefault(name, line)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)


def main(argv: list[str]) -> int:
    settings, words = parse(argv, Settings, doc=__doc__, positional="nothing")
    if words:
        raise UserError(f"this experiment trains its own runs and takes flags alone, got {words}")
    began, _ = start([], settings)
    todo = all_arms(settings)
    for gap in settings.gaps:
        make_text(gap, Path(settings.out_dir) / "data")
    with ThreadPoolExecutor(settings.jobs) as pool:
        outcomes = pool.map(problem_of, todo)
        problems = list(tqdm(outcomes, total=len(todo), unit="run", disable=None))
    done = [arm for arm, problem in zip(todo, problems, strict=True) if not problem]
    failures = [problem for problem in problems if problem]
    if not done:
        raise UserError(failures[0])
    results = [measure(arm, settings) for arm in tqdm(done, "games", leave=False, disable=None)]
    names = list(arms(settings.passes))
    header = ["mean gap", "arm", "seeds", *(f"after {moves} moves" for moves in AFTER)]
    print(table(header, rows_of(results, names, settings.gaps)))
    numbers = {"chance": CHANCE, "after": AFTER, "runs": results, "failures": failures}
    save(
        "gaps",
        settings,
        began,
        numbers,
        lambda figure: draw(figure, results, names, settings.gaps),
    )
    for failure in failures:
        print(f"a run failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
