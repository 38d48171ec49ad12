"""What the README and the Makefile tell a user to type: every command runs, in miniature, in its order."""

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = {
    "train": "--n_layer=1 --n_embd=16 --n_head=2 --block_size=16 --max_iters=4 --batch_size=2 --eval_interval=2 "
             "--eval_iters=1 --log_interval=1 --warmup_iters=1 --device=cpu",
    "sample": "--max_new_tokens=3 --device=cpu",
    "experiments.decoding_modes": "--n_windows=4 --n_samples=2 --max_new_tokens=8 --device=cpu",
    "experiments.kv_replay": "--n_windows=2 --repeats=1 --device=cpu",
    "bench": "--n_layer=1 --n_embd=16 --n_head=2 --block_size=16 --batch_size=2 --rounds=1 --compile=false",
    "experiments.loss_curves": "--smooth=1",
    "experiments.ablations": "--seeds=1 --jobs=1 --n_windows=4 --device=cpu",
    "experiments.probe": "--limit=4 --device=cpu",
}


def commands(text: str) -> list[list[str]]:
    """The arguments of every `python ...` in code blocks and in-line code, as `script or module, argument, ...`."""
    text = text.replace("\\\n", " ")  # a command may go on in the next line
    found = re.findall(r"^\s*(?:\.venv/bin/)?python (.*)$|`(?:\.venv/bin/)?python ([^`]*)`", text, flags=re.MULTILINE)
    lines = [re.sub(r"\$\(.*\)", "--overwrite", first or second) for first, second in found]
    return [shlex.split(line, comments=True) for line in lines if "..." not in line and "CHECKPOINT" not in line]


def run_small(words: list[str], cwd: Path) -> None:
    """One command with little to do; the corpora are local files, since tests neither download nor read the manual."""
    name, arguments = (words[1], words[2:]) if words[0] == "-m" else (words[0].removesuffix(".py"), words[1:])
    if name in ("pip", "venv"):
        return
    if name == "prepare" and arguments[:1] in (["pydocs"], ["shakespeare"]):
        arguments = [f"--input={cwd}/text.txt", f"--name={arguments[0]}"]
    if not any(argument in ("--help", "--input=FILE") for argument in arguments):
        small = SMALL.get(name, "--n_windows=4 --device=cpu" if name.startswith("experiments") else "")
        if arguments[:1] == ["config/tasks.toml"] and name == "train":
            small += " --block_size=704 --batch_size=1"  # the probe's longest prompts fit
        assert importlib.import_module(name).main([*arguments, *small.split()]) in (0, None), words


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the recipes and a text that has all that the commands' prompts need."""
    shutil.copytree(ROOT / "config", tmp_path / "config")
    (tmp_path / "text.txt").write_text("ROMEO: Return the\n" + "".join(f"{n} and {n * n}.\n\n" for n in range(400)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_makefile_and_the_readme_runs(folder, small_preset):
    demo = subprocess.run(["make", "-n", "-o", ".venv/ready", "demo"], cwd=ROOT, capture_output=True, text=True)
    steps = commands(demo.stdout)
    assert [words[0].removesuffix(".py") for words in steps[:2]] == ["prepare", "train"] and len(steps) == 6
    for words in steps:
        run_small(words, folder)
    assert {"ckpt.pt", "log.jsonl", "loss.png"} <= {path.name for path in (folder / "out" / "demo").iterdir()}
    listed = commands((ROOT / "README.md").read_text())
    assert len(listed) >= 18 and any("--init_from=out/half" in words for words in listed)
    for number, words in enumerate(listed):
        if words[0] == "train.py":  # another recipe may have used the folder's name before
            words = [*words, "--overwrite"]
        run_small(words, folder)
    made, kept = ({path.relative_to(root) for path in (root / "results").rglob("*.json")} for root in (folder, ROOT))
    assert made == kept


def test_what_the_readme_points_to_exists():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\((assets/[^)]+)\)|`(config/[a-z0-9_]+\.toml)`", text):
        assert (ROOT / (path[0] or path[1])).is_file(), path
    table = text[text.index("| paper |"):text.index("Shapes are at the end")]
    tests = "\n".join(path.read_text() for path in ROOT.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", table)
    assert len(named) >= 20 and all(f"def {name}(" in tests for name in named)
    code = "\n".join((ROOT / name).read_text() for name in ("model.py", "train.py"))
    for name in re.findall(r"`(?:GPT|train)\.(\w+)`", table):
        assert f"def {name}(" in code, name


def test_which_python_is_said_before_it_is_used():
    before, _ = (ROOT / "README.md").read_text().split("`python` stands for `.venv/bin/python`")
    assert not commands(before)


def test_departures_from_the_paper_are_tagged_and_listed():
    tags = sum((ROOT / name).read_text().count("DEVIATION:") for name in ("model.py", "train.py"))
    text = (ROOT / "README.md").read_text()
    part = text[text.index("Differences from the paper"):text.index("## The three modes")]
    listed = re.findall(r"^- ", part, re.MULTILINE)
    assert tags == len(listed) == 5
