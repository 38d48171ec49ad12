"""The rooms of the house: what stands at the top, and who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [  # each may import those before it, and its own
    {"harness", "corpora", "model"},
    {"train", "sample", "prepare"},
    {"experiments"},
]


def files() -> list[Path]:
    rooms = [ROOT.glob("*.py"), *(ROOT.glob(f"{room}/**/*.py") for room in ("harness", "corpora"))]
    found = [file for room in [*rooms, ROOT.glob("experiments/**/*.py")] for file in room]
    return [file for file in found if file.name != "test_model.py"]


def imported(file: Path) -> set[str]:
    """The first names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def room(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def test_the_top_level_holds_the_method_and_its_four_scripts():
    done = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    top = {name for name in done.stdout.split() if "/" not in name}  # a file of your own is yours
    assert top == {"model.py", "train.py", "sample.py", "prepare.py", "test_model.py"}


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file):
    floor = next(number for number, rooms in enumerate(FLOORS) if room(file) in rooms)
    above = set().union(*FLOORS[floor + 1 :])
    assert not imported(file) & above
    if room(file) == "harness":
        assert "corpora" not in imported(file), "harness knows no corpus"


@pytest.mark.parametrize("script", ["train", "sample", "prepare"])
def test_importing_a_script_does_nothing_and_loads_little(script):
    code = f"import sys, {script}; print([name for name in sys.modules if name in sys.argv[1:]])"
    unwanted = ["corpora.pydocs", "corpora.tasks", "matplotlib", "scipy", "sklearn", "tiktoken"]
    done = subprocess.run(
        [sys.executable, "-c", code, *unwanted], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
