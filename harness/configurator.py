"""Settings: dataclass <- TOML file <- --key=value. The only place that knows about flags.

A script describes its settings as frozen dataclasses whose fields are made with `setting`, and calls
`parse(argv, Settings, ...)`. Everything is checked: an unknown key, a value of the wrong type and a missing file
each end in one line that names the culprit and the way out. Config files are TOML: data, never executed.
"""

import argparse
import dataclasses
import difflib
import os
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

FLAG_NAMES = {"lam": "lambda"}  # Python does not allow `lambda` as a name
TRUTH = {"true": True, "false": False, "1": True, "0": False}


class UserError(Exception):
    """A mistake of the user's: one line that names the flag or file, the bad value and the way out."""


def setting(default: Any, help: str, flag: bool = True) -> Any:
    """A dataclass field with its help text; `flag=False` keeps it off the command line and out of config files."""
    return dataclasses.field(default=default, metadata={"help": help, "flag": flag})


def key(field_name: str) -> str:
    """The setting's name for its user."""
    return FLAG_NAMES.get(field_name, field_name)


def require(settings: Any, name: str, holds: bool, rule: str) -> None:
    """For a `__post_init__`: ValueError that names the flag and its value, unless it `holds`."""
    if not holds:
        raise ValueError(f"--{key(name)}={getattr(settings, name)} must be {rule}")


def suggestion(word: str, known) -> str:
    """' (did you mean X?)' for the nearest known word, or ''."""
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def convert(name: str, value: Any, kind: Any, typed: bool = False) -> Any:
    """`value` as `kind`; UserError names `name` and the value. `typed`: it is TOML's; else a word of the command line.

    An int is accepted where a float is expected, a whole number such as 1e3 where an int is; true and false are
    read in any case; a tuple of numbers is a TOML list, or `a,b,c` with or without brackets.
    """
    def wrong(expected: str) -> UserError:
        return UserError(f"{name}: expected {expected}, got {value!r}")

    is_word = isinstance(value, str) and not typed
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        if value not in allowed:
            raise UserError(f"{name}: {value!r} is none of {', '.join(allowed)}{suggestion(str(value), allowed)}")
        return value
    if get_origin(kind) is tuple:
        if is_word:
            value = value.strip("[]() ").removesuffix(",").split(",")
        if not isinstance(value, list):
            raise wrong("a list of numbers, e.g. [0.75, 0.22, 0.03]")
        return tuple(convert(name, part, get_args(kind)[0], typed) for part in value)
    if kind is bool:
        value = TRUTH.get(value.lower(), value) if is_word else value
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if kind in (int, float):
        expected = "a whole number" if kind is int else "a number"
        if isinstance(value, bool) or not (is_word or isinstance(value, (int, float))):
            raise wrong(expected)
        try:
            if kind is int and (value.strip().lstrip("+-").isdigit() if is_word else isinstance(value, int)):
                return int(value)  # exact, also beyond what a float holds
            number = float(value)
            if kind(number) != number:  # 1.5 for an int; NaN, which every later comparison would let through
                raise wrong(expected)
            return kind(number)
        except (ValueError, OverflowError):
            raise wrong(expected) from None
    if not isinstance(value, str):
        raise wrong("a text")
    return value


def read_toml(path: str) -> dict[str, Any]:
    """The config file's keys and values."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        here = sorted({str(file) for folder in (Path(path).parent, Path("config")) for file in folder.glob("*.toml")})
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"config file {path!r} does not exist{where}; there are: {', '.join(here) or 'none'}") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path!r} cannot be read as TOML: {error}") from None


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is a UserError."""

    def error(self, message: str):
        raise UserError(message.replace("argument ", "", 1))


def build(cls: type, values: dict[str, Any]):
    """`cls(**values)`; the ValueError of its `__post_init__`, which names the field, becomes a UserError."""
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(str(error)) from None


def parse(argv: list[str], *classes: type, doc: str = "", positional: str = "config") -> tuple:
    """One frozen instance per dataclass, then the list of positional arguments, which the caller counts.

    argv: `[FILE.toml] --key=value ...`. Later wins: dataclass default, config file (where `positional` is left at
    "config" the one positional argument names it), command line.
    """
    kinds = {f.name: get_type_hints(cls)[f.name] for cls in classes for f in dataclasses.fields(cls)}
    fields = {key(f.name): f for cls in classes for f in dataclasses.fields(cls) if f.metadata["flag"]}
    parser = Parser(description=doc, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(positional, nargs="*", help="a TOML file" if positional == "config" else None)
    for name, field in fields.items():
        default = "" if field.default is None else f" (default: {field.default!r})"
        text = f"{field.metadata['help']}{default}".replace("%", "%%")
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar="VALUE", help=text)
    switches = {f"--{name}" for name, field in fields.items() if kinds[field.name] is bool}
    # `--resume demo.toml`: a bare switch is on and leaves the next word alone, unless that is true or false.
    words = [f"{word}=true" if word in switches and after.lower() not in TRUTH else word
             for word, after in zip(argv, [*argv[1:], ""])]
    given, unknown = parser.parse_known_intermixed_args(words)
    for word in unknown:
        name = word.lstrip("-").split("=")[0]
        raise UserError(f"unknown argument {word!r}{suggestion(name, fields)}; --help lists all")
    flags = vars(given)
    words = flags.pop(positional)
    values: dict[str, Any] = {}
    if positional == "config" and len(words) > 1:
        raise UserError(f"one config file at most, got {', '.join(words)}")
    for file in words if positional == "config" else []:
        for name, value in read_toml(file).items():
            if name not in fields:
                raise UserError(f"{file}: unknown key {name!r}{suggestion(name, fields)}")
            values[fields[name].name] = convert(f"{file}: {name}", value, kinds[fields[name].name], typed=True)
    for name, value in flags.items():
        values[fields[name].name] = convert(f"--{name}", value, kinds[fields[name].name])
    made = [build(cls, {name: values[name] for name in get_type_hints(cls) if name in values}) for cls in classes]
    return (*made, words)


def run(main) -> None:
    """Runs a script's `main(argv)`; a UserError is one line on stderr and exit code 2, Ctrl-C is exit code 130."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to stop
    try:
        try:
            status = main(sys.argv[1:])
        finally:
            sys.stdout.flush()  # here, where a closed pipe can still be caught
        sys.exit(status)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one line, however many processes torchrun started
            print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `sample.py | head`: the reader has gone; point stdout elsewhere so that exit stays quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
