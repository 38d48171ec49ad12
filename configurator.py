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


class UserError(Exception):
    """A mistake of the user's: one line that names the flag or file, the bad value and the way out."""


def setting(default: Any, help: str, flag: bool = True) -> Any:
    """A dataclass field with its help text; `flag=False` keeps it off the command line and out of config files."""
    return dataclasses.field(default=default, metadata={"help": help, "flag": flag})


def key(field_name: str) -> str:
    """The setting's name for its user: `lambda_` is `lambda`, which Python itself does not allow as a name."""
    return field_name.rstrip("_")


def suggestion(word: str, known) -> str:
    """' (did you mean X?)' for the nearest known word, or ''."""
    near = difflib.get_close_matches(word.replace("-", "_"), known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def convert(name: str, value: Any, kind: Any) -> Any:
    """`value` (a string from the command line, or a TOML value) as `kind`; UserError names `name` and the value.

    An int is accepted where a float is expected, a whole number such as 1e3 where an int is; true and false are
    read in any case; a tuple of numbers is a TOML list, or `a,b,c` with or without brackets.
    """
    def wrong(expected: str) -> UserError:
        return UserError(f"{name}: expected {expected}, got {value!r}")

    is_text = isinstance(value, str)
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        if value not in allowed:
            raise UserError(f"{name}: {value!r} is none of {', '.join(allowed)}{suggestion(str(value), allowed)}")
        return value
    if get_origin(kind) is tuple:
        if is_text:
            value = [part for part in value.strip("[]() ").split(",") if part.strip()]
        if not isinstance(value, (list, tuple)):
            raise wrong("a list of numbers, e.g. 0.75,0.22,0.03")
        return tuple(convert(name, part, get_args(kind)[0]) for part in value)
    if kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False}
        if is_text and value.lower() in words:
            return words[value.lower()]
        if isinstance(value, bool):
            return value
        raise wrong("true or false")
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise wrong("a number")
        try:
            number = float(value)
            if kind is float:
                return number
            return int(value) if not is_text or value.strip().lstrip("+-").isdigit() else whole(number)
        except (ValueError, OverflowError):
            raise wrong("a whole number" if kind is int else "a number") from None
    if not is_text:
        raise wrong("a text")
    return value


def whole(number: float) -> int:
    """`number` as an int; ValueError if it is not one."""
    if number != int(number):
        raise ValueError(number)
    return int(number)


def read_toml(path: str) -> dict[str, Any]:
    """The config file's keys and values."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        folder = Path(path).parent
        here = sorted(str(p) for p in (folder if folder.is_dir() else Path("config")).glob("*.toml"))
        raise UserError(f"config file {path!r} does not exist; there are: {', '.join(here) or 'none'}") from None
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
        optional = {"nargs": "?", "const": "true"} if kinds[field.name] is bool else {}
        text = f"{field.metadata['help']} (default: {field.default!r})".replace("%", "%%")
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar="VALUE", help=text, **optional)
    given, unknown = parser.parse_known_intermixed_args(argv)
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
            values[fields[name].name] = convert(f"{file}: {name}", value, kinds[fields[name].name])
    for name, value in flags.items():
        values[fields[name].name] = convert(f"--{name}", value, kinds[fields[name].name])
    made = [build(cls, {name: values[name] for name in get_type_hints(cls) if name in values}) for cls in classes]
    return (*made, words)


def run(main) -> None:
    """Runs a script's `main(argv)`; a UserError is one line on stderr and exit code 2, Ctrl-C is exit code 130."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `sample.py | head`: the reader has gone; point stdout elsewhere so that exit stays quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
