"""Text <-> token ids: characters, or GPT-2's byte pairs. A checkpoint keeps the `spec` and needs nothing else.

Both tokenizers have `spec`, `vocab_size`, `start_token` (which stands for an empty prompt), `encode`, `decode`, and
`decode_bytes` for streams, since a token of GPT-2's may be a part of a character.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from harness.configurator import UserError

DOWNLOAD_SECONDS = 90  # for a whole download, whatever the server does


class CharTokenizer:
    """One token a character: its place among `symbols`; UserError unless these are sorted and distinct."""

    def __init__(self, symbols: str):
        if not symbols or list(symbols) != sorted(set(symbols)):
            raise UserError("the tokenizer's symbols are not sorted and distinct; prepare the data again")
        self.spec = {"kind": "char", "symbols": symbols}
        self.symbols, self.codes = symbols, code_points(symbols)  # (V,)
        self.vocab_size = len(symbols)
        self.start_token = max(symbols.find("\n"), 0)  # newline, or the first symbol where there is none

    def encode(self, text: str) -> list[int]:
        """UserError that lists the characters which the vocabulary lacks, with their code points."""
        codes = code_points(text)
        ids = np.minimum(np.searchsorted(self.codes, codes), self.vocab_size - 1)
        unknown = [chr(code) for code in dict.fromkeys(codes[self.codes[ids] != codes].tolist())]
        if unknown:
            listed = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in unknown[:10])
            more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            raise UserError(f"the vocabulary of {self.vocab_size} characters lacks {listed}{more}; leave them out")
        return ids.tolist()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return "".join(self.symbols[i] for i in ids).encode()

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte pairs, by tiktoken; UserError when its files are not cached and cannot be downloaded."""

    def __init__(self):
        try:
            import tiktoken
            bpe = within(DOWNLOAD_SECONDS, lambda: tiktoken.get_encoding("gpt2"))
        except (ImportError, OSError, ValueError) as error:  # requests' errors are OSErrors
            raise UserError(f"the gpt2 tokenizer cannot be loaded ({type(error).__name__}: {error}); go online once, "
                            "or set TIKTOKEN_CACHE_DIR to a folder that has its files, or prepare with "
                            "--tokenizer=char") from None
        self.spec, self.bpe = {"kind": "gpt2"}, bpe
        self.vocab_size, self.start_token = bpe.n_vocab, bpe.eot_token

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode_ordinary(text)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.bpe.decode_bytes(list(ids))

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")


Tokenizer = CharTokenizer | GPT2Tokenizer


def make_tokenizer(spec: dict[str, str]) -> Tokenizer:
    """The tokenizer with this `spec`, {"kind": "char", "symbols": ...} or {"kind": "gpt2"}; UserError for others."""
    match spec:
        case {"kind": "gpt2"}:
            return GPT2Tokenizer()
        case {"kind": "char", "symbols": str(symbols)}:
            return CharTokenizer(symbols)
    raise UserError(f"unknown tokenizer {spec!r:.80}; there are char and gpt2")


def code_points(text: str) -> np.ndarray:
    """The characters' numbers, uint32 (len(text),); lone surrogates, as of a malformed prompt, have theirs too."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def within(seconds: float, job: Callable[[], Any]) -> Any:
    """job()'s result or exception; TimeoutError after `seconds`, whether a server is silent or sends drop by drop."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(job())
        except Exception as error:  # not swallowed: result() raises it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # a daemon: nothing can end a thread that hangs
    try:
        return future.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"not complete after {seconds} s") from None
