"""Text from a checkpoint, decoded in up to three modes (Listing 2 of the paper).

    python sample.py out/demo                                  all modes: one prompt and seed, the texts compared
    python sample.py out/demo --mode=soft --prompt="Return the" --num_samples=3
    python sample.py out/demo --mode=fused --prompt_file=question.txt --prefill_passes=4 > answer.txt

Standard feeds the sampled token back, Soft also the state that it was sampled from; Fused first reads the prompt once
more with fused inputs (one token, or an empty prompt, leaves nothing to fuse). CHECKPOINT is a run's folder or file.

What the model sees follows one rule in all modes. Of a long prompt the last block_size tokens are read. When the cache
holds block_size positions, the stack re-reads the last half block of the inputs that it was fed, and goes on. An empty
prompt stands for a newline (with GPT-2's tokenizer: end of text), or the first symbol of a vocabulary without newline.

Statistics go to stderr; with --mode=all they are a part of the report on stdout. The mean log-probability is that of
the sampled tokens under the model itself, before temperature and top-k, in nats a token; times include the prompt's.
"""

import codecs
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from harness.checkpoint import known_runs, load_model, without_feedback
from harness.configurator import UserError, parse, run, setting
from harness.machine import pick_device
from model import GPT, Mode, sampler
from harness.tokenizer import Tokenizer, make_tokenizer

AROUND = 10  # tokens shown before and after the place where two texts part


@dataclass(frozen=True)
class SampleConfig:
    """What to decode and how. ValueError, naming the field, for what cannot be."""

    mode: Literal["standard", "soft", "fused", "all"] = setting("all", "standard, soft, fused, or all, compared")
    prompt: str = setting("", "the text to go on from")
    prompt_file: str = setting("", "a UTF-8 file that holds it")
    num_samples: int = setting(1, "texts, decoded in one batch; a single one appears as it is drawn")
    max_new_tokens: int = setting(300, "tokens to draw for each text; 0: the prompt alone")
    temperature: float = setting(0.8, "1: as the model says; lower: likelier tokens; 0: the likeliest")
    top_k: int = setting(0, "draw among this many likeliest tokens only; 0, or more than there are: all")
    seed: int = setting(1, "of the draws, the same in every mode")
    prefill_passes: int = setting(1, "fused: passes over the prompt after the plain one")
    tol: float = setting(0.0, "fused: end these passes once the states change by less than this share; 0: do them all")
    device: str = setting("auto", "auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")

    def __post_init__(self):
        sampler(self.temperature, self.top_k)  # the rules of these two
        fused = self.mode in ("fused", "all")
        rules = (
            ("prompt_file", not (self.prompt and self.prompt_file), "left out where --prompt is given, or the reverse"),
            ("num_samples", self.num_samples >= 1, "at least 1"),
            ("max_new_tokens", self.max_new_tokens >= 0, "positive, or 0 for the prompt alone"),
            ("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("prefill_passes", self.prefill_passes >= 1, "at least 1; --mode=soft is fused without such passes"),
            ("prefill_passes", fused or self.prefill_passes == 1, "left out: only --mode=fused re-reads the prompt"),
            ("tol", 0 <= self.tol < float("inf"), "a positive number, or 0 for all passes"),
            ("tol", not self.tol or fused and self.prefill_passes > 1, "left out: there are no passes to cut short"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"--{name}={getattr(self, name)} must be {rule}")


def sample(model: GPT, tokenizer: Tokenizer, prompt: tuple[str, Tensor], mode: Mode, config: SampleConfig) \
        -> tuple[list[list[int]], str]:
    """Goes on from the prompt, its text and tokens (B, T), in one mode -> each row's new tokens, and statistics.

    Prints all on stdout: a single text as it is drawn, several when they are done.
    """
    text, idx = prompt
    single, columns, log_prob = len(idx) == 1, [], 0.0
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")  # GPT-2's tokens may cut a character in two
    pick = sampler(config.temperature, config.top_k, config.seed)
    prefill = {"prefill_passes": config.prefill_passes, "tol": config.tol} if mode == "fused" else {}
    print(text if single else "", end="", flush=True)
    began = time.perf_counter()
    steps = model.generate(idx, config.max_new_tokens, mode, pick, **prefill)
    for token, log_probs in tqdm(steps, mode, config.max_new_tokens, leave=False, disable=single or None):
        columns.append(token.tolist())
        log_prob += log_probs.mean().item() / config.max_new_tokens
        if single:
            print(characters.decode(tokenizer.decode_bytes(columns[-1])), end="", flush=True)
    seconds, n = time.perf_counter() - began, len(columns) * len(idx)
    rows = [[column[row] for column in columns] for row in range(len(idx))]
    print(characters.decode(b"", True) if single else "\n---\n".join(text + tokenizer.decode(row) for row in rows))
    return rows, f"{n:,} tokens, {n / seconds:,.0f} tokens/s, mean log-probability {log_prob:.4f}" if n else "0 tokens"


def departure(tokenizer: Tokenizer, rows: list[list[int]], standard: list[list[int]]) -> str:
    """Where the first of the texts leaves Standard's: the new token's number, from 1, and both texts around it."""
    parts = [(n, row) for row, pair in enumerate(zip(rows, standard, strict=True))
             for n, (ours, theirs) in enumerate(zip(*pair, strict=True)) if ours != theirs]
    if not parts:
        return "same text as Standard"
    n, row = min(parts)
    ours, theirs = (tokenizer.decode(ids[row][max(n - AROUND, 0):n + AROUND]) for ids in (rows, standard))
    of_sample = f" of sample {row + 1}" if len(rows) > 1 else ""
    return f"departs from Standard at token {n + 1}{of_sample}: {ours!r}, there {theirs!r}"


def read_prompt(config: SampleConfig, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """The prompt's text and token ids, at least one; UserError when it cannot be read or encoded."""
    source, text = "--prompt", config.prompt
    if config.prompt_file:
        source = f"--prompt_file={config.prompt_file}"
        try:
            text = Path(config.prompt_file).read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source}: {error}; name a UTF-8 text file") from None
    try:
        ids = tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    start = tokenizer.decode([tokenizer.start_token])
    if not ids and tokenizer.spec["kind"] == "char" and start != "\n":
        notice(f"the vocabulary has no newline; the empty prompt stands for its first symbol, {start!r}")
    return text, ids or [tokenizer.start_token]


def usable_modes(config: SampleConfig, checkpoint: dict, path: str) -> tuple[Mode, ...]:
    """The modes to decode in; UserError, saying how to train it, where latent feedback was not trained."""
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


def main(argv: list[str]) -> None:
    config, words = parse(argv, SampleConfig, doc=__doc__, positional="checkpoint")
    if len(words) != 1:
        given = f"got {', '.join(words)} (quote a prompt of several words)" if words else f"there are: {known_runs()}"
        raise UserError(f"name one checkpoint, as in: python sample.py out/demo; {given}")
    model, checkpoint = load_model(words[0], pick_device(config.device))
    modes = usable_modes(config, checkpoint, words[0])
    tokenizer = make_tokenizer(checkpoint["tokenizer"])
    text, ids = read_prompt(config, tokenizer)
    if len(ids) > model.config.block_size:
        notice(f"the prompt has {len(ids):,} tokens; its last {model.config.block_size} (block_size) are read")
    idx = torch.tensor([ids], device=model.embedding.weight.device).expand(config.num_samples, -1)  # (B, T)
    next(model.generate(idx, 1))  # not timed: a device's first call is slow, and would count against Standard
    drawn: dict[Mode, list[list[int]]] = {}
    for mode in modes:
        if config.mode == "all":
            print(f"=== {mode.capitalize()}")
        drawn[mode], statistics = sample(model, tokenizer, (text, idx), mode, config)
        if config.mode == "all":
            against = "" if mode == "standard" else f"; {departure(tokenizer, drawn[mode], drawn['standard'])}"
            print(f"[{statistics}{against}]\n")
        else:
            notice(f"{mode}: {statistics}")


if __name__ == "__main__":
    run(main)
