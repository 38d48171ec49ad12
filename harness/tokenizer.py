"""Text <-> token ids: characters, or GPT-2's byte pairs. A checkpoint keeps the `spec` and needs
nothing else.

Both tokenizers have `spec`, `vocab_size`, `start_token`, `encode`, `decode`, and `decode_bytes` for
streams, because a token of GPT-2's may be a part of a character. The start token stands for an
empty prompt: a newline, which texts are full of, unlike GPT-2's end-of-text.
"""

from collections.abc import Iterable

import numpy as np

from harness.configurator import UserError
from harness.download import DOWNLOAD_SECONDS, within

N_LISTED = 10  # unknown characters that a message lists


class CharTokenizer:
    """One token per character: its place among `symbols`.

    UserError unless these are sorted and distinct.
    """

    def __init__(self, symbols: str):
        if not symbols or list(symbols) != sorted(set(symbols)):
            raise UserError(
                "the tokenizer's symbols are not sorted and distinct; prepare the data again"
            )
        self.spec = {"kind": "char", "symbols": symbols}
        self.symbols = symbols
        self.codes = code_points(symbols)  # (V,)
        self.vocab_size = len(symbols)
        self.start_token = max(symbols.find("\n"), 0)  # the first symbol if there is no newline

    def encode(self, text: str) -> list[int]:
        """UserError lists the characters that the vocabulary lacks, with their code points."""
        codes = code_points(text)  # (T,)
        ids = np.minimum(np.searchsorted(self.codes, codes), self.vocab_size - 1)  # (T,)
        unknown = list(dict.fromkeys(codes[self.codes[ids] != codes].tolist()))
        if unknown:
            listed = ", ".join(f"{chr(code)!r} (U+{code:04X})" for code in unknown[:N_LISTED])
            n_more = len(unknown) - N_LISTED
            more = f" and {n_more} more" if n_more > 0 else ""
            raise UserError(
                f"the vocabulary of {self.vocab_size} characters lacks {listed}{more}; "
                "leave them out"
            )
        return ids.tolist()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return "".join(self.symbols[i] for i in ids).encode()

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte pairs, by tiktoken; UserError when its files are neither here nor to be had."""

    def __init__(self):
        try:
            import tiktoken

            bpe = within(DOWNLOAD_SECONDS, lambda: tiktoken.get_encoding("gpt2"))
        except (ImportError, OSError, ValueError) as error:  # requests' errors are OSErrors
            raise UserError(
                f"the gpt2 tokenizer cannot be loaded ({type(error).__name__}: {error}); go online "
                "once, or set TIKTOKEN_CACHE_DIR to a folder that has its files, or prepare with "
                "--tokenizer=char"
            ) from None
        self.spec = {"kind": "gpt2"}
        self.bpe = bpe
        self.vocab_size = bpe.n_vocab
        self.start_token = bpe.encode_ordinary("\n")[0]

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode_ordinary(text)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.bpe.decode_bytes(list(ids))

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")


Tokenizer = CharTokenizer | GPT2Tokenizer


def make_tokenizer(spec: dict[str, str]) -> Tokenizer:
    """The tokenizer with this `spec`: {"kind": "char", "symbols": ...} or {"kind": "gpt2"}.

    UserError for any other.
    """
    match spec:
        case {"kind": "gpt2"}:
            return GPT2Tokenizer()
        case {"kind": "char", "symbols": str(symbols)}:
            return CharTokenizer(symbols)
    raise UserError(f"unknown tokenizer {repr(spec)[:80]}; there are char and gpt2")


def code_points(text: str) -> np.ndarray:
    """The characters' numbers, uint32 (T,).

    Lone surrogates, as a malformed prompt may have, have theirs too.
    """
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
