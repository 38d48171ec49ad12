"""Prepared data: data/NAME/train.bin, val.bin and meta.json, and windows of their tokens."""

import json
import os
import shlex
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.configurator import UserError
from harness.tokenizer import make_tokenizer


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of the tokens in a .bin file, little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def save_dataset(folder: Path, files: dict[str, bytes]) -> None:
    """Writes all of `files` under temporary names, then moves them into place in their order; OSError."""
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
    """meta.json, checked against the .bin files beside it; UserError says how to prepare what is missing or damaged."""
    name = shlex.quote(folder.name)
    place = "" if folder.parent == Path("data") else f" --data_dir={shlex.quote(str(folder.parent))}"
    again = (f"run: python prepare.py {name}{place}, or for a text of your own: "
             f"python prepare.py --input=FILE --name={name}{place}")
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        spec, vocab_size, dtype = meta["tokenizer"], meta["vocab_size"], token_dtype(meta["vocab_size"])
        n_symbols = vocab_size if spec["kind"] == "gpt2" else make_tokenizer(spec).vocab_size
        if (n_symbols, dtype.name) != (vocab_size, meta["dtype"]):
            raise ValueError(f"{n_symbols} symbols, but vocab_size={vocab_size} and dtype={meta['dtype']}")
        for split in ("train", "val"):
            path, wanted = folder / f"{split}.bin", meta[f"{split}_tokens"] * dtype.itemsize
            size = path.stat().st_size if path.is_file() else 0
            if not 0 < wanted == size:
                raise ValueError(f"{path.name} is missing or has {size} bytes where {wanted} should be")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no prepared data at {folder.absolute()}; {again}") from None
    except (OSError, UserError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"damaged data at {folder.absolute()} ({type(error).__name__}: {error}); {again}") from None
    return meta


def load_tokens(folder: Path, split: str, meta: dict) -> np.ndarray:
    """The tokens of `split`, "train" or "val", read-only, (N,); they stay on disk until they are used."""
    return np.memmap(folder / f"{split}.bin", token_dtype(meta["vocab_size"]), mode="r")


def even_starts(tokens: np.ndarray, n_windows: int, block_size: int) -> np.ndarray:
    """Where n_windows evenly spaced windows of a split begin; fewer where it is too short for as many."""
    return np.unique(np.linspace(0, len(tokens) - block_size - 1, n_windows).astype(np.int64))


def windows(tokens: np.ndarray, starts: np.ndarray, block_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, each (B, block_size), of the windows that begin at starts (B,)."""
    rows = torch.from_numpy(tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)).to(device)
    return rows[:, :-1], rows[:, 1:]
