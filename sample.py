"""Text from a checkpoint, decoded in up to three modes (Listing 2 of the paper).

    python sample.py out/demo                        all modes: one prompt and seed, texts compared
    python sample.py out/demo --mode=soft --prompt="Return the" --num_samples=3
    python sample.py out/demo --mode=fused --prompt_file=question.txt > answer.txt
    some-program | python sample.py out/demo --mode=soft --prompt_file=-

CHECKPOINT is a run's folder or its file. Standard feeds the sampled token back. Soft also feeds
back the state that the token was sampled from. Fused first reads the prompt once more with fused
inputs (with one token, or an empty prompt, there is nothing to fuse, and Fused equals Soft).

What the model sees follows one rule in all modes. Of a long prompt the last block_size tokens are
read. When the cache holds block_size positions, the stack re-reads the last half block of the
inputs that it was fed, and continues. An empty prompt stands for a newline, or for the first symbol
of a vocabulary without newline. A carriage return, alone or before a newline, is read as a newline.

Each sample draws from a generator of its own, made of --seed and the sample's number: sample 1 is
the same whatever --num_samples is. With --temperature=0 all samples are equal.

Statistics go to stderr; with --mode=all they are part of the report on stdout. The mean
log-probability is that of the sampled tokens under the model itself, before temperature and top-k,
in nats per token. Tokens per second include the time that reading the prompt takes.
"""

import codecs
import math
import sys
import time
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from harness.checkpoint import known_runs, load_model, without_feedback
from harness.configurator import UserError, parse, require, run, setting
from harness.machine import compile_blocks, memory_for, pick_device
from harness.text import read_text, unix_newlines
from harness.tokenizer import Tokenizer, make_tokenizer
from model import GPT, Mode, sampler

AROUND = 10  # tokens shown before and after the place where two texts part
BETWEEN = "\n---\n"  # what separates several samples


@dataclass(frozen=True)
class SampleConfig:
    """What to decode and how. ValueError, naming the flag, for what cannot be."""

    mode: Literal["standard", "soft", "fused", "all"] = setting(
        "all", "standard, soft, fused, or all of them, compared"
    )
    prompt: str = setting("", "the text to continue")
    prompt_file: str = setting("", "a UTF-8 file that holds it; -: standard input", path=True)
    num_samples: int = setting(1, "texts, decoded as one batch; a single one appears as it is made")
    max_new_tokens: int = setting(300, "tokens to add to each text; 0: the prompt alone")
    temperature: float = setting(
        0.8, "1: as the model says; lower: likelier tokens; 0: always the likeliest"
    )
    top_k: int = setting(
        0, "draw only among this many likeliest tokens; 0, or more than there are: among all"
    )
    seed: int = setting(1, "of the draws, the same in every mode")
    prefill_passes: int = setting(1, "fused: passes over the prompt after the plain one")
    tol: float = setting(
        0.0, "fused: end these passes once the states change by less than this share; 0: run all"
    )
    device: str = setting("auto", "auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    compile: bool = setting(False, "compile the blocks: seconds to begin, then faster tokens")

    def __post_init__(self):
        sampler(self.temperature, self.top_k)  # checks these two
        one_prompt = not (self.prompt and self.prompt_file)
        require(self, "prompt_file", one_prompt, "left out if --prompt is given, or the reverse")
        require(self, "num_samples", 1 <= self.num_samples <= 10**12, "at least 1, at most 10**12")
        require(self, "max_new_tokens", self.max_new_tokens >= 0, "positive, or 0: only the prompt")
        require(self, "seed", 0 <= self.seed < 2**32, "from 0 to 2**32 - 1")
        at_least_one = "at least 1; --mode=soft is fused without such passes"
        require(self, "prefill_passes", self.prefill_passes >= 1, at_least_one)
        rereads = self.mode in ("fused", "all")
        only_fused = "left out: only --mode=fused re-reads the prompt"
        require(self, "prefill_passes", rereads or self.prefill_passes == 1, only_fused)
        require(self, "tol", 0 <= self.tol < math.inf, "a positive number, or 0 for all passes")
        can_end_early = rereads and self.prefill_passes > 1
        require(
            self, "tol", not self.tol or can_end_early, "left out: there are no passes to cut short"
        )


def sample(
    model: GPT, tokenizer: Tokenizer, prompt: tuple[str, Tensor], mode: Mode, config: SampleConfig
) -> tuple[list[list[int]], str]:
    """Continues the prompt, its text and its tokens (B, T), in one mode.

    -> the new tokens of each row, and statistics in words. Prints all texts on stdout: a single one
    as it is made, several when they are done.
    """
    text, idx = prompt
    single = len(idx) == 1
    # A token of GPT-2's may end within a character; the decoder holds back what is not complete.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pick = sampler(config.temperature, config.top_k, config.seed)
    options = {}
    if mode == "fused":
        options = {"prefill_passes": config.prefill_passes, "tol": config.tol}
    rows: list[list[int]] = [[] for _ in range(len(idx))]
    log_prob = 0.0
    if single:
        print(text, end="", flush=True)
    began = time.perf_counter()
    steps = model.generate(idx, config.max_new_tokens, mode, pick, **options)
    bar = tqdm(steps, mode, config.max_new_tokens, leave=False, disable=single or None)
    for token, log_probs in bar:  # (B,) each
        for row, i in zip(rows, token.tolist(), strict=True):
            row.append(i)
        log_prob += log_probs.mean().item()
        if single:
            print(decoder.decode(tokenizer.decode_bytes(rows[0][-1:])), end="", flush=True)
    seconds = time.perf_counter() - began
    if single:
        print(decoder.decode(b"", final=True))
    else:
        print(BETWEEN.join(text + tokenizer.decode(row) for row in rows))
    n_steps = len(rows[0])
    n_tokens = n_steps * len(rows)
    if not n_tokens:
        return rows, "0 tokens"
    speed = f"{n_tokens:,} tokens, {n_tokens / seconds:,.0f} tokens/s"
    return rows, f"{speed}, mean log-probability {log_prob / n_steps:.4f}"


def departure(tokenizer: Tokenizer, rows: list[list[int]], standard: list[list[int]]) -> str:
    """Where the texts first part from Standard's, in words.

    That is the earliest token of any sample that differs, counted from 1, and both texts around it.
    """
    departures = []
    for row, (ours, theirs) in enumerate(zip(rows, standard, strict=True)):
        for n, (our_token, their_token) in enumerate(zip(ours, theirs, strict=True)):
            if our_token != their_token:
                departures.append((n, row))
    if not departures:
        return "same text as Standard"
    n, row = min(departures)
    around = slice(max(n - AROUND, 0), n + AROUND)
    ours = tokenizer.decode(rows[row][around])
    theirs = tokenizer.decode(standard[row][around])
    of_sample = f" of sample {row + 1}" if len(rows) > 1 else ""
    return f"departs from Standard at token {n + 1}{of_sample}: {ours!r}, there {theirs!r}"


def read_prompt(config: SampleConfig, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """The prompt's text and token ids, at least one; UserError if it cannot be read or encoded."""
    flag = "--prompt"
    text = config.prompt
    if config.prompt_file:
        flag = f"--prompt_file={config.prompt_file}"
        try:
            text = read_text(config.prompt_file)
        except ValueError as error:
            raise UserError(f"{flag}: {error}") from None
    text, _ = unix_newlines(text)
    try:
        ids = tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None
    if ids:
        return text, ids
    start = tokenizer.decode([tokenizer.start_token])
    if start != "\n":
        notice(
            "the vocabulary has no newline; the empty prompt stands for its first symbol, "
            f"{start!r}"
        )
    return text, [tokenizer.start_token]


def usable_modes(config: SampleConfig, checkpoint: dict, path: str) -> tuple[Mode, ...]:
    """The modes to decode in. UserError, which says how to train it, without trained feedback."""
    modes = get_args(Mode) if config.mode == "all" else (config.mode,)
    problem = without_feedback(path, checkpoint)
    if modes == ("standard",) or not problem:
        return modes
    if config.mode != "all":
        raise UserError(f"--mode={config.mode}: {problem}")
    notice(f"Standard only: {problem}")
    return ("standard",)


def notice(text: str) -> None:
    print(f"sample.py: {text}", file=sys.stderr)


def show(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: tuple[str, Tensor],
    modes: tuple[Mode, ...],
    config: SampleConfig,
) -> None:
    """Decodes in each of the modes and prints texts and statistics."""
    _, idx = prompt
    # A device's first calls are slow, and so are a compiler's: they would count against Standard.
    n_first = 3
    if config.compile:  # up to the first slide, which reads another number of positions at once
        n_free = model.config.block_size - min(idx.size(1), model.config.block_size)
        n_first = max(n_first, min(n_free + 2, config.max_new_tokens))
    for _ in model.generate(idx, n_first):
        pass
    standard: list[list[int]] = []
    for mode in modes:
        if config.mode != "all":
            _, statistics = sample(model, tokenizer, prompt, mode, config)
            notice(f"{mode}: {statistics}")
            continue
        print(f"=== {mode.capitalize()}")
        rows, statistics = sample(model, tokenizer, prompt, mode, config)
        if mode == "standard":
            standard = rows
        else:
            statistics += f"; {departure(tokenizer, rows, standard)}"
        print(f"[{statistics}]\n")


def main(argv: list[str]) -> None:
    config, words = parse(argv, SampleConfig, doc=__doc__, positional="checkpoint")
    if len(words) != 1:
        hint = known_runs()
        if words:
            hint = f"got {', '.join(words)} (quote a prompt of several words)"
        raise UserError(f"name one checkpoint, as in: python sample.py out/demo; {hint}")
    path = words[0]
    device = pick_device(config.device)
    with memory_for("the size of the model, or give --device=cpu"):
        model, checkpoint = load_model(path, device)
    if config.compile:
        compile_blocks(model.blocks, device)
    modes = usable_modes(config, checkpoint, path)
    tokenizer = make_tokenizer(checkpoint["tokenizer"])
    text, ids = read_prompt(config, tokenizer)
    block_size = model.config.block_size
    if len(ids) > block_size:
        notice(f"the prompt has {len(ids):,} tokens; its last {block_size} (block_size) are read")
    idx = torch.tensor([ids], device=model.embedding.weight.device)  # (1, T)
    idx = idx.expand(config.num_samples, -1)  # (B, T)
    with memory_for(f"--num_samples={config.num_samples}"):
        show(model, tokenizer, (text, idx), modes, config)


if __name__ == "__main__":
    run(main)
