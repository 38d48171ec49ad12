"""Text <-> token ids: characters, GPT-2's byte pairs, or a pretrained model's.

A checkpoint keeps the `spec` and needs nothing else.

All tokenizers have `spec`, `vocab_size`, `start_token`, `encode`, `decode`, and `decode_bytes` for
streams, because a token of GPT-2's may be a part of a character. The start token stands for an
empty prompt: a newline, which texts are full of, unlike GPT-2's end-of-text.
"""

import json
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


class HFTokenizer:
    """A pretrained model's byte pairs: the text of its tokenizer.json, by the `tokenizers` library.

    vocab_size is the model's, which may have more symbols than the tokenizer knows. Special tokens
    in a text, such as <|im_start|>, are read as such; none is added. UserError where the library is
    missing, where it does not understand the text, and where the tokens are not made of bytes.
    """

    def __init__(self, json_text: str, vocab_size: int):
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise UserError(
                "this tokenizer needs the library `tokenizers`: "
                "pip install -r requirements-pretrained.txt"
            ) from None
        try:
            self.bpe = Library.from_str(json_text)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"the tokenizer cannot be read ({error})") from None
        if "ByteLevel" not in str(json.loads(json_text)["decoder"]):
            raise UserError("its tokens are not bytes (ByteLevel); choose another model")
        self.bpe.no_truncation()
        self.bpe.no_padding()
        largest = max(self.bpe.get_vocab().values(), default=0)
        if largest >= vocab_size:
            raise UserError(f"it has a token {largest}, but the model {vocab_size} symbols")
        self.spec = {"kind": "hf", "json": json_text, "vocab_size": vocab_size}
        self.vocab_size = vocab_size
        self.special = self.bpe.get_added_tokens_decoder()
        self.byte_of = {char: byte for byte, char in enumerate(byte_characters())}
        newline = self.encode("\n")
        self.start_token = newline[0] if newline else 0

    def encode(self, text: str) -> list[int]:
        text = text.encode(errors="replace").decode()  # a lone surrogate becomes a question mark
        return self.bpe.encode(text, add_special_tokens=False).ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        parts = []
        for i in ids:
            if i in self.special:
                parts.append(self.special[i].content.encode())
            else:  # None for a symbol that only the model has
                parts.append(bytes(self.byte_of[char] for char in self.bpe.id_to_token(i) or ""))
        return b"".join(parts)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")


def byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each of the 256 bytes.

    Printable bytes of Latin-1 stand for themselves; the others, in order, for U+0100 onwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = []
    unprintable = 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + unprintable))
            unprintable += 1
    return characters


Tokenizer = CharTokenizer | GPT2Tokenizer | HFTokenizer


def make_tokenizer(spec: dict) -> Tokenizer:
    """The tokenizer with this `spec`; UserError for any other.

    {"kind": "char", "symbols": ...}, {"kind": "gpt2"}, or a pretrained model's {"kind": "hf",
    "json": the text of its tokenizer.json, "vocab_size": the model's}.
    """
    match spec:
        case {"kind": "gpt2"}:
            return GPT2Tokenizer()
        case {"kind": "char", "symbols": str(symbols)}:
            return CharTokenizer(symbols)
        case {"kind": "hf", "json": str(json_text), "vocab_size": int(vocab_size)}:
            return HFTokenizer(json_text, vocab_size)
    raise UserError(f"unknown tokenizer {repr(spec)[:80]}; there are char, gpt2 and hf")


def code_points(text: str) -> np.ndarray:
    """The characters' numbers, uint32 (T,).

    Lone surrogates, as a malformed prompt may have, have theirs too.
    """
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
