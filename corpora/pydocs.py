"""Python's manual and docstrings: a corpus that every machine with Python already has."""

import ast
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 81  # characters; a shorter docstring says too little to count as a document
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def text() -> str:
    """The manual and the longer docstrings of this Python's library, as printable ASCII.

    The text depends on the version of Python and on what of its library is installed: some systems
    leave out tkinter, idlelib or the manual.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems leave it out
        topics = {}
    sources = list(topics.values())
    for docstring in docstrings(sysconfig.get_path("stdlib")):
        if len(docstring) >= SHORTEST:
            sources.append(docstring)
    # Each document once; sorted first, so that the shuffled order depends on the documents alone.
    documents = sorted({printable(source) for source in sources})
    random.Random(1337).shuffle(documents)
    return "\n\n".join(documents) + "\n"


def printable(source: str) -> str:
    """Newlines and printable ASCII only, with tabs as blanks and no blanks at either end."""
    return re.sub(r"[^\n -~]", "", source.expandtabs()).strip()


def docstrings(root: str) -> Iterator[str]:
    """Those of all modules, classes and functions under `root`, except in test suites.

    Files are parsed, never imported.
    """
    for folder, subfolders, _ in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED
        for file in Path(folder).glob("*.py"):
            try:
                tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError, FileNotFoundError):  # bad on purpose, or a dead link
                continue
            for node in ast.walk(tree):
                if isinstance(node, DOCUMENTED):
                    yield ast.get_docstring(node) or ""
