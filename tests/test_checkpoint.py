"""Checkpoints: whole or not at all, read without running code, and every other file refused in one line."""

import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from harness.checkpoint import initial_weights, load_checkpoint, load_model, save_checkpoint
from harness.configurator import UserError
from model import GPT, GPTConfig

HERE = Path(__file__).parents[1]
SHAPE = {"vocab_size": 3, "block_size": 4, "n_layer": 1, "n_head": 1, "n_embd": 8}
SPEC = {"kind": "char", "symbols": "\nab"}


def make(seed=0, **changes) -> tuple[GPT, dict]:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SHAPE | changes))
    return model, {"model_config": asdict(model.config), "tokenizer": SPEC, "model": model.state_dict(), "step": 7,
                   "val_losses": [1.5, 1.25], "optimizers": [{"state": {0: {"exp_avg": torch.ones(2)}}}]}


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def complaint(path) -> str:
    """The UserError of loading path: one line that names the file."""
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Saving


def test_what_is_saved_is_loaded_from_file_and_folder(tmp_path):
    model, saved = make()
    save_checkpoint(tmp_path, saved)
    assert names(tmp_path) == ["ckpt.pt"]
    for path in (tmp_path, tmp_path / "ckpt.pt", str(tmp_path)):
        loaded = load_checkpoint(path)
        assert loaded["format"] == "nanofbt-1" and set(loaded) == set(saved) | {"format"}
        assert loaded["model"].keys() == model.state_dict().keys()
        assert all(torch.equal(loaded["model"][name], weight) for name, weight in model.state_dict().items())
        assert torch.equal(loaded["optimizers"][0]["state"][0]["exp_avg"], torch.ones(2))
        assert (loaded["step"], loaded["val_losses"], loaded["tokenizer"]) == (7, [1.5, 1.25], SPEC)
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["step"] == 7


def fails_in_pickling(monkeypatch):
    return {"weights": torch.ones(1000), "function": lambda: 0}


def fails_at_the_last_moment(monkeypatch):
    def replace(*paths):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "replace", replace)
    return {"step": 8}


def interrupted(monkeypatch):
    def fsync(number):
        raise KeyboardInterrupt
    monkeypatch.setattr(os, "fsync", fsync)
    return {"step": 8}


@pytest.mark.parametrize("failure, error", [(fails_in_pickling, Exception), (fails_at_the_last_moment, UserError),
                                            (interrupted, KeyboardInterrupt)])
def test_a_save_that_fails_leaves_the_checkpoint_before_and_nothing_else(tmp_path, monkeypatch, failure, error):
    save_checkpoint(tmp_path, make()[1])
    before = (tmp_path / "ckpt.pt").read_bytes()
    with pytest.raises(error):
        save_checkpoint(tmp_path, failure(monkeypatch))
    assert names(tmp_path) == ["ckpt.pt"] and (tmp_path / "ckpt.pt").read_bytes() == before


def test_a_full_disk_is_said_in_one_line(tmp_path):
    resource = pytest.importorskip("resource")  # Unix only
    save_checkpoint(tmp_path, {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match="cannot be written .*File too large.*before, if any, is kept") as caught:
            save_checkpoint(tmp_path, {"step": 2, "weights": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["ckpt.pt"] and load_checkpoint(tmp_path)["step"] == 1


def test_the_new_file_is_on_disk_before_it_takes_the_old_one_s_place(tmp_path, monkeypatch):
    seen, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (seen.append(os.fstat(file).st_size), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (seen.append(os.path.getsize(old)), replace(old, new)))
    save_checkpoint(tmp_path, {"step": 1})
    assert seen == [os.path.getsize(tmp_path / "ckpt.pt")] * 2  # whole already when it is put on disk


def test_kill_9_while_saving_keeps_the_last_checkpoint(tmp_path):
    program = """
import os, signal, sys, torch
from pathlib import Path
from harness.checkpoint import save_checkpoint
folder = Path(sys.argv[1])
save_checkpoint(folder, {"step": 1})
def killed(checkpoint, file):
    file.write(b"half a file")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
save_checkpoint(folder, {"step": 2})
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=HERE, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2 and load_checkpoint(tmp_path)["step"] == 1
    save_checkpoint(tmp_path, {"step": 3})
    assert names(tmp_path) == ["ckpt.pt"] and load_checkpoint(tmp_path)["step"] == 3  # no leftovers


# Loading what is no checkpoint


def test_missing_checkpoints_are_named_with_those_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "none under out/" in complaint("empty")
    runs = [f"out/{name}" for name in "dbfaec"]
    for run in runs:
        (tmp_path / run).mkdir(parents=True)
        save_checkpoint(tmp_path / run, {"step": 1})
    for path, file in (("empty", "empty/ckpt.pt"), ("out/demo", "out/demo"), ("no.pt", "no.pt")):
        message = complaint(path)
        assert f"no checkpoint at {file} (in {tmp_path});" in message
        assert f"there are: {', '.join(sorted(runs))}." in message
        assert "python train.py" in message




@pytest.mark.parametrize("content", [
    lambda whole: b"", lambda whole: b"To be, or not to be\n", lambda whole: b".", lambda whole: b"}\n",
    *(lambda whole, part=part: whole[:int(len(whole) * part)] for part in (0.001, 0.1, 0.5, 0.9, 0.999)),
    lambda whole: whole[:-1], lambda whole: b"\0" * len(whole)])
def test_half_written_empty_and_other_files_are_refused(tmp_path, content):
    save_checkpoint(tmp_path, make()[1])
    file = tmp_path / "ckpt.pt"
    broken = content(file.read_bytes())
    file.write_bytes(broken)
    assert f"{file} ({len(broken)} bytes) is no checkpoint: empty, cut short, damaged" in complaint(tmp_path)


def test_a_single_wrong_bit_in_the_weights_is_noticed(tmp_path):
    weights = torch.arange(1000.0)
    save_checkpoint(tmp_path, {"weights": weights})
    content = bytearray((tmp_path / "ckpt.pt").read_bytes())
    content[content.index(weights.numpy().tobytes()) + 1234] ^= 1
    (tmp_path / "ckpt.pt").write_bytes(content)
    assert "damaged" in complaint(tmp_path)


def test_other_zip_and_pytorch_files_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "letter.docx", "w") as archive:
        archive.writestr("word/document.xml", "<text/>")
    assert "letter.docx" in complaint(tmp_path / "letter.docx")
    for n, content in enumerate((torch.ones(3), {"model": {}}, {"format": "nanofbt-0"}, [1])):
        torch.save(content, tmp_path / f"{n}.pt")
        assert f"{n}.pt is a PyTorch file, but not a checkpoint of train.py" in complaint(tmp_path / f"{n}.pt")


class Opens:
    """Unpickled by Python's own pickle it makes a file: the sign that code in a checkpoint ran."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    torch.save({"format": "nanofbt-1", "step": Opens(str(tmp_path / "ran"))}, tmp_path / "ckpt.pt")
    assert "is no checkpoint" in complaint(tmp_path)
    assert names(tmp_path) == ["ckpt.pt"]


# Models from checkpoints


def test_load_model_gives_the_same_model_in_eval_mode(tmp_path):
    model, saved = make(dropout=0.5, fusion="concat", n_hidden=24)
    save_checkpoint(tmp_path, saved)
    torch.manual_seed(99)
    loaded, checkpoint = load_model(tmp_path)
    assert checkpoint["step"] == 7 and loaded.config == model.config and not loaded.training
    idx = torch.tensor([[0, 1, 2, 1]])
    with torch.no_grad():
        ours, theirs = (m(idx, idx.roll(-1, 1), 2) for m in (model.eval(), loaded))
    assert torch.equal(ours, theirs)


def test_initial_weights_takes_all_but_a_fusion_of_another_kind(tmp_path):
    plain, saved = make(seed=1, fusion="none")
    save_checkpoint(tmp_path, saved)
    ours, _ = make(seed=2, fusion="gated", block_size=8, dropout=0.1)
    untouched = {name: weight.clone() for name, weight in ours.fusion.state_dict().items()}
    initial_weights(ours, str(tmp_path), SPEC)
    assert all(torch.equal(ours.state_dict()[name], weight) for name, weight in plain.state_dict().items())
    assert untouched and all(torch.equal(ours.fusion.state_dict()[name], weight) for name, weight in untouched.items())


@pytest.mark.parametrize("kind, same", [("gated", True), ("add", False), ("none", False)])
def test_initial_weights_takes_a_fusion_of_the_same_kind_only(tmp_path, kind, same):
    theirs, saved = make(seed=1, fusion="gated")
    save_checkpoint(tmp_path, saved)
    ours, _ = make(seed=2, fusion=kind)
    initial_weights(ours, str(tmp_path), SPEC)
    assert torch.equal(ours.embedding.weight, theirs.embedding.weight)
    assert kind == "none" or torch.equal(ours.fusion.W_H.weight, theirs.fusion.W_H.weight) == same


@pytest.mark.parametrize("change, shown", [({"n_embd": 16}, "n_embd is 8 there and 16 here; give --n_embd=8"),
                                           ({"n_layer": 2}, "--n_layer=1"), ({"qk_norm": False}, "--qk_norm=True"),
                                           ({"rope_base": 500.0}, "--rope_base=10000.0")])
def test_initial_weights_of_another_shape_are_refused(tmp_path, change, shown):
    save_checkpoint(tmp_path, make()[1])
    with pytest.raises(UserError, match="--init_from=") as caught:
        initial_weights(make(**change)[0], str(tmp_path), SPEC)
    assert shown in str(caught.value)


def test_initial_weights_for_another_vocabulary_are_refused(tmp_path):
    save_checkpoint(tmp_path, make()[1])
    with pytest.raises(UserError, match="another tokenizer"):
        initial_weights(make()[0], str(tmp_path), {"kind": "char", "symbols": "\nax"})
