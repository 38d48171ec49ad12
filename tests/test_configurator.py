"""configurator.py against settings made here: types, typos, files, order, --help, exit codes."""

import ast
import io
import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Literal

import pytest

from harness.configurator import (
    FROM_NANOGPT,
    OneProcessError,
    UserError,
    build,
    open_streams,
    parse,
    require,
    run,
    setting,
    suggestion,
)
from model import GPTConfig

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Shape:
    vocab_size: int = setting(7, "set by the tokenizer", flag=False)
    n_head: int = setting(4, "attention heads")
    n_embd: int = setting(64, "width")
    dropout: float = setting(0.25, "share dropped, 25% say")
    fusion: Literal["gated", "add", "none"] = setting("gated", "the fusion")

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size} must be positive")


@dataclass(frozen=True)
class Weight:
    lam: float = setting(1.0, "a reserved word")

    def __post_init__(self):
        require(self, "lam", self.lam > 0, "positive")


@dataclass(frozen=True)
class Run:
    learning_rate: float = setting(0.5, "step size")
    max_iters: int = setting(10, "steps")
    compile: bool = setting(False, "compile it")
    resume: bool = setting(True, "go on")
    out_dir: str = setting("out", "folder", path=True)
    lam: float = setting(1.0, "a reserved word")
    pass_mix: tuple[float, ...] = setting((1.0,), "shares")
    sizes: tuple[int, ...] = setting((1, 2), "whole numbers")
    note: str | None = setting(None, "may be absent")


def settings(*argv: str) -> tuple[Shape, Run]:
    shape, run, _ = parse(list(argv), Shape, Run)
    return shape, run


def complaint(*argv: str, **options) -> str:
    """The UserError's text, which must be one line."""
    with pytest.raises(UserError) as caught:
        parse(list(argv), Shape, Run, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "some.toml").write_text(text)
        return str(tmp_path / "some.toml")

    return write


def test_defaults_frozen_and_off_the_command_line():
    shape, run = settings()
    assert (shape.vocab_size, shape.n_head, shape.dropout, shape.fusion) == (7, 4, 0.25, "gated")
    assert (run.learning_rate, run.compile, run.resume, run.lam, run.pass_mix, run.note) == (
        0.5,
        False,
        True,
        1.0,
        (1.0,),
        None,
    )
    with pytest.raises(FrozenInstanceError):
        run.max_iters = 3
    assert "unknown argument '--vocab_size=9'" in complaint("--vocab_size=9")


@pytest.mark.parametrize(
    "word, name, value",
    [
        ("--learning_rate=1", "learning_rate", 1.0),  # an int where a float is expected
        ("--learning_rate=1e-3", "learning_rate", 0.001),
        (
            "--learning_rate=-2",
            "learning_rate",
            -2.0,
        ),  # whether it makes sense is the dataclass's business
        ("--learning_rate=inf", "learning_rate", float("inf")),
        ("--max_iters=1e3", "max_iters", 1000),
        ("--max_iters=20.0", "max_iters", 20),
        ("--max_iters=-1", "max_iters", -1),
        (
            "--max_iters=9007199254740993",
            "max_iters",
            9007199254740993,
        ),  # 2^53 + 1, which no float holds
        ("--compile=false", "compile", False),
        ("--compile=TRUE", "compile", True),
        ("--resume=False", "resume", False),
        ("--compile=1", "compile", True),
        ("--resume=0", "resume", False),
        ("--out_dir=", "out_dir", ""),
        ("--out_dir=1e3", "out_dir", "1e3"),
        ("--out_dir=a=b", "out_dir", "a=b"),
        ("--lambda=0.5", "lam", 0.5),
        ("--pass_mix=0.75,0.22,0.03", "pass_mix", (0.75, 0.22, 0.03)),
        ("--pass_mix=[0, 0, 1]", "pass_mix", (0.0, 0.0, 1.0)),
        ("--pass_mix=(1,)", "pass_mix", (1.0,)),
        ("--sizes=3", "sizes", (3,)),
        ("--note=x", "note", "x"),
    ],
)
def test_values_from_the_command_line(word, name, value):
    for argv in ([word], word.split("=", 1)):  # --key=value and --key value
        got = getattr(settings(*argv)[1], name)
        assert got == value and type(got) is type(value), argv
    if isinstance(value, tuple):
        assert [type(part) for part in got] == [type(part) for part in value]


def test_literal_and_zero_dropout():
    shape, _ = settings("--fusion=none", "--dropout=0")
    assert shape.fusion == "none" and shape.dropout == 0.0 and type(shape.dropout) is float


@pytest.mark.parametrize(
    "word, parts",
    [
        ("--learning_rte=1e-3", ["'--learning_rte=1e-3'", "did you mean learning_rate?"]),
        ("--learning-rate=1", ["'--learning-rate=1'", "did you mean learning_rate?"]),
        (
            "--learning=1",
            ["unknown argument '--learning=1'"],
        ),  # no abbreviations: they change when a setting is added
        ("--lam=1", ["unknown argument '--lam=1'", "did you mean lambda?"]),
        ("-x", ["unknown argument '-x'"]),
        ("--max_iters=1.5", ["--max_iters", "whole number", "'1.5'"]),
        ("--max_iters=many", ["--max_iters", "whole number", "'many'"]),
        ("--max_iters=", ["--max_iters", "whole number", "''"]),
        ("--max_iters=inf", ["--max_iters", "whole number", "'inf'"]),
        ("--max_iters=nan", ["--max_iters", "whole number", "'nan'"]),
        ("--max_iters=true", ["--max_iters", "whole number", "'true'"]),
        (
            "--max_iters=\u00b2",
            ["--max_iters", "whole number"],
        ),  # a digit to str.isdigit, not to int
        ("--learning_rate=fast", ["--learning_rate", "a number", "'fast'"]),
        ("--learning_rate=nan", ["--learning_rate", "a number", "'nan'"]),
        ("--learning_rate=0,001", ["--learning_rate", "a number", "'0,001'"]),
        ("--compile=yes", ["--compile", "true or false", "'yes'"]),
        ("--compile=", ["--compile", "true or false", "''"]),
        ("--fusion=gatd", ["--fusion", "'gatd'", "gated, add, none", "did you mean gated?"]),
        ("--fusion=Gated", ["--fusion", "'Gated'"]),
        ("--pass_mix=a,b", ["--pass_mix", "a number", "'a'"]),
        ("--pass_mix=0.5,,0.5", ["--pass_mix", "a number", "''"]),
        ("--pass_mix=", ["--pass_mix", "a number", "''"]),
        ("--sizes=1,2.5", ["--sizes", "whole number", "'2.5'"]),
        ("--max_iters", ["--max_iters: expected one argument"]),
        ("--learning_rate", ["--learning_rate: expected one argument"]),
        ("--out_dir", ["--out_dir: expected one argument"]),
        ("--pass_mix", ["--pass_mix: expected one argument"]),
        (
            "--n_head=3",
            ["--n_embd=64 must be a multiple of n_head=3"],
        ),  # the dataclass's own ValueError
    ],
)
def test_mistakes_on_the_command_line(word, parts):
    message = complaint(word)
    assert all(part in message for part in parts), message


def test_a_flag_without_a_value_before_another_flag():
    assert complaint("--max_iters", "--compile").startswith("--max_iters: expected one argument")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--max_iters=3", "--max_iters=4"], "--max_iters is given twice, '3' and '4'"),
        (["--out_dir=a", "--n_head=2", "--out_dir", "b"], "--out_dir is given twice, 'a' and 'b'"),
        (["--lambda=1", "--lambda=1"], "--lambda is given twice, '1' and '1'"),
        (["--compile", "--compile=false"], "--compile is given twice, 'true' and 'false'"),
    ],
)
def test_a_flag_given_twice(argv, message):
    assert complaint(*argv) == message + "; give it once"
    assert complaint(*argv, positional="corpus") == message + "; give it once"


def test_values_that_start_with_a_dash():
    for value in ("-5+3", "-x", "-", "-1e3", "-1 -2"):
        assert settings("--note", value, "--max_iters=2")[1].note == value
        assert settings(f"--note={value}")[1].note == value
    message = complaint("--note", "--dashes")
    assert message == (
        "--note: expected one argument; write --note=VALUE, also where the value starts with a dash"
    )
    assert settings("--note=--dashes")[1].note == "--dashes"  # the way out
    assert complaint("--note", "--max_iters=2") == message
    assert "-x" in complaint("-x", "--note=1")


def test_paths_are_expanded_wherever_they_come_from(toml, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    expected = os.path.join(str(tmp_path), "runs/a")
    assert settings("--out_dir=~/runs/a")[1].out_dir == expected
    assert settings("--out_dir", "~/runs/a")[1].out_dir == expected
    assert settings(toml('out_dir = "~/runs/a"'))[1].out_dir == expected
    assert settings("~/some.toml")[1].out_dir == expected  # the config file's own path
    assert parse(["~/x", "y"], Shape, positional="checkpoint")[-1] == [f"{tmp_path}/x", "y"]
    assert settings("--out_dir=~")[1].out_dir == str(tmp_path)
    assert settings("--out_dir=a~b/~")[1].out_dir == "a~b/~"
    assert settings("--out_dir=")[1].out_dir == ""
    assert settings("--note=~/x")[1].note == "~/x"  # not a path
    message = complaint("--out_dir=~nobody-here/x")
    assert message == (
        "--out_dir=~nobody-here/x: no home folder is known for ~nobody-here; give the full path"
    )


def test_the_house_s_paths_are_marked():
    """Every setting that is named like a path, in any script, is expanded."""
    names = "data_dir|out_dir|results_dir|cache_dir|init_from|prompt_file|input|json|out"
    found = 0
    for file in ROOT.rglob("*.py"):
        if file.relative_to(ROOT).parts[0] in (".venv", "tests"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_setting = isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)
            if not (is_setting and re.fullmatch(names, getattr(node.target, "id", ""))):
                continue
            if getattr(node.value.func, "id", "") == "setting":
                options = {w.arg: getattr(w.value, "value", None) for w in node.value.keywords}
                if options.get("flag", True):  # else nobody can set it
                    found += 1
                    assert options.get("path"), f"{file}:{node.lineno}"
    assert found > 10


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfmax_iters = 3\r\nout_dir = 'x'\r\n",
        b"max_iters = 3\r\nout_dir = 'x'",
    ],
)
def test_toml_that_an_editor_on_windows_saved(tmp_path, content):
    (tmp_path / "windows.toml").write_bytes(content)
    run = settings(str(tmp_path / "windows.toml"))[1]
    assert (run.max_iters, run.out_dir) == (3, "x")


def test_toml_in_another_encoding_names_it(tmp_path):
    (tmp_path / "power.toml").write_bytes("\ufeffmax_iters = 3\r\n".encode("utf-16-le"))
    message = complaint(str(tmp_path / "power.toml"))
    assert "power.toml' cannot be read as TOML: looks like UTF-16LE" in message


def test_a_config_file_s_path_that_is_too_long():
    assert "cannot be read as TOML: File name too long" in complaint("long" * 100 + ".toml")


def test_a_bare_switch_is_on_and_takes_no_file(toml):
    file = toml("max_iters = 3")
    for argv in (
        ["--compile"],
        ["--compile", "--max_iters=4"],
        ["--compile", file],
        [file, "--compile"],
    ):
        assert settings(*argv)[1].compile is True, argv
    assert settings("--compile", file)[1].max_iters == 3
    assert settings("--resume", "false", file)[1] == settings(file, "--resume=false")[1]
    assert settings("--resume", "False")[1].resume is False


def test_toml_values(toml):
    shape, run = settings(
        toml("""
        n_head = 2
        dropout = 0
        fusion = "add"
        learning_rate = 3
        max_iters = 1e3
        compile = true
        out_dir = "elsewhere"
        lambda = 2
        pass_mix = [0.75, 0.22, 0.03]
        sizes = [4, 5]
    """)
    )
    assert shape == Shape(n_head=2, dropout=0.0, fusion="add") and type(shape.dropout) is float
    assert run == Run(
        learning_rate=3.0,
        max_iters=1000,
        compile=True,
        out_dir="elsewhere",
        lam=2.0,
        pass_mix=(0.75, 0.22, 0.03),
        sizes=(4, 5),
    )
    assert (
        type(run.max_iters) is int
        and type(run.learning_rate) is float
        and type(run.pass_mix) is tuple
    )


@pytest.mark.parametrize(
    "line, parts",
    [
        ("learning_rte = 1", ["unknown key 'learning_rte'", "did you mean learning_rate?"]),
        ("lam = 1", ["unknown key 'lam'", "did you mean lambda?"]),
        ("vocab_size = 9", ["unknown key 'vocab_size'"]),
        ("[train]\nmax_iters = 3", ["unknown key 'train'"]),
        ("max_iters = 1.5", ["max_iters", "whole number", "1.5"]),
        ("max_iters = nan", ["max_iters", "whole number", "nan"]),
        ("max_iters = '12'", ["max_iters", "whole number", "'12'"]),
        ("max_iters = true", ["max_iters", "whole number", "True"]),
        ("max_iters = [1]", ["max_iters", "whole number", "[1]"]),
        ("learning_rate = '1e-3'", ["learning_rate", "a number", "'1e-3'"]),
        ("learning_rate = nan", ["learning_rate", "a number", "nan"]),
        ("learning_rate = false", ["learning_rate", "a number", "False"]),
        ("compile = 'true'", ["compile", "true or false", "'true'"]),
        ("compile = 1", ["compile", "true or false", "1"]),
        ("out_dir = 3", ["out_dir", "a text", "3"]),
        ("fusion = 1", ["fusion", "1 is not one of gated, add, none"]),
        ("fusion = ['add']", ["fusion", "is not one of gated, add, none"]),
        ("pass_mix = 1", ["pass_mix", "list of numbers", "1"]),
        ("pass_mix = '0.5,0.5'", ["pass_mix", "list of numbers", "'0.5,0.5'"]),
        ("pass_mix = [true]", ["pass_mix", "a number", "True"]),
        ("pass_mix = [[1]]", ["pass_mix", "a number", "[1]"]),
        ("sizes = [1, '2']", ["sizes", "whole number", "'2'"]),
        ("n_head = 3", ["--n_embd=64 must be a multiple of n_head=3"]),
    ],
)
def test_mistakes_in_toml(toml, line, parts):
    file = toml(line)
    message = complaint(file)
    assert all(part in message for part in parts), message
    assert file in message or "must be a multiple" in message


def test_a_file_that_is_no_toml(toml, tmp_path):
    assert "cannot be read as TOML" in complaint(toml("max_iters: 3\n"))
    assert "cannot be read as TOML" in complaint(
        toml("import os; os._exit(0)")
    )  # data, never executed
    (tmp_path / "latin.toml").write_bytes(b"out_dir = '\xe9'")
    assert "latin.toml" in complaint(str(tmp_path / "latin.toml"))
    assert str(tmp_path) in complaint(str(tmp_path))  # a folder


def test_a_missing_file_lists_those_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        complaint("gone.toml")
        == f"config file 'gone.toml' does not exist in {tmp_path}; none were found"
    )
    (tmp_path / "config").mkdir()
    for name in ("b", "a"):
        (tmp_path / "config" / f"{name}.toml").touch()
    names = f"{Path('config/a.toml')}, {Path('config/b.toml')}"
    for word in ("a", "config/c.toml", "nowhere/c.toml"):
        assert (
            complaint(word)
            == f"config file {word!r} does not exist in {tmp_path}; there are: {names}"
        )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "d.toml").touch()
    assert complaint("mine/e.toml").endswith(f"there are: {names}, {Path('mine/d.toml')}")
    assert "one config file at most, got a.toml, b.toml" in complaint("a.toml", "b.toml")


def test_later_wins(toml):
    file = toml("max_iters = 2\nn_head = 2")
    assert settings()[1].max_iters == 10
    assert settings(file)[1].max_iters == 2
    assert settings(file, "--max_iters=3")[1].max_iters == 3
    assert settings("--max_iters=3", file)[1].max_iters == 3  # wherever the file stands
    shape, run = settings(file, "--max_iters=3")
    assert (shape.n_head, shape.n_embd, run.learning_rate) == (
        2,
        64,
        0.5,
    )  # what nobody set keeps its default
    assert settings("--n_head=3", "--n_embd=96")[0] == Shape(
        n_head=3, n_embd=96
    )  # checked together, at the end


def test_positional_words_are_the_callers():
    shape, run, words = parse(["pydocs", "--max_iters=2", "more"], Shape, Run, positional="corpus")
    assert words == ["pydocs", "more"] and run.max_iters == 2
    assert parse([], Shape, positional="corpus")[-1] == []
    assert "--learning_rte" in complaint("pydocs", "--learning_rte", "1", positional="corpus")


def test_build_names_the_field():
    assert build(Shape, {"n_head": 2}) == Shape(n_head=2)
    with pytest.raises(UserError, match="^--n_embd=5 must be a multiple of n_head=4$"):
        build(Shape, {"n_embd": 5})
    with pytest.raises(UserError, match="^vocab_size=0 must be positive$"):  # it has no flag
        build(Shape, {"vocab_size": 0})
    with pytest.raises(UserError, match="^--lambda=-1 must be positive$"):  # the user's name for it
        build(Weight, {"lam": -1})
    with pytest.raises(UserError, match=r"^--n_embd=63 must be a multiple of 2 n_head = 8"):
        build(GPTConfig, {"n_embd": 63})


# Whole processes

SCRIPT = """
import sys
from dataclasses import dataclass
from harness.configurator import UserError, parse, run, setting

@dataclass(frozen=True)
class Settings:
    steps: int = setting(5, "how many, 100% of them")
    lam: float = setting(1.0, "weight")
    name: str | None = setting(None, "no default to tell")
    fail: str = setting("", "how to end")

def main(argv):
    settings, words = parse(argv, Settings, doc="What it does:\\n\\n    an example")
    if settings.fail == "lines":
        raise UserError("first\\nsecond")
    if settings.fail == "interrupt":
        raise KeyboardInterrupt
    if settings.fail == "status":
        return 3
    print("\\u2192", "x" * settings.steps)

if __name__ == "__main__":
    run(main)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "tool.py").write_text(SCRIPT)

    def call(*argv: str, **environment: str):
        env = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **environment}
        return subprocess.run(
            [sys.executable, tmp_path / "tool.py", *argv],
            capture_output=True,
            text=True,
            env=env,
            cwd=tmp_path,
            encoding="utf-8",
            timeout=30,
        )

    return call


def test_help(script):
    done = script("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "What it does:\n\n    an example",
        "--steps VALUE",
        "how many, 100% of them (default: 5)",
        "--lambda VALUE",
        "config",
    ):
        assert part in done.stdout
    assert "--lam " not in done.stdout and "None" not in done.stdout


def test_exit_codes(script):
    done = script("--steps=2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\u2192 xx\n", "")
    done = script("--stps=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "tool.py: unknown argument '--stps=2' (did you mean steps?); --help lists all\n"
    )
    done = script("--fail=lines")
    assert (done.returncode, done.stderr) == (2, "tool.py: first second\n")
    assert (script("--fail=interrupt").returncode, script("--fail=status").returncode) == (130, 3)
    assert script("--steps=1", PYTHONIOENCODING="ascii").stdout == "\\u2192 x\n"


def test_redirected_text_is_utf8_whatever_the_console_is(tmp_path):
    (tmp_path / "tool.py").write_text(SCRIPT)
    ascii_console = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "tool.py", "--steps=2"],
        capture_output=True,
        env={"PYTHONPATH": str(ROOT), **ascii_console},
        cwd=tmp_path,
        timeout=60,
    )
    assert done.stdout.replace(b"\r\n", b"\n") == "\u2192 xx\n".encode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.parametrize("n_steps", [3, 300_000])
def test_an_output_that_cannot_be_written(tmp_path, n_steps):
    (tmp_path / "tool.py").write_text(SCRIPT)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "tool.py", f"--steps={n_steps}"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (
        2,
        "tool.py: standard output cannot be written (No space left on device); "
        "send it somewhere else\n",
    )


@pytest.mark.parametrize("stream", ["closed", "missing", "of a notebook"])
def test_streams_that_are_not_files(monkeypatch, stream):
    class Notebook(io.TextIOBase):  # as in a notebook: no reconfigure, no file below
        encoding = "UTF-8"

        def write(self, text):
            return len(text)

    out = {"closed": io.StringIO(), "missing": None, "of a notebook": Notebook()}[stream]
    if stream == "closed":
        out.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, out)
    open_streams()
    replaced = sys.stdout is not out
    print("\u2192", flush=True)
    print("\u2192", file=sys.stderr, flush=True)
    assert replaced == (stream != "of a notebook")


@pytest.mark.parametrize("theirs, ours", FROM_NANOGPT.items())
def test_settings_of_nanogpt_are_understood(theirs, ours):
    from sample import SampleConfig
    from train import TrainConfig

    of_one = [c for c in (SampleConfig, TrainConfig) if ours in c.__dataclass_fields__]
    assert suggestion(theirs, of_one[0].__dataclass_fields__) == f" (did you mean {ours}?)"


def test_a_word_that_is_near_to_none_gets_no_suggestion():
    assert suggestion("min_lr", ["n_layer", "eval_iters"]) == ""
    assert suggestion("eval_only", ["eval_interval", "n_layer"]) == ""
    assert suggestion("n_layers", ["n_layer", "eval_iters"]) == " (did you mean n_layer?)"


def test_every_process_tells_its_mistake_unless_torchrun_started_it(script):
    leftover = script("--stps=2", LOCAL_RANK="1")
    assert leftover.stderr.startswith("tool.py: unknown argument")
    group = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert script("--stps=2", LOCAL_RANK="1", **group).stderr == ""
    assert script("--stps=2", LOCAL_RANK="0", **group).stderr == leftover.stderr


def test_a_process_that_fails_alone_says_so(tmp_path, monkeypatch, capsys):
    """The first process may know nothing of it, and then nobody would tell."""

    def main(argv):
        raise OneProcessError("out of memory")

    monkeypatch.setattr(sys, "argv", ["tool.py"])
    group = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}
    for name, value in (group | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run(main)
    assert capsys.readouterr().err == "tool.py, process 5: out of memory\n"
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        run(main)
    assert capsys.readouterr().err == "tool.py: out of memory\n"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end in another error there")
@pytest.mark.parametrize("word", ["--steps=3", "--steps=300000", "--help", "--stps=3"])
def test_a_reader_that_has_gone(tmp_path, word):
    (tmp_path / "tool.py").write_text(SCRIPT)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "tool.py", word],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        text=True,
        timeout=30,
    )
    os.close(writer)
    expected = (2, "tool.py: unknown argument '--stps=3' (did you mean steps?); --help lists all\n")
    assert (done.returncode, done.stderr) == (expected if word == "--stps=3" else (141, ""))
