"""Text -> tokens: writes data/NAME/train.bin, val.bin and meta.json, which train.py reads.

    python prepare.py                   pydocs: the manual and the docstrings of this very Python
    python prepare.py shakespeare       tiny Shakespeare, downloaded and checked
    python prepare.py tasks             three tasks on remembered states (corpora/tasks.py)
    python prepare.py cups              the shell game (corpora/cups.py)
    python prepare.py --input=FILE      a UTF-8 text of your own; its NAME is the file's
    some-program | python prepare.py --input=- --name=NAME

The text is one document, and nothing is put between its parts. Carriage returns, alone or before a
newline, become newlines, as they do in prompts. An empty prompt of sample.py starts from a newline
with either tokenizer, because texts hold newlines; GPT-2's end-of-text never occurs in them.
"""

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corpora import CORPORA, corpus_text
from harness.configurator import UserError, parse, require, run, setting, suggestion
from harness.data import SAME_DATA, load_meta, save_dataset, token_dtype
from harness.text import STDIN, read_text, unix_newlines
from harness.tokenizer import CharTokenizer, GPT2Tokenizer, Tokenizer, make_tokenizer

PIECE = 1_000_000  # characters that are encoded at a time


@dataclass(frozen=True)
class Settings:
    """What to prepare and how. ValueError, naming the flag, for what cannot be."""

    input: str | None = setting(
        None, "a UTF-8 text file of your own, instead of a corpus; -: standard input", path=True
    )
    name: str | None = setting(
        None, "the folder under data_dir, and what train.py calls the dataset"
    )
    tokenizer: str = setting(
        "char",
        "char: one token per character; gpt2: byte pairs (tiktoken); or a checkpoint, for its own",
        path=True,
    )
    val_fraction: float = setting(0.1, "share of the text, its end, kept for validation")
    data_dir: str = setting("data", "where the folders of prepared data are", path=True)
    keep: bool = setting(False, "if the folder holds prepared data already, leave it as it is")
    overwrite: bool = setting(False, "replace data in the folder that was made differently")

    def __post_init__(self):
        between = 0 < self.val_fraction < 1
        require(self, "val_fraction", between, "between 0 and 1, e.g. 0.1")
        one_of_two = not (self.keep and self.overwrite)
        require(self, "keep", one_of_two, "left out if --overwrite is given, or the reverse")
        require(self, "input", self.input != "", "the name of a text file")
        named = self.input != STDIN or self.name is not None
        require(self, "input", named, "given with a name: --input=- --name=NAME")


def source_of(settings: Settings, words: list[str], argv: list[str]) -> str:
    """What to prepare: a corpus's name, or the name of the --input file; UserError."""
    if len(words) + (settings.input is not None) > 1:
        given = shlex.join(argv)
        raise UserError(f"one corpus or one --input=FILE at a time, got: {given}")
    if settings.input == STDIN:
        return "standard input"
    if settings.input is not None:
        return Path(settings.input).name
    corpus = words[0] if words else "pydocs"
    if corpus not in CORPORA:
        raise UserError(
            f"unknown corpus {corpus!r}{suggestion(corpus, CORPORA)}; there are "
            f"{', '.join(CORPORA)}, and --input={corpus} for a file of your own"
        )
    return corpus


def read_source(settings: Settings, source: str) -> str:
    """The text to prepare, its line breaks newlines; UserError if it cannot be had or is blank."""
    if settings.input is None:
        text = corpus_text(source)
    else:
        try:
            text = read_text(settings.input)
        except ValueError as error:
            raise UserError(f"--input={settings.input}: {error}") from None
    text, n_changed = unix_newlines(text)
    if n_changed:
        notice(f"{source}: {n_changed:,} carriage returns (CRLF or CR) read as newlines")
    if not text.strip():
        what = "blanks only" if text else "empty"
        raise UserError(f"{source}: {what}; give a file with text, --input=FILE")
    return text


def split(text: str, val_fraction: float) -> tuple[str, str]:
    """The text's beginning, to train on, and its end, to validate on; UserError if one is empty."""
    cut = int(len(text) * (1 - val_fraction))
    if not 0 < cut < len(text):
        raise UserError(
            f"--val_fraction={val_fraction}: splits {len(text)} characters into {cut} and "
            f"{len(text) - cut}; give more text or another fraction"
        )
    return text[:cut], text[cut:]


def choose_tokenizer(name: str, text: str) -> Tokenizer:
    """The tokenizer that --tokenizer names. A checkpoint's own is what its model can read."""
    if name == "char":
        return CharTokenizer("".join(sorted(set(text))))
    if name == "gpt2":
        return GPT2Tokenizer()
    from harness.checkpoint import load_checkpoint  # torch takes seconds to load

    try:
        checkpoint = load_checkpoint(name)
    except UserError as error:
        near = suggestion(name, ["char", "gpt2"])
        raise UserError(f"--tokenizer: {name!r} is neither char nor gpt2{near}; {error}") from None
    return make_tokenizer(checkpoint["tokenizer"])


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of about PIECE characters, each but the first begins with a newline.

    What stands before that is not blank, and there GPT-2's pattern cuts too. So the tokens are
    those of the whole text.
    """
    begin = 0
    for match in re.finditer(r"(?<=\S)\n", text):
        if match.start() - begin >= PIECE:
            yield text[begin : match.start()]
            begin = match.start()
    yield text[begin:]


def encode_part(text: str, tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    """The tokens (N,) of one split.

    Piece by piece where that gives the same tokens, because a list of a whole text's tokens takes
    many times the memory of the text.
    """
    cuts = pieces(text) if tokenizer.spec["kind"] in ("char", "gpt2") else [text]
    return np.concatenate([np.array(tokenizer.encode(piece), dtype) for piece in cuts])


def encode(text: str, settings: Settings) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """The tokenizer, and the tokens (N,) of both splits. UserError."""
    parts = split(text, settings.val_fraction)
    tokenizer = choose_tokenizer(settings.tokenizer, text)
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        train, val = (encode_part(part, tokenizer, dtype) for part in parts)  # (N,) each
    except UserError as error:
        raise UserError(f"--tokenizer={settings.tokenizer}: {error}") from None
    if tokenizer.start_token not in train:
        notice(
            "no newline to train on, so an empty prompt would start from a symbol that the "
            "model has never read: give sample.py a --prompt"
        )
    return tokenizer, train, val


def prepared_before(folder: Path) -> dict | None:
    """meta.json of the data in the folder; None where there is none, or its files are damaged."""
    try:
        return load_meta(folder)
    except UserError:
        return None


def is_foreign(folder: Path) -> bool:
    """Whether the folder holds .bin files that are not this script's, nanoGPT's for instance."""
    has_tokens = any((folder / f"{split}.bin").exists() for split in ("train", "val"))
    return has_tokens and not (folder / "meta.json").exists()


def write(folder: Path, meta: dict, train: np.ndarray, val: np.ndarray, settings: Settings) -> None:
    """Writes the data. UserError where it cannot, or would replace data made differently."""
    former = prepared_before(folder)
    differs = former is not None and any(former.get(name) != meta[name] for name in SAME_DATA)
    if differs and not settings.overwrite:
        raise UserError(
            f"{folder} already holds other data (from {former.get('source')}, "
            f"{former['train_tokens']:,} tokens to train on), and runs trained on it could not be "
            "resumed: --keep it, --overwrite it, or choose another --name"
        )
    if is_foreign(folder) and not settings.overwrite:
        raise UserError(
            f"{folder} holds .bin files without a meta.json, so they may be another program's: "
            "--overwrite them, or choose another --name"
        )
    files = {
        "train.bin": train.tobytes(),
        "val.bin": val.tobytes(),
        "meta.json": json.dumps(meta).encode(),
    }
    try:
        save_dataset(folder, files)
    except OSError as error:
        raise UserError(
            f"--data_dir={settings.data_dir}: cannot write {folder.absolute()}: {error.strerror}"
        ) from None
    if differs:
        notice(f"{folder} held other data before; runs trained on that cannot be resumed")


def notice(text: str) -> None:
    print(f"prepare.py: {text}", file=sys.stderr)


def main(argv: list[str]) -> None:
    """Prepares one corpus or file and says what it wrote; UserError."""
    settings, words = parse(argv, Settings, doc=__doc__, positional="corpus")
    source = source_of(settings, words, argv)
    name = settings.name
    if name is None:
        name = source if settings.input is None else Path(settings.input).stem
    if name in ("", "..") or Path(name).name != name or not name.isprintable():
        raise UserError(f"--name={name}: must be a plain folder name")
    folder = Path(settings.data_dir, name)
    kept = prepared_before(folder) if settings.keep else None
    if kept is not None:
        meta = kept
        done = f"kept {folder}, prepared from {kept.get('source')}"
    else:
        text = read_source(settings, source)
        tokenizer, train, val = encode(text, settings)
        meta = {
            "tokenizer": tokenizer.spec,
            "vocab_size": tokenizer.vocab_size,
            "dtype": train.dtype.name,
            "train_tokens": len(train),
            "val_tokens": len(val),
            "source": source,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        write(folder, meta, train, val, settings)
        symbols = f"{tokenizer.vocab_size:,} symbols ({settings.tokenizer})"
        print(f"{source}: {len(text):,} characters, {symbols}")
        done = f"wrote {folder}"
    tokens = f"{meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} to validate on"
    print(f"{done}: {tokens}")
    where = "" if settings.data_dir == "data" else f" --data_dir={shlex.quote(settings.data_dir)}"
    print(f"next: python train.py --dataset={shlex.quote(name)}{where}")


if __name__ == "__main__":
    run(main)
