"""What the project exists for: the README's new kind of fusion, added to a copy of the project."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("harness", "corpora", "model.py", "train.py", "sample.py", "test_model.py")
TINY = ["--n_layer=1", "--n_embd=16", "--n_head=2", "--block_size=16", "--batch_size=2"]
FOUR_STEPS = ["--max_iters=4", "--eval_interval=2", "--eval_iters=1", "--warmup_iters=1"]


def readme_edits() -> tuple[str, list[tuple[str, str]]]:
    """The kind's name, and the README's diff of model.py as pairs of old and new lines."""
    readme = (ROOT / "README.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", readme, flags=re.DOTALL)
    edits = []
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", "-"))
        new = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", "+"))
        if old:
            edits.append((old, new))
    (name,) = re.findall(r'--fusion=(\w+) --out_dir=out/mine', readme)
    return name, edits


@pytest.fixture(scope="module")
def copy(tmp_path_factory, corpus) -> Path:
    """A copy of the project in which the README's edits are made."""
    folder = tmp_path_factory.mktemp("copy")
    for room in ROOMS:
        if (ROOT / room).is_dir():
            shutil.copytree(ROOT / room, folder / room)
        else:
            shutil.copy(ROOT / room, folder / room)
    model = (folder / "model.py").read_text()
    _, edits = readme_edits()
    for old, new in edits:
        assert model.count(old) == 1, f"the README's diff does not fit model.py:\n{old}"
        model = model.replace(old, new)
    (folder / "model.py").write_text(model)
    return folder


def test_the_edits_are_in_fusion_alone():
    name, edits = readme_edits()
    model = (ROOT / "model.py").read_text()
    start = model.index("class Fusion")
    end = model.index("def rotate")
    for old, new in edits:
        at = model.index(old)
        assert start < at < end or old.startswith("FusionKind"), old
        assert len(new.splitlines()) - len(old.splitlines()) <= 3
    assert f'"{name}"' not in model


PROGRAM = """
import sys, pytest, sample, train
settings, name = sys.argv[2:], sys.argv[1]
assert train.main([f"--fusion={name}", *settings]) == 0
sample.main(["out/mine", "--mode=all", "--max_new_tokens=5"])
sys.exit(pytest.main(["-q", "test_model.py", "-k", name]))
"""


def test_a_new_kind_trains_samples_and_passes_the_tests_of_the_method(copy, corpus):
    name, _ = readme_edits()
    place = [f"--data_dir={corpus}", "--dataset=tiny", "--out_dir=out/mine", "--device=cpu"]
    words = [sys.executable, "-c", PROGRAM, name, *TINY, *FOUR_STEPS, *place]
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "=== Soft" in done.stdout and "=== Fused" in done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= 10
