"""What the states hold: linear probes at every depth of a prompt's last colon, and the model's own answers.

    python -m experiments.probe out/tasks

The paper: at depth 0 a standard prefill leaves a probe at chance; one recurrent step makes the state decodable there.

Prompts, see tasks.py: `completion` and `memory` behind 0, 8, 32 or 128 distractors, `registers` of 1, 2, 4 or 8 with 16
assignments in all, and `writes`: 8 registers with 2 (the same examples again), 4 or 8 assignments each.
Prefills: standard; recurrent over the last 1, 2 or 4 tokens, or over all but the first, one by one; fused, one or three
passes after the plain one. A model that never trained feedback has the standard one only.

Measured, each with its standard error over the groups of a probe set (chance is 0.5: all groups are balanced):
- the accuracy of probes of the residual stream, from depth 0 (the first block's input, normed) to n_layer (the last
  block's output): L2-regularised logistic regression on features standardised within the fold, four-fold
  cross-validation with all of a group in one fold. At depth 0 `last 1` and `fused` are the same: both fuse the plain
  state one position back. An untrained model's states hold something too: compare with a run of --max_iters=1;
- the accuracy of the model's own answer: the likelier of the two possible ones, and (in the JSON file) the likeliest of
  all characters. Soft decoding's first token is the standard prefill's.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from corpora import tasks
from harness.checkpoint import without_feedback
from harness.configurator import UserError, parse, run, setting
from experiments.report import Settings as Shared
from experiments.report import cached, labels, save, start, table
from model import GPT
from harness.tokenizer import CharTokenizer, make_tokenizer

BATCH = 256  # prompts at a time
FOLDS = 4
LAST = {"standard": 0, "last 1": 1, "last 2": 2, "last 4": 4, "recurrent": None}  # recurrent tokens; None: all but one
FUSED = {1: "fused", 3: "fused 3"}  # by the passes after the plain one
ANSWERS = ("standard", "last 4", "recurrent", *FUSED.values())  # those in the table
SHOWN = ("completion", "memory", "registers")  # by depth, in the figure: with 8 distractors or registers
UNITS = {"completion": "distractors", "memory": "distractors", "registers": "registers", "writes": "writes of each"}


@dataclass(frozen=True)
class Settings(Shared):
    seed: int = setting(0, "of the examples and the folds")
    n_windows: int = setting(1, "not used", flag=False)
    limit: int = setting(0, "groups of each probe set, for a quick run; 0: all of the 80 or 128")
    cache_dir: str = setting("out/probe", "where each probe set's numbers are kept: an interrupted run goes on")

    def __post_init__(self):
        super().__post_init__()
        if self.limit and self.limit < FOLDS:
            raise ValueError(f"limit={self.limit} must be at least {FOLDS}, the folds, or 0 for all")


@contextlib.contextmanager
def residual_stream(model: GPT) -> Iterator[list[Tensor]]:
    """Yields a list that each run of the stack fills: its last position at depths 0..n_layer, (B, D) each."""
    depths = [torch.empty(0)] * (model.config.n_layer + 1)

    def keep(depth, block, inputs, output=None):
        depths[depth] = (inputs[0] if output is None else output)[:, -1]

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(model.blocks[0].register_forward_pre_hook(partial(keep, 0)))
        for depth, block in enumerate(model.blocks, start=1):
            hooks.enter_context(block.register_forward_hook(partial(keep, depth)))
        yield depths


@torch.no_grad()
def prefills(model: GPT, idx: Tensor, feedback: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Prefill -> the residual stream (B, n_layer + 1, D) and the state (B, D) at the last of tokens idx (B, T).

    Recurrent tokens go through the cache one by one, as in Soft decoding. Without feedback: the standard prefill alone.
    """
    T, found = idx.size(1), {}
    with residual_stream(model) as depths:
        cache, plain = model.reconstruct(idx, n_plain=T, k=1)
        for name, n in (LAST if feedback else {"standard": 0}).items():
            n = T - 1 if n is None else n
            h, cache.length = plain[:, T - n - 1:T - n], T - n  # the cache is still plain up to there: n ascends
            for t in range(T - n, T):
                h = model.decode_step(idx[:, t:t + 1], h, cache, "soft")  # (B, 1, D)
            found[name] = torch.stack(depths, dim=1), h[:, 0]
        h, e = plain, model.embed(idx)
        for n in range(1, 1 + max(FUSED) if feedback else 1):
            h = model.next_pass(h, e)  # (B, T, D)
            if n in FUSED:
                found[FUSED[n]] = torch.stack(depths, dim=1), h[:, -1]
    return found


def probe(features: np.ndarray, answers: np.ndarray, groups: np.ndarray, seed: int) -> np.ndarray:
    """Whether a probe that never saw an example's group predicts its answer, (N,) bool, from features (N, D)."""
    from sklearn import linear_model, model_selection, pipeline, preprocessing

    classifier = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression(max_iter=2000))
    folds = model_selection.GroupKFold(FOLDS, shuffle=True, random_state=seed)
    return model_selection.cross_val_predict(classifier, features, answers, groups=groups, cv=folds) == answers


def accuracy(correct: np.ndarray, n_groups: int) -> dict[str, float]:
    """Of correct (N,), group after group: its mean, and the standard error of the mean over groups."""
    means = correct.reshape(n_groups, -1).mean(1)
    return {"accuracy": float(means.mean()), "error": float(means.std(ddof=1) / n_groups ** 0.5)}


@torch.no_grad()
def measure(model: GPT, tokenizer: CharTokenizer, examples: list[tasks.Example], feedback: bool, seed: int) -> dict:
    """The numbers of one probe set, by prefill."""
    idx = torch.tensor([tokenizer.encode(example.prompt) for example in examples], device=model.embedding.weight.device)
    answers = np.array([tokenizer.encode(example.answer)[0] for example in examples])  # (N,)
    groups = np.array([example.group for example in examples])  # (N,)
    n_groups, choices = len(set(groups)), np.unique(answers)
    batches = [prefills(model, rows, feedback) for rows in idx.split(BATCH)]
    result: dict = {"examples": len(examples), "groups": n_groups, "length": idx.size(1), "prefills": {}}
    for name in batches[0]:
        stream, h = (torch.cat(parts) for parts in zip(*(batch[name] for batch in batches)))
        stream, logits = stream.cpu().double().numpy(), model.head(h).cpu().numpy()  # (N, n_layer + 1, D), (N, V)
        result["prefills"][name] = {
            "depths": [accuracy(probe(x, answers, groups, seed), n_groups) for x in stream.swapaxes(0, 1)],
            "answer": accuracy(choices[logits[:, choices].argmax(1)] == answers, n_groups),
            "unrestricted": accuracy(logits.argmax(1) == answers, n_groups)}
    return result


def check(path: str, model: GPT, checkpoint: dict, longest: int) -> None:
    """UserError for a checkpoint that cannot read the prompts."""
    if lacking := [symbol for symbol in tasks.SYMBOLS if symbol not in checkpoint["tokenizer"].get("symbols", "")]:
        raise UserError(f"{path}: its tokenizer lacks {lacking[-1]!r}, which the prompts need; train a model on them, "
                        "as the first lines of config/tasks.toml say")
    if model.config.block_size < longest:
        raise UserError(f"{path}: block_size={model.config.block_size}, but the longest prompt has {longest} tokens; "
                        f"train with --block_size={longest} or more, e.g. config/tasks.toml")


def draw(figure, results: dict[str, dict]) -> None:
    """Two rows of panels a run: accuracy by depth and the model's own answers, then depth 0 by what makes it hard."""
    figure.set_size_inches(16, 7.5 * len(results))
    panels = []  # (title, label of x, {x: {prefill: accuracy and error}})
    for name, sets in ((name, result["sets"]) for name, result in results.items()):
        for task in SHOWN:
            prefills = sets[task][8]["prefills"]
            by_depth = zip(*(by["depths"] for by in prefills.values()))
            panels.append((f"{name}: {task} 8", "depth of the probe",
                           {depth: dict(zip(prefills, found)) for depth, found in enumerate(by_depth)}))
        panels.append((f"{name}: the model's own answers", "task and its number", {
            f"{task[0]}{n}": {prefill: by["answer"] for prefill, by in numbers["prefills"].items()}
            for task, swept in sets.items() for n, numbers in swept.items()}))
        panels += [(f"{name}: {task}, depth 0", UNITS[task], {
            n: {prefill: by["depths"][0] for prefill, by in numbers["prefills"].items()}
            for n, numbers in swept.items()}) for task, swept in sets.items()]
    for axes, (title, unit, points) in zip(figure.subplots(2 * len(results), 4, sharey=True).flat, panels, strict=True):
        axes.axhline(0.5, color="gray", lw=0.8, ls=":")
        for prefill in next(iter(points.values())):
            y, error = zip(*(point[prefill].values() for point in points.values()))
            axes.errorbar([str(x) for x in points], y, error, label=prefill, capsize=2, marker="o", ms=4, lw=1.2)
        axes.set(title=title, xlabel=unit, ylabel="accuracy")
    for axes in figure.axes[3::8]:
        axes.tick_params("x", rotation=90)
        axes.legend(fontsize="small")


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if not paths:
        raise UserError("name at least one checkpoint, e.g. python -m experiments.probe out/tasks")
    if importlib.util.find_spec("sklearn") is None:
        raise UserError("the probes need scikit-learn: python -m pip install scikit-learn")
    (began, runs), results, rows = start(paths, settings), {}, []
    sets = tasks.probe_sets(settings.seed, settings.limit or None)
    for path, (model, checkpoint, _) in zip(paths, runs):
        check(path, model, checkpoint, max(len(examples[0].prompt) for examples in sets.values()))
    for path, name, (model, checkpoint, _) in zip(paths, labels(paths), runs):
        if problem := without_feedback(path, checkpoint):
            print(f"{name}, standard prefill only: {problem}")
        tokenizer, found = make_tokenizer(checkpoint["tokenizer"]), {task: {} for task in UNITS}
        results[name] = {"checkpoint": path, "sets": found}
        for (task, n), examples in tqdm(sets.items(), name, leave=False, disable=None):
            numbers = partial(measure, model, tokenizer, examples, not problem, settings.seed)
            found[task][n] = cached(settings.cache_dir, model, [task, n, settings.seed, settings.limit], numbers)
            by = found[task][n]["prefills"]
            rows.append([name, task, n, *(by[p]["depths"][0]["accuracy"] if p in by else "" for p in LAST),
                         by["standard"]["depths"][-1]["accuracy"],
                         *(by[p]["answer"]["accuracy"] if p in by else "" for p in ANSWERS)])
    print(table(["run", "task", "n", *(f"depth 0, {p}" for p in LAST), "top, standard",
                 *(f"answer, {p}" for p in ANSWERS)], rows))
    save("probe", settings, began, {"checkpoints": results}, lambda figure: draw(figure, results))
    return 0


if __name__ == "__main__":
    run(main)
