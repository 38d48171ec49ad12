"""What README.md, results/README.md and the Makefile say: commands, tables, numbers, links."""

import contextlib
import functools
import importlib
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
SMALL = {
    "train": "--n_layer=1 --n_embd=16 --n_head=2 --n_hidden=0 --block_size=16 --max_iters=4 "
    "--batch_size=2 --eval_interval=2 --eval_iters=1 --log_interval=1 --warmup_iters=1 "
    "--device=cpu",
    "sample": "--max_new_tokens=3 --device=cpu",
    "experiments.decoding_modes": "--n_windows=4 --n_samples=2 --max_new_tokens=8 --device=cpu",
    "experiments.loss_curves": "--smooth=1",
    "experiments.state_tracking": "--n_windows=4 --n_moves=8 --passes=2 --device=cpu",
}


def words_of(lines: list[str]) -> list[list[str]]:
    """The words of each command, without those that hold a placeholder in capitals."""
    lines = [re.sub(r"\$\(.*\)", "--overwrite", line) for line in lines]
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if not re.search(r"[A-Z]{4}|\.\.\.", " ".join(words))]


def in_blocks(text: str) -> list[list[str]]:
    """Every `python ...` that stands on a line of its own."""
    text = text.replace("\\\n", " ")  # a command may continue in the next line
    return words_of(re.findall(r"^\s*(?:\.venv/bin/)?python (.*)$", text, flags=re.MULTILINE))


def in_sentences(text: str) -> list[list[str]]:
    """Every `python ...` in running text and in tables."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return words_of(re.findall(r"`python ([^`]*)`", re.sub(r"\s+", " ", text)))


def script_of(words: list[str]) -> tuple[str, list[str]]:
    """The module that a command runs, and its arguments."""
    if words[0] == "-m":
        return words[1], words[2:]
    return words[0].removesuffix(".py").replace("/", "."), words[1:]


def given_once(arguments: list[str]) -> list[str]:
    """The last word for each flag, since a script refuses a flag that is given twice."""
    last = {word.split("=")[0]: word for word in arguments}
    return list(last.values())


def run_small(words: list[str], folder: Path) -> None:
    """One command with little to do; corpora are local files, since tests download nothing."""
    name, arguments = script_of(words)
    if name in ("pip", "venv", "ruff", "pytest"):
        return
    if name == "prepare" and arguments[:1] in (["pydocs"], ["shakespeare"]):
        arguments = [f"--input={folder}/text.txt", f"--name={arguments[0]}"]
    if name == "train":
        arguments = [*arguments, "--overwrite"]  # another command may have used the folder's name
    small = SMALL.get(name, "--n_windows=4 --device=cpu" if name.startswith("experiments") else "")
    arguments = given_once([*arguments, *small.split()])
    assert importlib.import_module(name).main(arguments) in (0, None), words


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the recipes, and a text with all that the prompts need."""
    shutil.copytree(ROOT / "config", tmp_path / "config")
    lines = "".join(f"{n} and {n * n}.\n\n" for n in range(400))
    (tmp_path / "text.txt").write_text(f"ROMEO: Return the\n{lines}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_make_demo_and_of_the_readme_runs(folder):
    demo = subprocess.run(
        ["make", "-n", "-o", ".venv/ready", "demo"], cwd=ROOT, capture_output=True, text=True
    )
    steps = in_blocks(demo.stdout)
    names = [script_of(words)[0] for words in steps]
    assert names[:3] == ["prepare", "train", "train"]
    assert names[-1] == "experiments.decoding_modes"
    for words in steps:
        run_small(words, folder)
    made = {path.name for path in (folder / "out" / "demo").iterdir()}
    assert {"ckpt.pt", "log.jsonl", "decoding_modes.json"} <= made
    listed = [words for words in in_blocks(README) if words not in steps]
    assert len(listed) >= 8
    for words in listed:
        run_small(words, folder)


ELSEWHERE = [*in_sentences(README), *in_blocks(RESULTS), *in_sentences(RESULTS)]


@pytest.mark.parametrize("words", ELSEWHERE, ids=" ".join)
def test_other_commands_name_things_that_exist(words):
    """What they do is held by the tests of each script; here their flags and recipes are."""
    name, arguments = script_of(words)
    path = ROOT / name.replace(".", "/")
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
    for argument in arguments:
        if argument.startswith("config/"):
            assert (ROOT / argument).is_file(), argument
    flags = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
    if flags - {"--help"}:
        known = re.findall(r"--\w+", help_of(name))
        assert flags <= set(known), flags - set(known)


@functools.cache
def help_of(name: str) -> str:
    package = (ROOT / name.replace(".", "/") / "__main__.py").is_file()
    module = importlib.import_module(f"{name}.__main__" if package else name)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        module.main(["--help"])
    return text.getvalue()


@pytest.mark.parametrize("text", [README, RESULTS], ids=["README.md", "results/README.md"])
def test_every_row_of_a_table_has_its_headers_cells(text):
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    tables = re.findall(r"(?:^\|.*\|[ ]*\n)+", text, flags=re.MULTILINE)
    assert tables
    for table in tables:
        header, ruler, *rows = [line.strip().split("|") for line in table.strip().splitlines()]
        assert set("".join(ruler)) <= set("-: "), table
        assert rows, table
        for row in rows:
            assert len(row) == len(header) == len(ruler), "|".join(row)


def decimals_in(value) -> list[float]:
    """All numbers in a JSON value, however deep."""
    if isinstance(value, dict):
        return decimals_in(list(value.values()))
    if isinstance(value, list):
        return [number for part in value for number in decimals_in(part)]
    return [value] if isinstance(value, float) else []


def records_in(value) -> list[dict]:
    """The dicts in a JSON value, however deep, that hold more than other dicts and lists."""
    found = []
    if isinstance(value, dict):
        if any(not isinstance(part, (dict, list)) for part in value.values()):
            found.append(value)
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            found += records_in(part)
    return found


# A row of these tables has numbers of several runs, which only the whole file holds together.
SEVERAL_RUNS_A_ROW = (
    "gaps.json",
    "long/decoding_modes.json",
    "plain_prompt/state_tracking.json",
    "recipes/state_tracking.json",
    "state_tracking.json",
    "window/state_tracking.json",
    "written_looks.json",
)
MARKED = re.findall(r"<!-- numbers: (.*?) -->\n+((?:\|.*\n)+)", README + RESULTS)


@pytest.mark.parametrize("file, table", MARKED, ids=[file for file, _ in MARKED])
def test_numbers_of_the_tables_are_in_the_json_that_they_come_from(file, table):
    """Below `<!-- numbers: FILE.json -->` a row's decimals lie, with sign, in one record of it.

    A record is a run's, an arm's or a row's dict. The whole file is none, because there a number
    of another row would pass.
    """
    content = json.loads((ROOT / "results" / file).read_text())
    several = file in SEVERAL_RUNS_A_ROW
    sources = [content] if several else records_in(list(content.values()))
    sources = [decimals_in(source) for source in sources]
    _, _, *rows = table.splitlines()
    for row in rows:
        wanted = re.findall(r"[-+]?\d+\.\d+", row)
        assert any(all(is_shown(number, known) for number in wanted) for known in sources), row


def is_shown(number: str, values: list[float]) -> bool:
    """Whether one of the values, rounded to as many digits, is this number of a table."""
    digits = len(number.split(".")[1])
    return number.removeprefix("+") in {f"{value:.{digits}f}" for value in values}


def test_the_readme_is_short_enough_to_be_finished():
    assert len(README.splitlines()) <= 250


def test_what_the_readmes_point_to_exists():
    for text, folder in ((README, ROOT), (RESULTS, ROOT / "results")):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (folder / target).exists(), target
        for target in re.findall(r"`((?:config|experiments|results)/[\w./]+\.\w+)`", text):
            assert (ROOT / target).exists(), target
    headings = re.findall(r"^#+ (.*)$", RESULTS, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\(results/README\.md#([^)]+)\)", README)) <= anchors


def test_equations_lead_to_code_and_tests():
    table = README[README.index("| paper |") :]
    table = table[: table.index("\n\n")]
    tests = (ROOT / "test_model.py").read_text() + (ROOT / "tests" / "test_train.py").read_text()
    named = re.findall(r"`(test_\w+)`", table)
    assert len(named) >= 12
    for name in named:
        assert f"def {name}(" in tests, name
    code = (ROOT / "model.py").read_text() + (ROOT / "train.py").read_text()
    for name in re.findall(r"`(?:GPT|train|KVCache)\.(\w+)`", table):
        assert f"def {name}(" in code, name


def test_departures_from_the_paper_are_tagged_and_listed():
    code = (ROOT / "model.py").read_text() + (ROOT / "train.py").read_text()
    tags = len(re.findall(r"(?<!`)DEVIATION:", code))
    part = RESULTS[RESULTS.index("## Departures from the paper") :]
    listed = re.findall(r"^- \*\*In the code\*\*", part, re.MULTILINE)
    assert tags == len(listed) >= 5
    assert "results/README.md#departures-from-the-paper" in README
