"""Settings: dataclass <- TOML file <- --key=value. The only place that knows about flags.

A script describes its settings as frozen dataclasses whose fields are made with `setting`, and
calls `parse(argv, Settings, ...)`. Everything is checked: an unknown key, a value of the wrong
type, a flag given twice and a missing file each end in one line that names the culprit and the way
out. Config files are TOML: data, never executed.
"""

import argparse
import dataclasses
import difflib
import errno
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from harness.text import decode_text

FLAG_NAMES = {"lam": "lambda"}  # Python does not allow `lambda` as a name
FROM_NANOGPT = {
    "gradient_accumulation_steps": "grad_accum",
    "lr_decay_iters": "cooldown",
    "min_lr": "cooldown",
    "start": "prompt",
}
TRUTH = {"true": True, "false": False, "1": True, "0": False}
UNWRITABLE = (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EBADF)  # full, too large, broken, closed
PROCESS_GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # by torchrun


class UserError(Exception):
    """A mistake of the user's.

    One line that names the flag or file, the bad value and the way out.
    """


class OneProcessError(UserError):
    """One that a single process of torchrun's may have; the others all have the same ones."""


def setting(default: Any, help: str, flag: bool = True, path: bool = False) -> Any:
    """A dataclass field with its help text.

    flag=False keeps it off the command line and out of config files; path=True expands a `~`.
    """
    metadata = {"help": help, "flag": flag, "path": path}
    return dataclasses.field(default=default, metadata=metadata)


def key(field_name: str) -> str:
    """The setting's name for its user."""
    return FLAG_NAMES.get(field_name, field_name)


def require(settings: Any, name: str, holds: bool, rule: str) -> None:
    """For a `__post_init__`: ValueError that names the flag and its value, unless it `holds`."""
    if not holds:
        raise ValueError(f"--{key(name)}={getattr(settings, name)} must be {rule}")


def suggestion(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the nearest known word, or for nanoGPT's word for it, or ''."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.65)
    if FROM_NANOGPT.get(word) in known:
        near = [FROM_NANOGPT[word]]
    return f" (did you mean {near[0]}?)" if near else ""


# Values


def convert(name: str, value: Any, kind: Any, typed: bool = False) -> Any:
    """`value` as `kind`; UserError names `name` and the value.

    typed: the value is TOML's, and has a type already; else it is a word of the command line. An
    int is accepted where a float is expected, and a whole number such as 1e3 where an int is. True
    and false are read in any case. A tuple of numbers is a TOML list, or `a,b,c` with or without
    brackets.
    """
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        if value not in allowed:
            near = suggestion(str(value), allowed)
            raise UserError(f"{name}: {value!r} is not one of {', '.join(allowed)}{near}")
        return value
    if get_origin(kind) is tuple:
        return convert_tuple(name, value, get_args(kind)[0], typed)
    if kind is bool:
        if isinstance(value, str) and not typed:
            value = TRUTH.get(value.lower(), value)
        if not isinstance(value, bool):
            raise wrong(name, "true or false", value)
        return value
    if kind in (int, float):
        return convert_number(name, value, kind, typed)
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    return value


def wrong(name: str, expected: str, value: Any) -> UserError:
    return UserError(f"{name}: expected {expected}, got {value!r}")


def convert_tuple(name: str, value: Any, part_kind: type, typed: bool) -> tuple:
    if isinstance(value, str) and not typed:
        value = value.strip("[]() ").removesuffix(",").split(",")
    if not isinstance(value, list):
        raise wrong(name, "a list of numbers, e.g. [0.75, 0.22, 0.03]", value)
    return tuple(convert(name, part, part_kind, typed) for part in value)


def convert_number(name: str, value: Any, kind: type, typed: bool) -> int | float:
    expected = "a whole number" if kind is int else "a number"
    is_word = isinstance(value, str) and not typed
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_word or is_number):
        raise wrong(name, expected, value)
    is_whole = value.strip().lstrip("+-").isdigit() if is_word else isinstance(value, int)
    try:
        if kind is int and is_whole:
            return int(value)  # exact, also beyond what a float holds
        number = float(value)
        converted = kind(number)
    except (ValueError, OverflowError):
        raise wrong(name, expected, value) from None
    if converted != number:  # 1.5 for an int; NaN, which every later comparison would let through
        raise wrong(name, expected, value)
    return converted


def expand_home(name: str, path: str) -> str:
    """`~` and `~user` at the path's start become that home folder; UserError for an unknown user.

    A shell does this only where the tilde starts a word, so not in --out_dir=~/runs.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = re.split(r"[/\\]", expanded)[0]
        raise UserError(f"{name}={path}: no home folder is known for {user}; give the full path")
    return expanded


def convert_field(name: str, value: Any, kind: Any, field: dataclasses.Field, typed: bool) -> Any:
    """The value of one setting, converted and, where it is a path, expanded."""
    converted = convert(name, value, kind, typed)
    if field.metadata.get("path") and converted is not None:
        return expand_home(name, converted)
    return converted


def read_toml(file: str) -> dict[str, Any]:
    """The config file's keys and values, also where an editor on Windows saved it."""
    try:
        return tomllib.loads(decode_text(Path(file).read_bytes(), file).replace("\r\n", "\n"))
    except FileNotFoundError:
        raise UserError(f"config file {file!r} does not exist{config_files(file)}") from None
    except (OSError, ValueError) as error:  # TOMLDecodeError is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"config file {file!r} cannot be read as TOML: {reason}") from None


def config_files(file: str) -> str:
    """Where a missing file was looked for, and the config files there are."""
    found = set()
    for folder in (Path(file).parent, Path("config")):
        found.update(str(path) for path in folder.glob("*.toml"))
    where = "" if Path(file).is_absolute() else f" in {Path.cwd()}"
    listed = f"there are: {', '.join(sorted(found))}" if found else "none were found"
    return f"{where}; {listed}"


# The command line


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is a UserError."""

    def error(self, message: str):
        message = message.replace("argument ", "", 1)
        if message.endswith("expected one argument"):
            flag = message.split(":")[0]
            message += f"; write {flag}=VALUE, also where the value starts with a dash"
        raise UserError(message)


class Once(argparse.Action):
    """Stores a flag's value; UserError where it has one already."""

    def __call__(self, parser, namespace, values, option_string=None):
        if hasattr(namespace, self.dest):
            flag = f"--{self.dest}"
            first = getattr(namespace, self.dest)
            raise UserError(f"{flag} is given twice, {first!r} and {values!r}; give it once")
        setattr(namespace, self.dest, values)


def make_parser(fields: dict[str, dataclasses.Field], doc: str, positional: str) -> Parser:
    """A parser that stores each given flag's word under the flag's name, and no defaults."""
    parser = Parser(
        prog=f"python -m {package()}" if package() else None,  # None: the file's name
        description=doc,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = "a TOML file" if positional == "config" else None
    parser.add_argument(positional, nargs="*", help=what)
    for name, field in fields.items():
        default = "" if field.default is None else f" (default: {field.default!r})"
        text = f"{field.metadata['help']}{default}".replace("%", "%%")
        parser.add_argument(
            f"--{name}", action=Once, default=argparse.SUPPRESS, metavar="VALUE", help=text
        )
    return parser


def join_values(argv: list[str], flags: set[str], switches: set[str]) -> list[str]:
    """`--flag value` as `--flag=value` wherever argparse would misread the two words.

    A bare switch is on and leaves the next word alone (`--resume demo.toml`), unless that is true
    or false. A value may start with one dash (`--prompt -5+3`).
    """
    words = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        after = rest[0] if rest else ""
        if word in switches and after.lower() not in TRUTH:
            words.append(f"{word}=true")
        elif word in flags and re.match(r"-[^-]", after) and after != "-h":
            words.append(f"{word}={rest.pop(0)}")
        else:
            words.append(word)
    return words


def build(cls: type, values: dict[str, Any]):
    """`cls(**values)`; the ValueError of its `__post_init__` becomes a UserError.

    The error names the flag, also where the class knows nothing of flags and names its field.
    """
    try:
        return cls(**values)
    except ValueError as error:
        message = str(error)
    name, _, rest = message.partition("=")
    if any(field.name == name and field.metadata["flag"] for field in dataclasses.fields(cls)):
        message = f"--{key(name)}={rest}"
    raise UserError(message)


def parse(argv: list[str], *classes: type, doc: str = "", positional: str = "config") -> tuple:
    """One frozen instance per dataclass, then the list of positional arguments.

    argv: `[FILE.toml] --key=value ...`. The command line wins over the config file, which wins over
    the dataclass's default. Where `positional` is left at "config", the one positional argument
    names the config file; else the caller counts the arguments and says what they mean.
    """
    kinds = {}
    fields = {}
    for cls in classes:
        for field in dataclasses.fields(cls):
            if field.metadata["flag"]:
                fields[key(field.name)] = field
                kinds[key(field.name)] = get_type_hints(cls)[field.name]
    parser = make_parser(fields, doc, positional)
    flags = {f"--{name}" for name in fields}
    switches = {f"--{name}" for name in fields if kinds[name] is bool}
    words = join_values(argv, flags, switches)
    namespace, unknown = parser.parse_known_intermixed_args(words)
    for word in unknown:
        name = word.lstrip("-").split("=")[0]
        raise UserError(f"unknown argument {word!r}{suggestion(name, fields)}; --help lists all")
    given = vars(namespace)
    words = [expand_home(positional, word) for word in given.pop(positional)]
    values: dict[str, Any] = {}
    if positional == "config":
        if len(words) > 1:
            raise UserError(f"one config file at most, got {', '.join(words)}")
        for file in words:
            for name, value in read_toml(file).items():
                if name not in fields:
                    raise UserError(f"{file}: unknown key {name!r}{suggestion(name, fields)}")
                field = fields[name]
                where = f"{file}: {name}"
                values[field.name] = convert_field(where, value, kinds[name], field, typed=True)
    for name, value in given.items():
        field = fields[name]
        values[field.name] = convert_field(f"--{name}", value, kinds[name], field, typed=False)
    made = []
    for cls in classes:
        own = {field.name for field in dataclasses.fields(cls)}
        made.append(build(cls, {name: values[name] for name in values if name in own}))
    return (*made, words)


# Scripts


def open_streams() -> None:
    """Makes stdout and stderr fit to be written to, in terminals, pipes, files and notebooks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is None:  # a notebook's stdout, which takes every character
        return
    if sys.stdout.isatty() or "PYTHONIOENCODING" in os.environ:
        reconfigure(errors="backslashreplace")  # a character that it lacks is no reason to stop
    else:
        reconfigure(encoding="utf-8", errors="backslashreplace")  # whatever the console's is


def discard_stdout() -> None:
    """Points stdout elsewhere, so that Python's own flush at exit does not fail again."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def package() -> str:
    """The package that `python -m PACKAGE` runs, whose file is always __main__.py; else ''."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.parent if spec is not None and spec.name.endswith(".__main__") else ""


def tell(text: str, alone: bool = False) -> None:
    """One line on stderr.

    Of the processes that torchrun started on a machine the first one says it, and the others too
    where they may be `alone` with it, with their number.
    """
    name = package() or Path(sys.argv[0]).name
    in_group = all(variable in os.environ for variable in PROCESS_GROUP)
    if in_group and os.environ["LOCAL_RANK"] != "0":
        if not alone:
            return
        name += f", process {os.environ['RANK']}"
    print(f"{name}: {' '.join(text.splitlines())}", file=sys.stderr)


def run(main: Callable[[list[str]], int | None]) -> None:
    """Runs a script's `main(argv)` and exits with the status it returns.

    A UserError is one line on stderr and exit code 2, Ctrl-C is exit code 130.
    """
    open_streams()
    try:
        try:
            status = main(sys.argv[1:])
        finally:
            sys.stdout.flush()  # here, where a closed pipe or a full disk can still be caught
        sys.exit(status)
    except UserError as error:
        tell(str(error), alone=isinstance(error, OneProcessError))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `sample.py | head`: the reader has gone
        discard_stdout()
        sys.exit(141)
    except OSError as error:
        if error.filename is not None:
            tell(f"{error.filename}: {error.strerror}")
        elif error.errno in UNWRITABLE:
            tell(f"standard output cannot be written ({error.strerror}); send it somewhere else")
            discard_stdout()
        else:
            raise
        sys.exit(2)
