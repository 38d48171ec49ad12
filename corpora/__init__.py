"""The texts to train on that prepare.py knows by name: to add one, add a function that returns a text to CORPORA."""

import ast
import hashlib
import os
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from corpora import cups, tasks
from harness.configurator import UserError
from harness.tokenizer import DOWNLOAD_SECONDS, within

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STALL_SECONDS = 10  # the longest silence of a server


def pydocs() -> str:
    """The manual and the docstrings of more than 80 characters in this Python's library, as printable ASCII."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems leave it out
        topics = {}
    texts = [*topics.values(), *(doc for doc in docstrings(sysconfig.get_path("stdlib")) if len(doc) > 80)]
    # Each document once; sorted first, so that the shuffled order depends on nothing but the documents.
    documents = sorted({re.sub(r"[^\n -~]", "", text.expandtabs()).strip() for text in texts})
    random.Random(1337).shuffle(documents)
    return "\n\n".join(documents) + "\n"


def docstrings(root: str) -> Iterator[str]:
    """Those of all modules, classes and functions under `root` but test suites; files are parsed, not imported."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for folder, subfolders, _ in os.walk(root):
        subfolders[:] = set(subfolders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        for file in Path(folder).glob("*.py"):
            try:
                tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError, FileNotFoundError):  # bad on purpose, or a link to nowhere
                continue
            yield from (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


def shakespeare() -> str:
    """Tiny Shakespeare; UserError when it cannot be downloaded, or something else comes."""
    try:
        content = within(DOWNLOAD_SECONDS, download)
    except (ImportError, OSError, ValueError) as error:  # requests' errors are OSErrors
        raise UserError(f"shakespeare: {SHAKESPEARE_URL} failed, nothing is stored ({type(error).__name__}: {error}); "
                        "use the embedded corpus, python prepare.py pydocs, or download that file by hand and run: "
                        "python prepare.py --input=FILE --name=shakespeare") from None
    return content.decode()


def download() -> bytes:
    """The file at SHAKESPEARE_URL; ValueError when it is another than the known one, or one of requests' errors."""
    import requests
    content = bytearray()
    with requests.get(SHAKESPEARE_URL, stream=True, timeout=STALL_SECONDS) as response:
        response.raise_for_status()
        for chunk in response.iter_content(1 << 14):
            content += chunk
            if len(content) > SHAKESPEARE_BYTES:  # it may never end
                break
    if len(content) != SHAKESPEARE_BYTES or hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError(f"{len(content)} bytes came, not the {SHAKESPEARE_BYTES} with the known sha256")
    return bytes(content)


CORPORA: dict[str, Callable[[], str]] = {"pydocs": pydocs, "shakespeare": shakespeare, "tasks": tasks.text,
                                         "cups": cups.text}
