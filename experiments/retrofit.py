"""A pretrained model with latent feedback against plain fine-tuning of equal steps, and its speed.

    python -m experiments.retrofit out/smollm2_plain out/smollm2_fbt
    python -m experiments.retrofit out/smollm2_plain out/smollm2_fbt --n_tokens=16

The first run is plain (config/smollm2.toml with --fusion=none --pass_mix=1), the others have
feedback. All must have begun from the same weights and had the same batches and schedule, because
their losses are compared step by step.
`computation` counts tokens times passes. Validation losses are those that training logged.

With --n_tokens also the speed of decoding on one CPU thread, Standard and Soft, of the last run's
model, beside `transformers`' own generate() with the same weights. A round decodes n_tokens in
each way, and the ratios are those within a round: CPU seconds, since other programs may share the
machine.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from experiments.pretrained import HUGGING_FACE, library, their_names
from experiments.report import Settings as Shared
from experiments.report import labels, save, start, table, warn_of_early_stop
from experiments.timing import ratio, turns, typical
from harness.checkpoint import load_checkpoint, load_model, without_feedback
from harness.configurator import UserError, parse, require, run, setting
from harness.runlog import read_evaluations, read_training
from model import GPT

# Of train_config: what a step's batch and its place in the run's schedule depend on.
STEPS = (
    "seed", "batch_size", "grad_accum", "max_iters", "learning_rate", "warmup_iters", "cooldown"
)


@dataclass(frozen=True)
class Settings(Shared):
    seed: int = setting(1, "not used", flag=False)
    n_windows: int = setting(120, "not used", flag=False)
    data_dir: str = setting("data", "not used", flag=False)
    device: str = setting("cpu", "not used", flag=False)
    n_tokens: int = setting(0, "tokens decoded to time each way of decoding; 0: no timing")
    rounds: int = setting(5, "times that all ways are timed, one after the other")

    def __post_init__(self):
        super().__post_init__()
        require(self, "n_tokens", self.n_tokens >= 0, "positive, or 0 for no timing")
        require(self, "rounds", self.rounds >= 1, "at least 1")


def curves(path: str) -> dict:
    """A run's settings and its losses by pass. UserError where there is no whole log.

    A line on stderr where its training was stopped before its end.
    """
    folder = Path(path)
    training = read_training(folder)
    evaluations = read_evaluations(folder)
    if not training or not evaluations:
        raise UserError(f"{folder}/log.jsonl has no training or no evaluation; name a run's folder")
    checkpoint = load_checkpoint(path)
    warn_of_early_stop(path, checkpoint)
    names = ("init_from", "pass_mix", "lam", "jitter", *STEPS)
    config = checkpoint["train_config"]
    return {
        "train_config": {name: config[name] for name in names},
        "block_size": checkpoint["model_config"]["block_size"],
        "sha256": checkpoint["dataset"]["sha256"],
        "fusion": checkpoint["model_config"]["fusion"],
        "steps": [entry["step"] for entry in training],
        "losses": [entry["losses"] for entry in training],
        "val_steps": [entry["step"] for entry in evaluations],
        "val_losses": [entry["val_losses"] for entry in evaluations],
        "tokens": checkpoint["tokens"],
        "compute_tokens": checkpoint["compute_tokens"],
        "seconds": round(checkpoint["seconds"], 3),
    }


def same_steps(paths: list[str], runs: list[dict]) -> None:
    """UserError where a run's steps had other batches or another schedule than the first one's."""
    plain = runs[0]
    for path, one in zip(paths, runs, strict=True):
        pairs = {name: (plain["train_config"][name], one["train_config"][name]) for name in STEPS}
        pairs["block_size"] = (plain["block_size"], one["block_size"])
        pairs["dataset"] = (plain["sha256"], one["sha256"])
        for name, (theirs, ours) in pairs.items():
            if ours != theirs:
                raise UserError(
                    f"--{name}: {paths[0]} was trained with {theirs} and {path} with {ours}, so "
                    f"that their steps cannot be compared; train both with the same --{name}"
                )


def same_start(paths: list[str], runs: list[dict]) -> None:
    """UserError where a run began from other weights than the first one."""
    theirs = runs[0]["train_config"]["init_from"]
    for path, one in zip(paths, runs, strict=True):
        ours = one["train_config"]["init_from"]
        if ours != theirs:
            raise UserError(
                f"--init_from: {paths[0]} began from {theirs or 'random weights'} and {path} from "
                f"{ours or 'random weights'}; train both from the same ones"
            )


def against_plain(plain: dict, other: dict) -> dict:
    """Mean differences to the plain run, in nats, over the later half of the steps both logged.

    Same steps, same batches: of its pass 1, of its last pass, and of its last pass to its first.
    """
    plain_losses = dict(zip(plain["steps"], plain["losses"]))
    losses = dict(zip(other["steps"], other["losses"]))
    steps = sorted(plain_losses.keys() & losses.keys())
    steps = steps[len(steps) // 2 :]
    if not steps:
        raise UserError("the runs logged no step in common; train both with --log_interval=1")
    first = [losses[step][0] for step in steps]
    last = [losses[step][-1] for step in steps]
    baseline = [plain_losses[step][0] for step in steps]
    return {
        "steps": [steps[0], steps[-1]],
        "pass_1": statistics.mean(first) - statistics.mean(baseline),
        "last_pass": statistics.mean(last) - statistics.mean(baseline),
        "last_pass_to_pass_1": statistics.mean(last) - statistics.mean(first),
    }


def as_transformers(model: GPT):
    """transformers' LlamaForCausalLM with the weights of a model without QK-norm."""
    transformers = library("transformers")
    ours = model.config
    if ours.qk_norm or ours.input_norm or ours.depth_scale:
        raise UserError("--n_tokens: transformers has no such model; name a run of a llama model")
    config = transformers.LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.n_embd,
        intermediate_size=ours.d_hidden,
        num_hidden_layers=ours.n_layer,
        num_attention_heads=ours.n_head,
        num_key_value_heads=ours.kv_heads,
        head_dim=ours.d_head,
        max_position_embeddings=ours.block_size,
        rms_norm_eps=ours.eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_base},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,  # nothing ends a text early
        pad_token_id=None,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    weights = model.state_dict()
    named = {there: weights[here] for here, there in their_names(ours, HUGGING_FACE).items()}
    theirs.load_state_dict(named, strict=False)
    theirs.tie_weights()
    return theirs


@torch.no_grad()
def speed(model: GPT, settings: Settings) -> dict:
    """Tokens per CPU second of each way of decoding, and their ratios, medians over rounds."""
    n = settings.n_tokens
    theirs = as_transformers(model)
    prompt = torch.arange(8)[None] % model.config.vocab_size  # (1, T)

    def ours(mode: str) -> list[int]:
        return [token.item() for token, _ in model.generate(prompt, n, mode)]

    def their_text() -> list[int]:
        mask = torch.ones_like(prompt)
        text: Tensor = theirs.generate(
            prompt, attention_mask=mask, max_new_tokens=n, do_sample=False, use_cache=True
        )
        return text[0, prompt.size(1) :].tolist()

    if ours("standard") != their_text():
        raise UserError("--n_tokens: transformers decodes another text; it is not the same model")
    ways = {"standard": partial(ours, "standard"), "soft": partial(ours, "soft"),
            "transformers": their_text}  # fmt: skip
    seconds = turns(ways, settings.rounds, torch.device("cpu"), time.process_time)
    return {
        "tokens": n,
        "rounds": settings.rounds,
        "tokens_per_cpu_second": {name: n / typical(seconds, name) for name in ways},
        "soft_time_over_standard": ratio(seconds, "soft", "standard"),
        "standard_speed_over_transformers": ratio(seconds, "transformers", "standard"),
    }


def draw(figure, names: list[str], runs: list[dict]) -> None:
    """Each pass minus the plain run on the same batch: batches differ far more than models do."""
    axes = figure.subplots()
    plain = {step: losses[0] for step, losses in zip(runs[0]["steps"], runs[0]["losses"])}
    axes.axhline(0, color="black", ls="--", lw=1, label=names[0])
    color = 0
    for name, one in zip(names[1:], runs[1:]):
        for k in range(len(one["losses"][0])):
            pairs = [(step, losses[k]) for step, losses in zip(one["steps"], one["losses"])]
            pairs = [(step, loss - plain[step]) for step, loss in pairs if step in plain]
            steps, differences = zip(*pairs)
            label = f"{name}, pass {k + 1}"
            axes.plot(steps, differences, "o", ms=4, color=f"C{color}", label=label)
            color += 1
    axes.set(xlabel="step", ylabel=f"training loss minus {names[0]}'s (nats per token)")
    axes.set_title("Equal steps, same batches")
    axes.legend()


def main(argv: list[str]) -> None:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="run")
    if len(paths) < 2:
        raise UserError("name a plain run and one with feedback: out/smollm2_plain out/smollm2_fbt")
    began, _ = start([], settings)
    names = labels(paths)
    runs = [curves(path) for path in paths]
    plain = runs[0]
    if plain["fusion"] != "none":
        raise UserError(f"{paths[0]} has a fusion; name a plain run first, of --fusion=none")
    same_start(paths, runs)
    same_steps(paths, runs)
    rows = []
    for name, one in zip(names, runs):
        by_pass = " ".join(f"{loss:.4f}" for loss in one["val_losses"][-1])
        first = f"{one['val_losses'][0][0]:.4f}"
        row = [name, first, by_pass, one["compute_tokens"] / plain["compute_tokens"]]
        if one is not plain:
            one["against_plain"] = against_plain(plain, one)
            row += [one["against_plain"]["pass_1"], one["against_plain"]["last_pass"]]
        rows.append(row + ["", ""] if one is plain else row)
    header = ["run", "validation loss before", "after, by pass", "computation",
              "training: pass 1 minus plain", "last pass minus plain"]  # fmt: skip
    print(table(header, rows))
    numbers = {"runs": dict(zip(names, runs))}
    if settings.n_tokens:
        torch.set_num_threads(1)
        model, checkpoint = load_model(paths[-1])
        problem = without_feedback(paths[-1], checkpoint)
        if problem:
            raise UserError(problem)
        numbers["speed"] = speed(model, settings)
        print(numbers["speed"])
    save("retrofit", settings, began, numbers, lambda figure: draw(figure, names, runs))


if __name__ == "__main__":
    run(main)
