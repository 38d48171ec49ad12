"""Checkpoints: one file that holds all of a run, and the weights it can give to a model.

A checkpoint is a dict of tensors, numbers, strings, lists and dicts, so that it loads with
weights_only=True. Whoever loads one goes through `load_checkpoint`, which checks all of it.
"""

import dataclasses
import os
import pickle
import shlex
import struct
import zipfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

from harness.configurator import UserError, key
from harness.data import SAME_DATA
from model import GPT, GPTConfig

FORMAT = "nanofbt-1"

# What using the model needs, and what resuming its run needs besides.
MODEL_KEYS = (
    "model_config", "tokenizer", "train_config", "dataset", "model", "step", "feedback_steps",
)
RUN_KEYS = (
    "optimizers", "scaler", "micro_batches", "tokens", "compute_tokens", "seconds", "val_losses",
    "val_step",
)

# What a resumed run may set anew. Three are compared in their own way: grad_accum, whose product
# with the number of processes counts; max_iters, on which the schedule depends; and init_from,
# which may be left out.
FREE_ON_RESUME = {
    "resume", "overwrite", "out_dir", "data_dir", "init_from", "max_iters", "eval_interval",
    "eval_iters", "eval_passes", "log_interval", "device", "compile", "recompute",
}

# --------------------------------------------------------------------------------------------------
# Writing


def save_checkpoint(folder: Path, checkpoint: dict) -> None:
    """Writes folder/ckpt.pt whole or not at all, over the one before.

    UserError when the disk does not take it.
    """
    # One fixed name: what a killed process leaves is written over by the next save.
    temporary = folder / "ckpt.pt.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)  # it may have been deleted while training
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT} | checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / "ckpt.pt")
    except (OSError, RuntimeError) as error:
        # A full disk is an OSError, over which torch.save raises a RuntimeError.
        reason = str(error.__context__ or error).split("\n")[0]
        raise UserError(
            f"{folder}/ckpt.pt cannot be written ({reason}); the one before, if any, is kept"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# Reading


def known_runs() -> str:
    """For messages: 'there are: A, B', the folders under out/ that hold a checkpoint."""
    folders = sorted(str(file.parent) for file in Path("out").glob("**/ckpt.pt"))
    return f"there are: {', '.join(folders)}" if folders else "none were found under out/"


def load_checkpoint(path: str | Path) -> dict:
    """What `save_checkpoint` wrote, on the CPU; path is the file or its folder.

    UserError for anything else: another kind of file, a damaged one, one that other code wrote, or
    weights that are not finite.
    """
    file = find_checkpoint(path)
    checkpoint = read_checkpoint(file)
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(
            f"{file} is a PyTorch file, but not a checkpoint of train.py; {known_runs()}"
        )
    check_checkpoint(file, checkpoint)
    return checkpoint


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint's file, given that or its folder. UserError where there is none."""
    try:
        file = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
        found = file.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UserError(f"{str(path)[:80]}: no checkpoint can be there: {error.strerror}") from None
    if not found:
        where = "" if file.is_absolute() else f" (in {Path.cwd()})"
        raise UserError(
            f"no checkpoint at {file}{where}; {known_runs()}. "
            "To train one: python train.py CONFIG.toml --out_dir=FOLDER, without --resume"
        )
    return file


def read_checkpoint(file: Path):
    """What is in the file, whatever it is. UserError where it is damaged or not PyTorch's."""
    try:
        with zipfile.ZipFile(file) as archive:
            # What torch.save writes has checksums, which torch.load ignores.
            if archive.testzip() is None:
                return torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError as error:
        reason = error.strerror
        raise UserError(f"{file} cannot be read ({reason}): give yourself the right") from None
    except (
        OSError, RuntimeError, EOFError, ValueError, LookupError, zipfile.BadZipFile, zlib.error,
        struct.error, pickle.UnpicklingError,
    ):
        pass  # what a damaged archive or pickle may raise; the answer is the same
    raise UserError(
        f"{file} ({file.stat().st_size} bytes) is not a checkpoint: empty, cut short, damaged, or "
        f"another kind of file; {known_runs()}"
    )


def differences(theirs, ours) -> str:
    """'lacks a, b; has c besides' of two sets of names, '' where they are equal."""
    lacking = sorted(set(ours) - set(theirs))
    surplus = sorted(set(theirs) - set(ours))
    parts = []
    if lacking:
        parts.append(f"lacks {', '.join(lacking)}")
    if surplus:
        parts.append(f"has {', '.join(surplus)} besides")
    return "; ".join(parts)


def other_code(file: Path | str, what: str) -> UserError:
    """The complaint about a checkpoint whose content is not what this code would have written."""
    return UserError(
        f"{file} was made by another version of the code: {what}; "
        "use the code that made it, or train anew"
    )


def check_checkpoint(file: Path, checkpoint: dict) -> None:
    """UserError where keys, config fields, or the weights' names and shapes are not this code's.

    A field that is missing is not filled in: today's default need not be what it was trained with.
    """
    lacking = [name for name in MODEL_KEYS if name not in checkpoint]
    if lacking:
        raise other_code(file, f"it lacks {', '.join(lacking)}")
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    unlike = differences(checkpoint["model_config"], fields)
    if unlike:
        raise other_code(file, f"model_config {unlike}")
    try:
        config = GPTConfig(**checkpoint["model_config"])
    except (ValueError, TypeError) as error:
        raise other_code(file, f"its model_config cannot be built ({error})") from None
    with torch.device("meta"):  # names and shapes alone: no memory, no random numbers
        expected = GPT(config).state_dict()
    check_weights(file, checkpoint["model"], expected)


def check_weights(file: Path, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """UserError unless the weights have the expected names and shapes, and are finite."""
    unlike = differences(weights, expected)
    if unlike:
        raise other_code(file, f"its model {unlike}")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            theirs, ours = tuple(weight.shape), tuple(expected[name].shape)
            raise other_code(file, f"{name} has shape {theirs}, and here {ours}")
    wrong = not_finite(weights)
    if wrong:
        raise UserError(
            f"{file}: {wrong} has weights that are not finite; "
            "train anew, with --overwrite and a smaller --learning_rate"
        )


def not_finite(weights: dict[str, Tensor]) -> str:
    """The name of the first weight with a number that is not finite, '' where all are."""
    for name, weight in weights.items():
        if not weight.isfinite().all():
            return name
    return ""


# --------------------------------------------------------------------------------------------------
# Using


def load_model(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPT, dict]:
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
    fusion = "" if has_fusion else " --fusion=residual"
    return (
        f"{path} never trained latent feedback; continue with: python train.py CONFIG.toml "
        f"--out_dir=out/NEW --init_from={shlex.quote(str(path))} --pass_mix=0,0,1{fusion}"
    )


def initial_weights(model: GPT, path: str, tokenizer: dict) -> int:
    """Takes another run's weights; a fusion that it lacks stays as initialised.

    -> the multi-pass steps by which the fusion taken over was trained; 0 for one as initialised.

    UserError where the two do not fit. No other weight may be missing: it would stay random.
    """
    try:
        checkpoint = load_checkpoint(path)
    except UserError as error:
        raise UserError(f"--init_from: {error}") from None
    may_differ = ("block_size", "dropout", "fusion", "vocab_size")
    theirs = checkpoint["model_config"]
    unlike = [
        name
        for name, value in theirs.items()
        if name not in may_differ and value != getattr(model.config, name)
    ]
    if unlike:
        there = ", ".join(f"{name} is {theirs[name]}" for name in unlike)
        here = ", ".join(f"{getattr(model.config, name)}" for name in unlike)
        flags = " ".join(f"--{name}={theirs[name]}" for name in unlike)
        raise UserError(f"--init_from={path}: {there} there and {here} here; give {flags}")
    if checkpoint["tokenizer"] != tokenizer:
        raise UserError(
            f"--init_from={path}: its tokenizer is not that of the dataset; train on data prepared "
            "with the same one, such as its own, "
            f"--dataset={flag_value(checkpoint['train_config']['dataset'])}"
        )
    weights = checkpoint["model"]
    same_fusion = theirs["fusion"] == model.config.fusion
    if not same_fusion:
        weights = {name: w for name, w in weights.items() if not name.startswith("fusion.")}
    model.load_state_dict(model.state_dict() | weights)
    return checkpoint["feedback_steps"] if same_fusion else 0


def check_same_run(saved: dict, identity: dict, folder: Path) -> None:
    """UserError where the run in `folder` is not the one that these settings and data describe.

    identity: what `Run` would save of itself: its configs, dataset and micro_batches per step.
    """
    lacking = [name for name in RUN_KEYS if name not in saved]
    if lacking:
        raise other_code(f"{folder}/ckpt.pt", f"it lacks {', '.join(lacking)}")
    unlike = differences(saved["train_config"].keys() - FREE_ON_RESUME,
                         identity["train_config"].keys() - FREE_ON_RESUME)  # fmt: skip
    if unlike:
        raise other_code(f"{folder}/ckpt.pt", f"train_config {unlike}")
    check_same_settings(saved, identity, folder)
    for name in SAME_DATA:
        if saved["dataset"].get(name) != identity["dataset"].get(name):
            raise UserError(
                f"--resume: the text of the dataset has changed since {folder} began; "
                "start anew with --overwrite in place of --resume, or prepare the same text again"
            )


def check_same_settings(saved: dict, identity: dict, folder: Path) -> None:
    """UserError with all flags that would make a run's settings those that it began with.

    The dataset comes first: with another one the vocabulary differs too, which is not a setting.
    """
    unlike = []
    flags = []
    for part in ("train_config", "model_config"):
        for name, theirs in saved[part].items():
            ours = identity[part].get(name)
            free = name in FREE_ON_RESUME | {"grad_accum", "vocab_size"}
            if name == "init_from" and ours:  # need not be given again, but not another one
                free = False
            if ours != theirs and not free:
                unlike.append(f"{key(name)} is {theirs} in {folder} and {ours} here")
                flags.append(f"--{key(name)}={flag_value(theirs)}")
    if unlike:
        what = "setting" if len(unlike) == 1 else "settings"
        raise UserError(
            f"--resume: {'; '.join(unlike)}. Give the {what} it began with, {' '.join(flags)}, or "
            "start anew with --overwrite in place of --resume"
        )


def flag_value(value) -> str:
    """A setting's value as it is typed after its flag in a shell."""
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return shlex.quote(text) if text else ""
