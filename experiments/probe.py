"""What the states hold: linear probes of a prompt's last colon, and the model's own answers.

    python experiments/probe.py out/tasks_1 out/tasks_2 out/tasks_3 out/tasks_plain_1 ...

The paper: at depth 0 a standard prefill leaves a probe at chance, and one recurrent step makes the
state decodable there. The three families of prompts and their counts, the depths, the prefills
`standard`, `last 1`, `last 2`, `last 4` and `recurrent`, and four folds, none of which splits a
group, are the paper's. This project's choices are the wording of the prompts (corpora/tasks.py), a
model of two layers trained on them alone, the folds by numerals of `completion`, the prefills
`fused` and `fused 3`, the model's own answers, and several trainings.

Prompts: `completion` and `memory` behind 0, 8, 32 or 128 distractors; `registers` of 1, 2, 4 or 8
with 16 assignments in all; `writes`: 8 registers with 2 (the same examples again), 4 or 8
assignments each.

Prefills: standard; recurrent over the last 1, 2 or 4 tokens, or over all but the first, one by one;
fused, by one or three feedback passes. A model that never trained feedback has the standard one
only.

Measured (chance is 0.5, because all groups are balanced):
- the accuracy of probes of the residual stream, from depth 0 (the first block's input, normed) to
  n_layer (the last block's output): L2-regularised logistic regression on features standardised
  within the training part. No numeral of a `completion` prompt that is tested occurs in training,
  so a probe cannot know its pair by heart. At depth 0 `last 1` and `fused` are the same: both fuse
  the plain state one position back. An untrained model's states hold something too: compare with a
  run of --max_iters=1;
- the accuracy of the model's own answer: the likelier of the two possible ones, and (in the JSON
  file) the likeliest of all characters. Soft decoding's first token is the standard prefill's.

Checkpoints whose settings differ in the seed alone are trainings of one series: its numbers are the
mean over them and, from two on, Student's 95% interval of this mean. A single training has the
standard error over the groups of a probe set instead, as if they were independent, which those of
`completion`, whose numerals return in other groups, are not; the figure draws 1.96 times this
error, so that all its bars are 95% intervals. A plain model of equal token-passes, as
config/tasks.toml trains it, is a series like any other.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from corpora import tasks
from experiments import report
from harness.checkpoint import without_feedback
from harness.configurator import UserError, parse, require, run, setting
from harness.tokenizer import CharTokenizer, make_tokenizer
from model import GPT

BATCH = 256  # prompts at a time
LAST = {"standard": 0, "last 1": 1, "last 2": 2, "last 4": 4, "recurrent": None}  # recurrent tokens
FUSED = {1: "fused", 3: "fused 3"}  # by feedback passes
ANSWERS = ("standard", "last 4", "recurrent", "fused", "fused 3")  # those in the table
BY_DEPTH = {"completion": 8, "memory": 8, "registers": 8}  # distractors or registers, in the figure
# The code on which a probe set's numbers depend: an edit there makes the kept ones invalid.
SOURCES = [report.ROOT / name for name in ("model.py", "corpora/tasks.py", "experiments/probe.py")]
UNITS = {
    "completion": "distractors",
    "memory": "distractors",
    "registers": "registers, 16 writes in all",
    "writes": "writes of each of 8 registers",
}


@dataclass(frozen=True)
class Settings(report.Settings):
    seed: int = setting(0, "of the examples and the folds")
    n_windows: int = setting(1, "not used", flag=False)
    limit: int = setting(0, "groups of each probe set, for a quick run; 0: all of the 80 or 128")
    cache_dir: str = setting(
        "out/probe",
        "where each probe set's numbers are kept, so that an interrupted run continues",
        path=True,
    )

    def __post_init__(self):
        super().__post_init__()
        enough = self.limit == 0 or self.limit >= tasks.FOLDS
        require(self, "limit", enough, f"at least {tasks.FOLDS}, the folds, or 0 for all groups")


# --------------------------------------------------------------------------------------------------
# States and probes of one model


@contextlib.contextmanager
def residual_stream(model: GPT) -> Iterator[list[Tensor]]:
    """Yields a list that each run of the stack fills: its last position at depths 0..n_layer.

    Each is (B, D).
    """
    depths = [torch.empty(0)] * (model.config.n_layer + 1)

    def keep_input(block, inputs):
        depths[0] = inputs[0][:, -1]

    def keep_output(depth, block, inputs, output):
        depths[depth] = output[:, -1]

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(model.blocks[0].register_forward_pre_hook(keep_input))
        for depth, block in enumerate(model.blocks, start=1):
            hooks.enter_context(block.register_forward_hook(partial(keep_output, depth)))
        yield depths


@torch.no_grad()
def prefills(model: GPT, idx: Tensor, feedback: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Prefill -> residual stream (B, n_layer + 1, D) and state (B, D) at the last of tokens (B, T).

    Recurrent tokens go through the cache one by one, as in Soft decoding. Without feedback: the
    standard prefill alone.
    """
    T = idx.size(1)
    found = {}
    with residual_stream(model) as depths:
        cache, plain = model.reconstruct(idx, n_plain=T, k=1)
        found["standard"] = torch.stack(depths, dim=1), plain[:, -1]
        if not feedback:
            return found
        for name, n_recurrent in LAST.items():
            if n_recurrent == 0:
                continue
            first = 1 if n_recurrent is None else T - n_recurrent
            cache.length = first  # up to there it is still plain, because n_recurrent ascends
            h = plain[:, first - 1 : first]  # (B, 1, D)
            for t in range(first, T):
                h = model.decode_step(idx[:, t : t + 1], h, cache, "soft")  # (B, 1, D)
            found[name] = torch.stack(depths, dim=1), h[:, 0]
        e = model.embed(idx)
        h = plain
        for feedback_passes in range(1, max(FUSED) + 1):
            h = model.next_pass(h, e)  # (B, T, D)
            if feedback_passes in FUSED:
                found[FUSED[feedback_passes]] = torch.stack(depths, dim=1), h[:, -1]
    return found


def probe(features: np.ndarray, answers: np.ndarray, in_fold: np.ndarray) -> np.ndarray:
    """Whether a probe that saw nothing of an example's fold predicts its answer.

    features (N, D), answers (N,), in_fold (N, FOLDS) bool: whose material an example holds.
    -> (n_tested,) bool, of those that hold one fold's alone, in their order.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    tested = in_fold.sum(axis=1) == 1  # (N,)
    correct = np.zeros(len(answers), dtype=bool)  # (N,)
    for fold in range(in_fold.shape[1]):
        learns = ~in_fold[:, fold]
        asked = in_fold[:, fold] & tested
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        classifier.fit(features[learns], answers[learns])
        correct[asked] = classifier.predict(features[asked]) == answers[asked]
    return correct[tested]


def fold_table(examples: list[tasks.Example]) -> np.ndarray:
    """Whose material each example holds, (N, FOLDS) bool."""
    in_fold = np.zeros((len(examples), tasks.FOLDS), dtype=bool)
    for row, example in zip(in_fold, examples, strict=True):
        row[list(example.folds)] = True
    return in_fold


def accuracy(correct: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """Of correct (N,) in groups (N,), all equally large: the mean, and its error over groups."""
    names = np.unique(groups)
    means = np.array([correct[groups == name].mean() for name in names])
    error = means.std(ddof=1) / len(means) ** 0.5
    return {"accuracy": float(means.mean()), "error": float(error)}


@torch.no_grad()
def probe_set_numbers(
    model: GPT, tokenizer: CharTokenizer, examples: list[tasks.Example], feedback: bool
) -> dict:
    """The numbers of one probe set, by prefill."""
    rows = [tokenizer.encode(example.prompt) for example in examples]
    idx = torch.tensor(rows, device=model.embedding.weight.device)  # (N, T)
    answers = np.array([tokenizer.encode(example.answer)[0] for example in examples])  # (N,)
    groups = np.array([example.group for example in examples])  # (N,)
    in_fold = fold_table(examples)  # (N, FOLDS)
    tested_groups = groups[in_fold.sum(axis=1) == 1]  # (n_tested,)
    choices = np.unique(answers)  # (2,)
    batches = [prefills(model, part, feedback) for part in idx.split(BATCH)]
    by_prefill = {}
    for name in batches[0]:
        stream = torch.cat([batch[name][0] for batch in batches])  # (N, n_layer + 1, D)
        h = torch.cat([batch[name][1] for batch in batches])  # (N, D)
        features = stream.cpu().double().numpy()
        logits = model.head(h).cpu().numpy()  # (N, V)
        depths = []
        for depth in range(features.shape[1]):
            correct = probe(features[:, depth], answers, in_fold)
            depths.append(accuracy(correct, tested_groups))
        likelier = choices[logits[:, choices].argmax(axis=1)]
        by_prefill[name] = {
            "depths": depths,
            "answer": accuracy(likelier == answers, groups),
            "unrestricted": accuracy(logits.argmax(axis=1) == answers, groups),
        }
    return {
        "examples": len(examples),
        "tested": len(tested_groups),
        "groups": len(set(groups)),
        "length": idx.size(1),
        "prefills": by_prefill,
    }


# --------------------------------------------------------------------------------------------------
# Series: trainings that differ in their seed


def collect_series(paths: list[str], checkpoints: list[dict]) -> dict[str, list[str]]:
    """Series -> the paths of its trainings. UserError where a series has a seed twice."""
    grouped = report.groups(report.labels(paths), checkpoints)
    return {name: [paths[place] for place in places] for name, places in grouped.items()}


def over_trainings(found: list[dict]) -> dict[str, float]:
    """One number of several trainings, {"accuracy", "error"} each -> its mean, and what ± is.

    "interval" is half of Student's 95% interval of the mean, "error" the standard error over the
    groups of a single training.
    """
    if len(found) == 1:
        return dict(found[0])
    values = [one["accuracy"] for one in found]
    return {"accuracy": float(np.mean(values)), "interval": report.student(values)}


def summarise(trainings: list[dict]) -> dict:
    """A probe set's numbers of each training -> the same over all of them, and each by itself."""
    by_prefill = {}
    for prefill, first in trainings[0]["prefills"].items():
        found = [training["prefills"][prefill] for training in trainings]
        depths = []
        for depth in range(len(first["depths"])):
            depths.append(over_trainings([one["depths"][depth] for one in found]))
        by_prefill[prefill] = {
            "depths": depths,
            "answer": over_trainings([one["answer"] for one in found]),
            "unrestricted": over_trainings([one["unrestricted"] for one in found]),
        }
    return trainings[0] | {"prefills": by_prefill, "trainings": trainings}


def shown(number: dict[str, float] | None) -> str:
    """A cell of the table."""
    if number is None:
        return ""
    if "interval" in number:
        return f"{number['accuracy']:.3f} ± {number['interval']:.3f}"
    return f"{number['accuracy']:.3f}"


def table_row(by_prefill: dict[str, dict]) -> list[str]:
    """The cells of one probe set: depth 0 by prefill, the top of the standard one, and answers."""
    cells = []
    for prefill in LAST:
        found = by_prefill.get(prefill)
        cells.append(shown(found and found["depths"][0]))
    cells.append(shown(by_prefill["standard"]["depths"][-1]))
    for prefill in ANSWERS:
        found = by_prefill.get(prefill)
        cells.append(shown(found and found["answer"]))
    return cells


# --------------------------------------------------------------------------------------------------
# The figure


def plot(figure, results: dict[str, dict]) -> None:
    """A block of panels for each series with feedback; plain series are dashed in all of them."""
    plain = {}
    blocks = {}
    for name, result in results.items():
        (blocks if result["feedback"] else plain)[name] = result["sets"]
    if not blocks:  # plain models alone
        first = next(iter(plain))
        blocks[first] = plain.pop(first)
    figure.set_size_inches(7, 12.5 * len(blocks))
    parts = figure.subfigures(len(blocks), 1, squeeze=False)[:, 0]
    for part, (name, sets) in zip(parts, blocks.items(), strict=True):
        part.suptitle(name)
        plot_block(part, name, sets, plain)


def plot_block(figure, name: str, sets: dict, plain: dict[str, dict]) -> None:
    layout = [
        ["completion by depth", "completion"],
        ["memory by depth", "memory"],
        ["registers by depth", "registers"],
        ["legend", "writes"],
        ["answers", "answers"],
    ]
    panels = figure.subplot_mosaic(layout, height_ratios=[1, 1, 1, 1, 1.3])
    first_set = next(iter(sets["memory"].values()))
    curves = []  # (label, sets, prefill, style)
    for i, prefill in enumerate(first_set["prefills"]):
        curves.append((prefill, sets, prefill, {"color": f"C{i}", "marker": "o"}))
    for i, (label, plain_sets) in enumerate(plain.items()):
        style = {"color": "black", "marker": "sv^Dx"[i % 5], "ls": "--"}
        curves.append((f"{label}, standard", plain_sets, "standard", style))
    for task, n in BY_DEPTH.items():
        panel = panels[f"{task} by depth"]
        for _, of, prefill, style in curves:
            points = of[task][n]["prefills"][prefill]["depths"]
            errorbar(panel, range(len(points)), points, style)
        panel.set(title=f"{task}, {n} {UNITS[task].split(',')[0]}", xlabel="depth of the probe")
        panel.set_xticks(range(len(points)))
    for task, unit in UNITS.items():
        for _, of, prefill, style in curves:
            points = [numbers["prefills"][prefill]["depths"][0] for numbers in of[task].values()]
            errorbar(panels[task], [str(n) for n in of[task]], points, style)
        panels[task].set(title=f"{task}, depth 0", xlabel=unit)
    plot_answers(panels["answers"], curves)
    for axes_name, panel in panels.items():
        if axes_name != "legend":
            panel.axhline(0.5, color="gray", lw=0.8, ls=":")
            panel.set(ylim=(0.3, 1.03), ylabel="accuracy")
    panels["legend"].axis("off")
    handles, labels = panels["answers"].get_legend_handles_labels()
    panels["legend"].legend(handles, labels, loc="center")


def plot_answers(panel, curves: list[tuple]) -> None:
    """The model's own answers: probe sets are categories, so no line joins them."""
    for i, (label, of, prefill, style) in enumerate(curves):
        places = []
        points = []
        for task in UNITS:
            for numbers in of[task].values():
                places.append(len(places) + 0.8 * ((i + 0.5) / len(curves) - 0.5))
                points.append(numbers["prefills"][prefill]["answer"])
        errorbar(panel, places, points, style | {"ls": ""}, label=label)
    sets = curves[0][1]
    names = [f"{task} {n}" for task in UNITS for n in sets[task]]
    panel.set(title="the model's own answers", xlim=(-0.5, len(names) - 0.5))
    panel.set_xticks(range(len(names)), names, rotation=90)
    for border in range(1, len(names)):
        panel.axvline(border - 0.5, color="0.9", lw=0.8, zorder=0)


def errorbar(panel, x, points: list[dict[str, float]], style: dict, label: str = "") -> None:
    """Points with half of a 95% interval on each side.

    It is over trainings, or, for a single training, over groups: there 1.96 standard errors.
    """
    y = [point["accuracy"] for point in points]
    half = [point["interval"] if "interval" in point else 1.96 * point["error"] for point in points]
    panel.errorbar(x, y, half, **{"ms": 4, "lw": 1.2, "capsize": 2} | style, label=label or None)


# --------------------------------------------------------------------------------------------------


def check(path: str, model: GPT, checkpoint: dict, longest: int) -> None:
    """UserError for a checkpoint that cannot read the prompts."""
    known = checkpoint["tokenizer"].get("symbols", "")
    lacking = [symbol for symbol in tasks.SYMBOLS if symbol not in known]
    if lacking:
        raise UserError(
            f"{path}: its tokenizer lacks {lacking[-1]!r}, which the prompts need; train a model "
            "on them, as the first lines of config/tasks.toml say"
        )
    if model.config.block_size < longest:
        raise UserError(
            f"{path}: block_size={model.config.block_size}, but the longest prompt has {longest} "
            f"tokens; train with --block_size={longest} or more, e.g. config/tasks.toml"
        )


def probe_training(path: str, model: GPT, checkpoint: dict, sets: dict, settings: Settings) -> dict:
    """The numbers of one training: {(task, n): numbers}; each is kept on disk once it is there."""
    feedback = not without_feedback(path, checkpoint)
    tokenizer = make_tokenizer(checkpoint["tokenizer"])
    found = {}
    for (task, n), examples in tqdm(sets.items(), path, leave=False, disable=None):
        compute = partial(probe_set_numbers, model, tokenizer, examples, feedback)
        key = [task, n, settings.seed, settings.limit, feedback]
        found[task, n] = report.cached(settings.cache_dir, model, key, SOURCES, compute)
    return found


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError("name at least one checkpoint, e.g. python experiments/probe.py out/tasks")
    if importlib.util.find_spec("sklearn") is None:
        raise UserError("the probes need scikit-learn: python -m pip install scikit-learn")
    began, runs = report.start(paths, settings)
    sets = tasks.probe_sets(settings.seed, settings.limit or None)
    longest = max(len(examples[0].prompt) for examples in sets.values())
    loaded = dict(zip(paths, runs, strict=True))
    for path, (model, checkpoint, _) in loaded.items():
        check(path, model, checkpoint, longest)
    series = collect_series(paths, [checkpoint for _, checkpoint, _ in runs])
    results = {}
    rows = []
    for name, members in series.items():
        problem = without_feedback(members[0], loaded[members[0]][1])
        if problem:
            print(f"{name}, standard prefill only: {problem}")
        found = [probe_training(path, *loaded[path][:2], sets, settings) for path in members]
        by_task = {task: {} for task in UNITS}
        for task, n in sets:
            by_task[task][n] = summarise([training[task, n] for training in found])
            row = table_row(by_task[task][n]["prefills"])
            rows.append([name, len(members), task, n, *row])
        results[name] = {"checkpoints": members, "feedback": not problem, "sets": by_task}
    header = ["series", "trainings", "task", "n"]
    header += [f"depth 0, {prefill}" for prefill in LAST] + ["top, standard"]
    header += [f"answer, {prefill}" for prefill in ANSWERS]
    print(report.table(header, rows))
    numbers = {"series": results}
    report.save("probe", settings, began, numbers, lambda figure: plot(figure, results))
    return 0


if __name__ == "__main__":
    run(main)
