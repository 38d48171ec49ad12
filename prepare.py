"""Text -> tokens: writes data/NAME/train.bin, val.bin and meta.json, which train.py reads.

    python prepare.py                              pydocs: the manual and the docstrings of this very Python
    python prepare.py shakespeare                  tiny Shakespeare, downloaded and checked
    python prepare.py tasks                        completion tracking, delayed memory, register tracking (tasks.py)
    python prepare.py cups                         the shell game (cups.py)
    python prepare.py --input=FILE [--name=NAME]   any UTF-8 text; NAME is the file's own name if not given
"""

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.checkpoint import known_runs, load_checkpoint
from harness.configurator import UserError, parse, run, setting, suggestion
from corpora import CORPORA
from harness.data import save_dataset, token_dtype
from harness.tokenizer import CharTokenizer, GPT2Tokenizer, Tokenizer, make_tokenizer


@dataclass(frozen=True)
class Settings:
    input: str | None = setting(None, "a UTF-8 text file of your own, instead of a corpus")
    name: str | None = setting(None, "the folder under data_dir, and what train.py calls the dataset")
    tokenizer: str = setting("char", "char: one token per character; gpt2: byte pairs (tiktoken); "
                             "or a checkpoint whose tokenizer to use")
    val_fraction: float = setting(0.1, "share of the text, its end, kept for validation")
    data_dir: str = setting("data", "where the folders of prepared data are")

    def __post_init__(self):
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction} must lie between 0 and 1, e.g. 0.1")


def read_text(file: str) -> str:
    """The file's text, newlines as they are; UserError if it cannot be read as UTF-8."""
    try:
        return Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"--input={file}: not UTF-8 text (at byte {error.start}); convert it to UTF-8") from None
    except OSError as error:
        raise UserError(f"--input={file}: {error.strerror} ({Path(file).absolute()}); name a text file") from None


def choose_tokenizer(name: str, text: str) -> Tokenizer:
    """The tokenizer that --tokenizer names. A checkpoint's own is what its model can read."""
    if name == "char":
        return CharTokenizer("".join(sorted(set(text))))
    if name == "gpt2":
        return GPT2Tokenizer()
    if not Path(name).exists():
        raise UserError(
            f"--tokenizer={name}: must be char, gpt2, or a checkpoint whose tokenizer to use"
            f"{suggestion(name, ['char', 'gpt2'])}; there are: {known_runs()}"
        )
    return make_tokenizer(load_checkpoint(name)["tokenizer"])


def main(argv: list[str]) -> None:
    """Prepares one corpus or file and says what it wrote; UserError."""
    settings, words = parse(argv, Settings, doc=__doc__, positional="corpus")
    if len(words) + (settings.input is not None) > 1:
        raise UserError(f"one corpus or one --input=FILE at a time, got: {shlex.join(argv)}")
    corpus = words[0] if words else "pydocs"
    if settings.input is not None:
        stem, source, text = Path(settings.input).stem, Path(settings.input).name, read_text(settings.input)
    elif corpus in CORPORA:
        stem, source, text = corpus, corpus, CORPORA[corpus]()
    else:
        raise UserError(f"unknown corpus {corpus!r}{suggestion(corpus, CORPORA)}; there are {', '.join(CORPORA)}, "
                        f"and --input={corpus} for a file of your own")
    name = stem if settings.name is None else settings.name
    if name in ("", "..") or Path(name).name != name or not name.isprintable():
        raise UserError(f"--name={name}: must be a plain folder name")
    if not text.strip():
        raise UserError(f"{source}: {'blanks only' if text else 'empty'}; give a file with text, --input=FILE")
    cut = int(len(text) * (1 - settings.val_fraction))
    if not 0 < cut < len(text):
        raise UserError(f"--val_fraction={settings.val_fraction}: splits {len(text)} characters into {cut} and "
                        f"{len(text) - cut}; give more text or another fraction")
    tokenizer = choose_tokenizer(settings.tokenizer, text)
    dtype = token_dtype(tokenizer.vocab_size)
    train, val = (np.array(tokenizer.encode(part), dtype) for part in (text[:cut], text[cut:]))  # (N,) each
    meta = {"tokenizer": tokenizer.spec, "vocab_size": tokenizer.vocab_size, "dtype": dtype.name,
            "train_tokens": len(train), "val_tokens": len(val), "source": source,
            "sha256": hashlib.sha256(text.encode()).hexdigest()}
    folder = Path(settings.data_dir, name)
    try:
        save_dataset(folder, {"train.bin": train.tobytes(), "val.bin": val.tobytes(), "meta.json": json.dumps(meta).encode()})
    except OSError as error:
        raise UserError(f"--data_dir={settings.data_dir}: cannot write {folder.absolute()}: {error.strerror}") from None
    place = "" if settings.data_dir == "data" else f" --data_dir={shlex.quote(settings.data_dir)}"
    print(f"{source}: {len(text):,} characters, {tokenizer.vocab_size:,} symbols ({settings.tokenizer})\n"
          f"wrote {folder}: {len(train):,} tokens to train on, {len(val):,} to validate on\n"
          f"next: python train.py --dataset={shlex.quote(name)}{place}")


if __name__ == "__main__":
    run(main)
