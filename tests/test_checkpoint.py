"""Checkpoints: whole or not at all, read without running code, and checked in every respect."""

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

ROOT = Path(__file__).parents[1]
SHAPE = {"vocab_size": 3, "block_size": 4, "n_layer": 1, "n_head": 1, "n_embd": 8}
SPEC = {"kind": "char", "symbols": "\nab"}


def make(seed=0, **changes) -> tuple[GPT, dict]:
    """A model, and a checkpoint of it as the trainer would write it."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SHAPE | changes))
    checkpoint = {
        "model_config": asdict(model.config),
        "train_config": {"dataset": "letters"},
        "tokenizer": SPEC,
        "dataset": {"sha256": "0"},
        "model": model.state_dict(),
        "optimizers": [{"state": {0: {"exp_avg": torch.ones(2)}}}],
        "step": 7,
        "feedback_steps": 7,
        "val_losses": [1.5, 1.25],
    }
    return model, checkpoint


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
        for name, weight in model.state_dict().items():
            assert torch.equal(loaded["model"][name], weight)
        assert torch.equal(loaded["optimizers"][0]["state"][0]["exp_avg"], torch.ones(2))
        assert loaded["step"] == 7 and loaded["val_losses"] == [1.5, 1.25]
        assert loaded["tokenizer"] == SPEC
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


@pytest.mark.parametrize(
    "failure, error",
    [
        (fails_in_pickling, Exception),
        (fails_at_the_last_moment, UserError),
        (interrupted, KeyboardInterrupt),
    ],
)
def test_a_save_that_fails_leaves_the_checkpoint_before_and_nothing_else(
    tmp_path, monkeypatch, failure, error
):
    save_checkpoint(tmp_path, make()[1])
    before = (tmp_path / "ckpt.pt").read_bytes()
    checkpoint = failure(monkeypatch)
    with pytest.raises(error):
        save_checkpoint(tmp_path, checkpoint)
    assert names(tmp_path) == ["ckpt.pt"] and (tmp_path / "ckpt.pt").read_bytes() == before


def test_a_full_disk_is_said_in_one_line(tmp_path):
    resource = pytest.importorskip("resource")  # Unix only
    save_checkpoint(tmp_path, make()[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    problem = "cannot be written .*File too large.*before, if any, is kept"
    try:
        with pytest.raises(UserError, match=problem) as caught:
            save_checkpoint(tmp_path, {"step": 2, "weights": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["ckpt.pt"] and load_checkpoint(tmp_path)["step"] == 7


def test_the_new_file_is_on_disk_before_it_takes_the_old_one_s_place(tmp_path, monkeypatch):
    seen = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(file):
        seen.append(os.fstat(file).st_size)
        fsync(file)

    def noting_replace(old, new):
        seen.append(os.path.getsize(old))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    save_checkpoint(tmp_path, {"step": 1})
    assert seen == [os.path.getsize(tmp_path / "ckpt.pt")] * 2  # whole when it is put on disk


def test_kill_9_while_saving_keeps_the_last_checkpoint(tmp_path):
    save_checkpoint(tmp_path, make()[1])
    program = """
import os, signal, sys, torch
from pathlib import Path
from harness.checkpoint import save_checkpoint
def killed(checkpoint, file):
    file.write(b"half a file")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
save_checkpoint(Path(sys.argv[1]), {"step": 2})
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2 and load_checkpoint(tmp_path)["step"] == 7
    save_checkpoint(tmp_path, make()[1] | {"step": 8})
    assert names(tmp_path) == ["ckpt.pt"] and load_checkpoint(tmp_path)["step"] == 8


# Loading what is not a checkpoint


def test_missing_checkpoints_are_named_with_those_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert f"(in {tmp_path}); none were found under out/. To train one" in complaint("empty")
    runs = [f"out/{name}" for name in "dbfaec"]
    for run in runs:
        (tmp_path / run).mkdir(parents=True)
        save_checkpoint(tmp_path / run, {"step": 1})
    listed = ", ".join(sorted(runs))
    places = (("empty", "empty/ckpt.pt"), ("out/demo", "out/demo"), ("no.pt", "no.pt"))
    for path, file in places:
        message = complaint(path)
        assert f"no checkpoint at {file} (in {tmp_path});" in message
        assert f"there are: {listed}." in message
        assert "python train.py" in message


def test_a_path_that_is_too_long_is_one_line(tmp_path):
    message = complaint("x" * 5000)
    assert "no checkpoint can be there: File name too long" in message and len(message) < 200


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, make()[1])

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zipfile, "ZipFile", refuse)
    message = complaint(tmp_path)
    assert "cannot be read (Permission denied)" in message and "damaged" not in message


@pytest.mark.parametrize(
    "content",
    [
        lambda whole: b"",
        lambda whole: b"To be, or not to be\n",
        lambda whole: b".",
        lambda whole: b"}\n",
        lambda whole: whole[: len(whole) // 1000],
        lambda whole: whole[: len(whole) // 10],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[: len(whole) * 9 // 10],
        lambda whole: whole[: len(whole) * 999 // 1000],
        lambda whole: whole[:-1],
        lambda whole: b"\0" * len(whole),
    ],
)
def test_half_written_empty_and_other_files_are_refused(tmp_path, content):
    save_checkpoint(tmp_path, make()[1])
    file = tmp_path / "ckpt.pt"
    broken = content(file.read_bytes())
    file.write_bytes(broken)
    said = f"{file} ({len(broken)} bytes) is not a checkpoint: empty, cut short, damaged"
    assert said in complaint(tmp_path)


def test_a_single_wrong_bit_in_the_weights_is_noticed(tmp_path):
    model, checkpoint = make()
    save_checkpoint(tmp_path, checkpoint)
    content = bytearray((tmp_path / "ckpt.pt").read_bytes())
    weights = model.blocks[0].mlp.up.weight.detach().numpy().tobytes()
    content[content.index(weights) + 123] ^= 1
    (tmp_path / "ckpt.pt").write_bytes(content)
    assert "damaged" in complaint(tmp_path)


def test_other_zip_and_pytorch_files_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "letter.docx", "w") as archive:
        archive.writestr("word/document.xml", "<text/>")
    assert "letter.docx" in complaint(tmp_path / "letter.docx")
    for n, content in enumerate((torch.ones(3), {"model": {}}, {"format": "nanofbt-0"}, [1])):
        torch.save(content, tmp_path / f"{n}.pt")
        said = f"{n}.pt is a PyTorch file, but not a checkpoint of train.py"
        assert said in complaint(tmp_path / f"{n}.pt")


class Opens:
    """Unpickled by Python's own pickle it makes a file: the sign that code in a checkpoint ran."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    content = {"format": "nanofbt-1", "step": Opens(str(tmp_path / "ran"))}
    torch.save(content, tmp_path / "ckpt.pt")
    assert "is not a checkpoint" in complaint(tmp_path)
    assert names(tmp_path) == ["ckpt.pt"]


# Checkpoints of other code


def without(names: dict, name: str) -> dict:
    return {key: value for key, value in names.items() if key != name}


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda saved: without(saved, "tokenizer"), "it lacks tokenizer"),
        (
            lambda saved: saved | {"model_config": without(saved["model_config"], "eps")},
            "model_config lacks eps",
        ),
        (
            lambda saved: saved | {"model_config": saved["model_config"] | {"n_expert": 8}},
            "model_config has n_expert besides",
        ),
        (
            lambda saved: saved | {"model_config": saved["model_config"] | {"fusion": "magic"}},
            "its model_config cannot be built (fusion='magic'",
        ),
        (
            lambda saved: saved | {"model": without(saved["model"], "blocks.0.mlp.up.weight")},
            "its model lacks blocks.0.mlp.up.weight",
        ),
        (
            lambda saved: saved | {"model": saved["model"] | {"bias": torch.ones(2)}},
            "its model has bias besides",
        ),
        (
            lambda saved: saved
            | {"model": saved["model"] | {"output_norm.weight": torch.ones(9)}},
            "output_norm.weight has shape (9,), and here (8,)",
        ),
    ],
)
def test_a_checkpoint_of_other_code_says_what_differs(tmp_path, change, said):
    """A setting that it lacks is not filled in with today's default."""
    save_checkpoint(tmp_path, change(make()[1]))
    message = complaint(tmp_path)
    assert f"was made by another version of the code: {said}" in message
    for use in (load_model, lambda path: initial_weights(make()[0], str(path), SPEC)):
        with pytest.raises(UserError, match="another version of the code"):
            use(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path, value):
    model, checkpoint = make()
    with torch.no_grad():
        model.output_norm.weight[3] = value
    save_checkpoint(tmp_path, checkpoint)
    said = f"{tmp_path}/ckpt.pt: output_norm.weight has weights that are not finite"
    for use, flag in (
        (load_model, ""),
        (lambda path: initial_weights(make()[0], str(path), SPEC), "--init_from: "),
    ):
        with pytest.raises(UserError) as caught:
            use(tmp_path)
        assert str(caught.value).startswith(flag + said)
        assert "--learning_rate" in str(caught.value)


# Models from checkpoints


def test_load_model_gives_the_same_model_in_eval_mode(tmp_path):
    model, saved = make(dropout=0.5, fusion="concat", n_hidden=24)
    save_checkpoint(tmp_path, saved)
    torch.manual_seed(99)
    loaded, checkpoint = load_model(tmp_path)
    assert checkpoint["step"] == 7 and loaded.config == model.config and not loaded.training
    idx = torch.tensor([[0, 1, 2, 1]])
    with torch.no_grad():
        ours = model.eval()(idx, idx.roll(-1, 1), 2)
        theirs = loaded(idx, idx.roll(-1, 1), 2)
    assert torch.equal(ours, theirs)


def test_initial_weights_takes_all_but_a_fusion_of_another_kind(tmp_path):
    plain, saved = make(seed=1, fusion="none")
    save_checkpoint(tmp_path, saved)
    ours, _ = make(seed=2, fusion="gated", block_size=8, dropout=0.1)
    untouched = {name: weight.clone() for name, weight in ours.fusion.state_dict().items()}
    initial_weights(ours, str(tmp_path), SPEC)
    for name, weight in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight)
    assert len(untouched) == 2
    for name, weight in untouched.items():
        assert torch.equal(ours.fusion.state_dict()[name], weight)


@pytest.mark.parametrize("kind, same", [("gated", True), ("add", False), ("none", False)])
def test_initial_weights_takes_a_fusion_of_the_same_kind_only(tmp_path, kind, same):
    theirs, saved = make(seed=1, fusion="gated")
    save_checkpoint(tmp_path, saved)
    ours, _ = make(seed=2, fusion=kind)
    initial_weights(ours, str(tmp_path), SPEC)
    assert torch.equal(ours.embedding.weight, theirs.embedding.weight)
    if kind != "none":
        assert torch.equal(ours.fusion.W_H.weight, theirs.fusion.W_H.weight) == same


@pytest.mark.parametrize(
    "change, shown",
    [
        ({"n_embd": 16}, "n_embd is 8 there and 16 here; give --n_embd=8"),
        ({"n_layer": 2}, "--n_layer=1"),
        ({"qk_norm": False}, "--qk_norm=True"),
        ({"rope_base": 500.0}, "--rope_base=10000.0"),
        ({"n_layer": 2, "qk_norm": False}, "give --n_layer=1 --qk_norm=True"),
    ],
)
def test_initial_weights_of_another_shape_are_refused(tmp_path, change, shown):
    save_checkpoint(tmp_path, make()[1])
    with pytest.raises(UserError, match="--init_from=") as caught:
        initial_weights(make(**change)[0], str(tmp_path), SPEC)
    assert shown in str(caught.value)


def test_initial_weights_for_another_vocabulary_are_refused(tmp_path):
    save_checkpoint(tmp_path, make()[1])
    with pytest.raises(UserError, match="its tokenizer is not that of the dataset"):
        initial_weights(make()[0], str(tmp_path), {"kind": "char", "symbols": "\nax"})
