"""Prepared data: data/NAME/train.bin, val.bin and meta.json, and windows of their tokens."""

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.configurator import UserError
from harness.tokenizer import make_tokenizer

if TYPE_CHECKING:  # prepare.py does without torch, which takes seconds to load
    import torch
    from torch import Tensor

SAME_DATA = ("sha256", "tokenizer", "train_tokens")  # of meta.json: what a resumed run compares


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of the tokens in a .bin file, little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def save_dataset(folder: Path, files: dict[str, bytes]) -> None:
    """Writes all of `files` under temporary names, then moves them into place in order; OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {folder / name: folder / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        for path, part in parts.items():
            part.write_bytes(files[path.name])
        meta = folder / "meta.json"
        if meta.exists() and meta.read_bytes() != files["meta.json"]:
            meta.unlink()  # whatever happens next, old counts never stand beside new tokens
        for path, part in parts.items():
            part.replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def load_meta(folder: Path) -> dict:
    """meta.json, checked against the .bin files beside it.

    UserError says how to prepare what is missing or damaged.
    """
    try:
        return check_meta(folder)
    except (FileNotFoundError, NotADirectoryError):
        problem = f"no prepared data at {folder.absolute()}"
    except (OSError, UserError, ValueError, TypeError, KeyError) as error:
        problem = f"damaged data at {folder.absolute()} ({type(error).__name__}: {error})"
    name = shlex.quote(folder.name)
    where = ""
    if folder.parent != Path("data"):
        where = f" --data_dir={shlex.quote(str(folder.parent))}"
    raise UserError(
        f"{problem}; run: python prepare.py {name}{where}, or for a text of your own: "
        f"python prepare.py --input=FILE --name={name}{where}"
    )


def check_meta(folder: Path) -> dict:
    """meta.json as it is; an error of any kind where it and the .bin files do not agree."""
    meta = json.loads((folder / "meta.json").read_bytes())
    tokenizer = meta["tokenizer"]
    vocab_size = meta["vocab_size"]
    dtype = token_dtype(vocab_size)
    # GPT-2's may need the network, and a pretrained model's a library, which training does without.
    if tokenizer["kind"] == "gpt2":
        n_symbols = vocab_size
    elif tokenizer["kind"] == "hf":
        n_symbols = tokenizer["vocab_size"]
    else:
        n_symbols = make_tokenizer(tokenizer).vocab_size
    if n_symbols != vocab_size or dtype.name != meta["dtype"]:
        stated = f"vocab_size={vocab_size} and dtype={meta['dtype']}"
        raise ValueError(f"{n_symbols} symbols, but {stated}")
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        wanted = meta[f"{split}_tokens"] * dtype.itemsize
        size = path.stat().st_size if path.is_file() else 0
        if size != wanted or size == 0:
            raise ValueError(
                f"{path.name} is missing or has {size} bytes where {wanted} should be"
            )
    return meta


def load_tokens(folder: Path, split: str, meta: dict) -> np.ndarray:
    """The tokens of `split`, "train" or "val", read-only, (N,).

    They stay on disk until they are used. UserError where they may not be read.
    """
    path = folder / f"{split}.bin"
    try:
        return np.memmap(path, token_dtype(meta["vocab_size"]), mode="r")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def even_starts(tokens: np.ndarray, n_windows: int, block_size: int) -> np.ndarray:
    """Where n_windows evenly spaced windows of a split begin; fewer where it is short."""
    n_windows = min(n_windows, len(tokens) - block_size)  # at most one begins at each token
    return np.unique(np.linspace(0, len(tokens) - block_size - 1, n_windows).astype(np.int64))


def windows(
    tokens: np.ndarray, starts: np.ndarray, block_size: int, device: "torch.device"
) -> "tuple[Tensor, Tensor]":
    """Tokens and next tokens, (B, block_size) each, of the windows that begin at starts (B,)."""
    import torch

    positions = starts[:, None] + np.arange(block_size + 1)  # (B, block_size + 1)
    rows = torch.from_numpy(tokens[positions].astype(np.int64)).to(device)
    return rows[:, :-1], rows[:, 1:]
