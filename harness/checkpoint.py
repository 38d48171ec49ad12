"""Checkpoints: one file that holds all of a run, and the weights it can give to a model.

A checkpoint is a dict of tensors, numbers, strings, lists and dicts, so that it loads with weights_only=True.
"""

import os
import pickle
import shlex
import struct
import zipfile
import zlib
from pathlib import Path

import torch

from harness.configurator import UserError, key
from model import GPT, GPTConfig

FORMAT = "nanofbt-1"
FREE_ON_RESUME = {"resume", "overwrite", "out_dir", "data_dir", "init_from", "max_iters", "eval_interval", "eval_iters",
                  "eval_passes", "log_interval", "device", "compile"}  # what a resumed run may set anew


def save_checkpoint(folder: Path, checkpoint: dict) -> None:
    """Writes folder/ckpt.pt whole or not at all, over the one before. UserError when the disk does not take it."""
    checkpoint = {"format": FORMAT} | checkpoint
    temporary = folder / "ckpt.pt.tmp"  # one fixed name: what a killed process leaves is written over by the next save
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / "ckpt.pt")
    except (OSError, RuntimeError) as error:  # a full disk is an OSError, over which torch.save raises a RuntimeError
        reason = str(error.__context__ or error).split("\n")[0]
        raise UserError(f"{folder}/ckpt.pt cannot be written ({reason}); the one before, if any, is kept") from None
    finally:
        temporary.unlink(missing_ok=True)


def known_runs() -> str:
    """The folders under out/ that hold a checkpoint, for messages."""
    return ", ".join(sorted(str(file.parent) for file in Path("out").glob("**/ckpt.pt"))) or "none under out/"


def load_checkpoint(path: str | Path) -> dict:
    """What `save_checkpoint` wrote, on the CPU; path is the file or its folder. UserError for anything else."""
    file = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        where = "" if file.is_absolute() else f" (in {Path.cwd()})"
        raise UserError(f"no checkpoint at {file}{where}; there are: {known_runs()}. "
                        "Train one, without --resume: python train.py config/demo.toml")
    try:
        with zipfile.ZipFile(file) as archive:  # what torch.save writes, with checksums that torch.load ignores
            whole = archive.testzip() is None
        checkpoint = torch.load(file, map_location="cpu", weights_only=True) if whole else None
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, zipfile.BadZipFile, zlib.error, struct.error,
            pickle.UnpicklingError):
        checkpoint = None
    if checkpoint is None:
        raise UserError(f"{file} ({file.stat().st_size} bytes) is no checkpoint: empty, cut short, damaged, or another "
                        f"kind of file; there are: {known_runs()}")
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(f"{file} is a PyTorch file, but not a checkpoint of train.py; there are: {known_runs()}")
    return checkpoint


def load_model(path: str | Path, device: str = "cpu") -> tuple[GPT, dict]:
    """The checkpoint's model, in eval mode on `device`, and the checkpoint."""
    checkpoint = load_checkpoint(path)
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    return model.eval().to(device), checkpoint


def without_feedback(path: str, checkpoint: dict) -> str:
    """'' where the model was trained on latent feedback; else what to tell a user who wants it."""
    has_fusion = checkpoint["model_config"]["fusion"] != "none"
    if has_fusion and checkpoint["feedback_steps"]:
        return ""
    return (f"{path} never trained latent feedback; train it on: python train.py CONFIG.toml --out_dir=out/NEW "
            f"--init_from={shlex.quote(str(path))} --pass_mix=0,0,1{'' if has_fusion else ' --fusion=gated'}")


def initial_weights(model: GPT, path: str, tokenizer: dict) -> None:
    """Takes another run's weights; a fusion it lacks stays as initialised. UserError where the two do not fit."""
    checkpoint = load_checkpoint(path)
    for name, theirs in checkpoint["model_config"].items():
        ours = getattr(model.config, name)
        if ours != theirs and name not in ("block_size", "dropout", "fusion", "vocab_size"):
            raise UserError(f"--init_from={path}: {name} is {theirs} there and {ours} here; give --{name}={theirs}")
    if checkpoint["tokenizer"] != tokenizer:
        raise UserError(f"--init_from={path}: it has another tokenizer than the dataset; prepare that with its symbols")
    weights = checkpoint["model"]
    if checkpoint["model_config"]["fusion"] != model.config.fusion:
        weights = {name: weight for name, weight in weights.items() if not name.startswith("fusion.")}
    model.load_state_dict(model.state_dict() | weights)


def check_same_run(saved: dict, identity: dict, folder: Path) -> None:
    """UserError where the run in `folder` is not the one that these settings and this dataset describe."""
    if any(saved["dataset"][name] != identity["dataset"][name] for name in ("sha256", "tokenizer", "train_tokens")):
        raise UserError(f"--resume: the dataset was prepared otherwise since {folder} began; prepare the same text, "
                        "or start anew with --overwrite")
    for part in ("model_config", "train_config"):
        for name, theirs in saved[part].items():
            ours = identity[part][name]
            if ours != theirs and name not in FREE_ON_RESUME:
                raise UserError(f"--resume: {key(name)} is {theirs} in {folder} and {ours} here; give the settings it "
                                f"began with (--{key(name)}={theirs}), or start anew with --overwrite")
