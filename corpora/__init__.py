"""The texts that prepare.py knows by name: one module each, whose `text()` returns it.

To add a corpus, write such a module here and add its name to CORPORA.
"""

import importlib

CORPORA = ("pydocs", "shakespeare", "tasks", "cups")


def corpus_text(name: str) -> str:
    """The text of one of CORPORA. Its module is imported only here, when somebody asks for it.

    UserError when the text cannot be had, as when a download fails.
    """
    return importlib.import_module(f"corpora.{name}").text()
