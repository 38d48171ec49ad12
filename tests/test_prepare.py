"""prepare.py, corpora, tokenizer, text: what is written, and what users get wrong (no network)."""

import hashlib
import http.server
import inspect
import io
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import prepare
from corpora import pydocs as pydocs_corpus
from corpora import shakespeare
from harness import tokenizer
from harness.configurator import UserError
from harness.data import load_meta, load_tokens
from harness.tokenizer import CharTokenizer, GPT2Tokenizer, make_tokenizer

try:
    from pydoc_data.topics import topics as manual
except ImportError:  # some systems leave it out
    manual = {}

ROOT = Path(__file__).parents[1]
POEM = "The quick brown fox\njumps over the lazy dog; 0123456789!\n" * 4  # 228 characters


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every test runs in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)


def command(*argv: str, **environment: str) -> list:
    """subprocess arguments: prepare.py in a process of its own."""
    return {
        "args": [sys.executable, str(ROOT / "prepare.py"), *argv],
        "text": True,
        "encoding": "utf-8",
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **environment},
    }


def refusal(*argv: str, **environment: str) -> str:
    """The one line on stderr with which prepare.py refuses argv: exit code 2, nothing stored."""
    done = subprocess.run(**command(*argv, **environment), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.endswith("\n") and done.stderr.count("\n") == 1, done.stderr
    assert not Path("data").exists()
    return done.stderr


def complaint(*argv: str) -> str:
    """The same within this process."""
    with pytest.raises(UserError) as caught:
        prepare.main(list(argv))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def prepared(text: str, name: str = "poem", *argv: str) -> Path:
    Path(f"{name}.txt").write_bytes(text.encode())
    prepare.main([f"--input={name}.txt", *argv])
    return Path("data", name)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is written


def test_files_against_hand_made_ones(capsys):
    folder = prepared("banana\nbandana!\n")  # 16 characters, 14 of them to train on
    assert sorted(contents(folder)) == ["meta.json", "train.bin", "val.bin"]
    ids = {"\n": 0, "!": 1, "a": 2, "b": 3, "d": 4, "n": 5}
    assert (folder / "train.bin").read_bytes() == struct.pack(
        "<14H", *(ids[c] for c in "banana\nbandana")
    )
    assert (folder / "val.bin").read_bytes() == struct.pack("<2H", 1, 0)
    assert json.loads((folder / "meta.json").read_text()) == {
        "tokenizer": {"kind": "char", "symbols": "\n!abdn"},
        "vocab_size": 6,
        "dtype": "uint16",
        "train_tokens": 14,
        "val_tokens": 2,
        "source": "poem.txt",
        "sha256": hashlib.sha256(b"banana\nbandana!\n").hexdigest(),
    }
    out = capsys.readouterr().out
    for part in ("poem.txt", "16 characters", "6 symbols", "14 tokens", str(folder)):
        assert part in out
    assert out.endswith("next: python train.py --dataset=poem\n")


def test_loading_what_was_written():
    folder = prepared(POEM)
    meta = load_meta(folder)
    assert (meta["train_tokens"], meta["val_tokens"]) == (205, 23)
    train, val = (load_tokens(folder, split, meta) for split in ("train", "val"))
    assert (
        train.shape == (205,)
        and val.shape == (23,)
        and train.dtype == np.uint16
        and isinstance(train, np.memmap)
    )
    assert make_tokenizer(meta["tokenizer"]).decode([*train, *val]) == POEM
    with pytest.raises(ValueError):
        train[0] = 1


def prepared_text(folder: Path) -> str:
    """All of the prepared text, decoded."""
    meta = load_meta(folder)
    tokens = [*load_tokens(folder, "train", meta), *load_tokens(folder, "val", meta)]
    return make_tokenizer(meta["tokenizer"]).decode(tokens)


def test_text_is_kept_to_the_letter(capsys):
    text = "one\n\ntwo\tthree\u2028na\u00efve \x85\x0c\U0001f600\n" * 5
    folder = prepared("\ufeff" + text)  # a byte order mark is not text
    assert prepared_text(folder) == text
    assert load_meta(folder)["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert capsys.readouterr().err == ""


def test_carriage_returns_become_newlines_and_are_counted(capsys):
    folder = prepared("one\r\ntwo\rthree\n\r\n\r\rfour\n" * 5)
    text = "one\ntwo\nthree\n\n\n\nfour\n" * 5
    assert prepared_text(folder) == text
    assert load_meta(folder)["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    err = capsys.readouterr().err
    assert err == "prepare.py: poem.txt: 25 carriage returns (CRLF or CR) read as newlines\n"


def test_standard_input(monkeypatch):
    stdin = types.SimpleNamespace(buffer=io.BytesIO(b"\xef\xbb\xbfab\r\n" * 1 + b"cd\n" * 20))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert complaint("--input=-") == "--input=- must be given with a name: --input=- --name=NAME"
    prepare.main(["--input=-", "--name=NAME"])  # the way out, literally
    assert prepared_text(Path("data/NAME")) == "ab\n" + "cd\n" * 20
    assert load_meta(Path("data/NAME"))["source"] == "standard input"
    monkeypatch.setattr(sys, "stdin", None)
    message = complaint("--input=-", "--name=other")
    assert "no standard input here; name a UTF-8 text file" in message

    def unreadable():
        raise OSError(9, "Bad file descriptor")

    closed = types.SimpleNamespace(buffer=types.SimpleNamespace(read=unreadable))
    monkeypatch.setattr(sys, "stdin", closed)
    message = complaint("--input=-", "--name=other")
    assert "Bad file descriptor (standard input)" in message


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["no mark", "mark"])
def test_other_encodings_are_named_and_the_way_out_works(encoding, mark):
    Path("my text.txt").write_bytes((mark + POEM + "na\u00efve\n").encode(encoding))
    message = complaint("--input=my text.txt")
    name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    command = f"iconv -f {name} -t UTF-8 'my text.txt' > utf8.txt"
    assert message == (
        f"--input=my text.txt: looks like {name}, not UTF-8; save it as UTF-8, e.g. by: {command}"
    )
    if shutil.which("iconv"):
        subprocess.run(command, shell=True, check=True)
        prepare.main(["--input=utf8.txt"])
        assert prepared_text(Path("data/utf8")) == POEM + "na\u00efve\n"


def test_other_bytes_are_not_text():
    Path("latin.txt").write_bytes(b"caf\xe9 au lait\n" * 9)
    assert complaint("--input=latin.txt") == (
        "--input=latin.txt: not UTF-8 text (at byte 3); save it as UTF-8, e.g. by: iconv "
        "-f ENCODING -t UTF-8 latin.txt > utf8.txt (its own encoding; for a file from "
        "Windows often CP1252)"
    )
    Path("zeros").write_bytes(bytes(100))
    Path("one").write_bytes(b"text\n" * 20 + b"\0")
    for name, at in (("zeros", 0), ("one", 100)):
        message = complaint(f"--input={name}")
        assert message.endswith(f"not a text: a NUL character at byte {at}; name a UTF-8 text file")
    assert not Path("data").exists()


def test_a_file_in_the_home_folder_and_a_data_dir_there(monkeypatch, tmp_path, capsys):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    (home / "poem.txt").write_text(POEM)
    prepare.main(["--input=~/poem.txt", "--data_dir=~/data"])
    assert load_meta(home / "data" / "poem")["train_tokens"] == 205
    assert not Path("~").exists()
    assert f"--dataset=poem --data_dir={home}/data" in capsys.readouterr().out


def test_an_empty_prompt_starts_from_a_token_that_was_trained(tiny_gpt2, capsys):
    words = "the\nfox\n" * 20
    for tokenizer_name in ("char", "gpt2"):
        folder = prepared(words, tokenizer_name, f"--tokenizer={tokenizer_name}")
        meta = load_meta(folder)
        start = make_tokenizer(meta["tokenizer"]).start_token
        assert make_tokenizer(meta["tokenizer"]).decode([start]) == "\n"
        assert start in load_tokens(folder, "train", meta)
    assert capsys.readouterr().err == ""
    prepared("the fox " * 20, "line", "--tokenizer=gpt2")
    assert "no newline to train on" in capsys.readouterr().err


def test_val_fraction_name_and_data_dir(capsys):
    Path("some file.txt").write_text("ab" * 50)
    prepare.main(["--input=some file.txt", "--val_fraction=0.25", "--data_dir=deep/er"])
    assert load_meta(Path("deep/er/some file"))["val_tokens"] == 25
    assert capsys.readouterr().out.endswith(
        "next: python train.py --dataset='some file' --data_dir=deep/er\n"
    )
    prepare.main(["--input=some file.txt", "--name=other"])
    assert load_meta(Path("data/other"))["val_tokens"] == 10


@pytest.mark.parametrize("n_symbols, dtype", [(65536, "uint16"), (65537, "uint32")])
def test_dtype_follows_the_vocabulary(n_symbols, dtype):
    symbols = [
        chr(code) for code in range(0x20, 0x20 + n_symbols + 0x800) if not 0xD800 <= code < 0xE000
    ]
    text = "".join(reversed(symbols))
    folder = prepared(text)
    meta = load_meta(folder)
    assert (meta["dtype"], meta["vocab_size"]) == (dtype, n_symbols)
    raw = np.frombuffer(
        (folder / "train.bin").read_bytes(), {"uint16": "<u2", "uint32": "<u4"}[dtype]
    )
    assert raw[:3].tolist() == [n_symbols - 1, n_symbols - 2, n_symbols - 3]
    assert (
        load_tokens(folder, "train", meta).dtype == np.dtype(dtype)
        and len(raw) == meta["train_tokens"]
    )


def test_same_bytes_in_every_process():
    for seed, folder in (("0", "a"), ("1", "b")):  # hash seeds, which reorder sets
        Path("poem.txt").write_text(POEM)
        subprocess.run(
            **command("--input=poem.txt", f"--data_dir={folder}", PYTHONHASHSEED=seed), check=True
        )
    assert contents(Path("a/poem")) == contents(Path("b/poem"))
    symbols = json.loads(Path("a/poem/meta.json").read_text())["tokenizer"]["symbols"]
    assert list(symbols) == sorted(set(POEM))


def module(text: str) -> types.SimpleNamespace:
    """A corpus: a module whose text() returns `text`."""
    return types.SimpleNamespace(text=lambda: text)


def test_a_corpus_is_one_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "corpora.tasks", module("1+1=2\n" * 20))
    prepare.main(["tasks"])
    assert load_meta(Path("data/tasks"))["source"] == "tasks"
    monkeypatch.setitem(sys.modules, "corpora.pydocs", module("the default " * 20))
    prepare.main([])
    prepare.main(["pydocs", "--name=twin"])
    assert contents(Path("data/pydocs")) == contents(Path("data/twin"))


def test_corpora_are_imported_when_asked_for():
    code = """
        import sys
        import train, sample
        assert not [name for name in sys.modules if name.startswith("corpora")]
        import prepare
        assert not [name for name in sys.modules if name.startswith("corpora.")]
        for name in prepare.CORPORA:
            assert callable(__import__(f"corpora.{name}", fromlist=["text"]).text)
    """
    options = command()
    options["args"] = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(**options, cwd=ROOT, check=True)


# Data that is there already


def test_other_data_is_replaced_only_when_told_to(monkeypatch, capsys):
    """As with the demo after an update of Python: its manual is another text."""
    monkeypatch.setitem(sys.modules, "corpora.pydocs", module("Python 3.11 is old.\n" * 9))
    prepare.main(["pydocs"])
    before = contents(Path("data/pydocs"))
    prepare.main(["pydocs"])  # the same text again
    assert contents(Path("data/pydocs")) == before
    monkeypatch.setitem(sys.modules, "corpora.pydocs", module("Python 3.12 is new.\n" * 10))
    message = complaint("pydocs")
    assert message == (
        f"{Path('data/pydocs')} already holds other data (from pydocs, 162 tokens to train on), "
        "and runs trained on it could not be resumed: --keep it, --overwrite it, or choose "
        "another --name"
    )
    assert contents(Path("data/pydocs")) == before
    # The three ways out, literally.
    capsys.readouterr()
    prepare.main(["pydocs", "--keep"])
    assert contents(Path("data/pydocs")) == before
    assert capsys.readouterr() == (
        "kept data/pydocs, prepared from pydocs: 162 tokens to train on, 18 to validate on\n"
        "next: python train.py --dataset=pydocs\n",
        "",
    )
    prepare.main(["pydocs", "--name=another"])
    assert contents(Path("data/pydocs")) == before
    capsys.readouterr()
    prepare.main(["pydocs", "--overwrite"])
    assert "runs trained on that cannot be resumed" in capsys.readouterr().err
    assert contents(Path("data/pydocs")) == contents(Path("data/another")) != before


@pytest.mark.parametrize("flags", [["--val_fraction=0.2"], ["--tokenizer=gpt2"]])
def test_the_same_text_prepared_differently_is_other_data(tiny_gpt2, flags):
    prepared(POEM)
    assert "already holds other data" in complaint("--input=poem.txt", *flags)


def test_keep_prepares_what_is_missing_or_damaged():
    folder = prepared(POEM, "poem", "--keep")
    before = contents(folder)
    (folder / "train.bin").write_bytes(b"")
    assert contents(prepared(POEM, "poem", "--keep")) == before
    assert "left out if --overwrite is given" in complaint("--keep", "--overwrite")


def test_tokens_of_another_program_are_not_overwritten():
    folder = Path("data/poem")
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(b"not ours")
    Path("poem.txt").write_text(POEM)
    for words in ([], ["--keep"]):
        message = complaint("--input=poem.txt", *words)
        assert "holds .bin files without a meta.json" in message
        assert contents(folder) == {"train.bin": b"not ours"}
    prepared(POEM, "poem", "--overwrite")  # the way out
    assert load_meta(folder)["train_tokens"] == 205


def test_data_whose_tokenizer_needs_a_library_are_good_without_it(monkeypatch):
    folder = prepared(POEM)
    meta = load_meta(folder)
    spec = {"kind": "hf", "json": "{}", "vocab_size": meta["vocab_size"]}
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": spec}))
    before = contents(folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_meta(folder)["tokenizer"] == spec  # enough to train
    prepared(POEM, "poem", "--keep")
    assert "already holds other data" in complaint("--input=poem.txt")
    assert contents(folder) == before


@pytest.mark.parametrize("kind", ["char", "gpt2"])
def test_a_text_encoded_in_pieces_has_the_tokens_of_the_whole(monkeypatch, kind):
    text = " a\n\n b  \n\tc's 12\n\n\n \u00e9\r\n\x1c\n\u3000\nd\ne" * 9
    if kind == "gpt2":
        tiktoken = pytest.importorskip("tiktoken")
        from tiktoken_ext.openai_public import r50k_pat_str as pattern  # GPT-2's own

        ranks = {bytes([byte]): byte for byte in range(256)} | {b"\n\n": 256, b" b": 257}
        library = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        made = types.SimpleNamespace(spec={"kind": "gpt2"}, encode=library.encode_ordinary)
    else:
        made = CharTokenizer("".join(sorted(set(text))))
    monkeypatch.setattr(prepare, "PIECE", 5)
    cuts = list(prepare.pieces(text))
    assert "".join(cuts) == text and len(cuts) > 10
    tokens = prepare.encode_part(text, made, np.dtype("<u2"))
    assert tokens.dtype == np.dtype("<u2")
    assert tokens.tolist() == made.encode(text)


def test_the_demo_keeps_its_data():
    makefile = (ROOT / "Makefile").read_text()
    assert "prepare.py pydocs --keep\n" in makefile


# Atomicity


def test_preparing_again_gives_the_same_bytes_and_leaves_nothing_else():
    before = contents(prepared(POEM))
    assert contents(prepared(POEM)) == before
    assert contents(prepared("other text " * 9, "poem", "--overwrite")).keys() == before.keys()


def test_a_full_disk_leaves_the_old_data(monkeypatch):
    folder = prepared(POEM)
    before = contents(folder)
    write = Path.write_bytes

    def full(path, content):
        if "val" in path.name:
            write(path, content[:1])
            raise OSError(28, "No space left on device")
        return write(path, content)

    Path("poem.txt").write_text("other text " * 9)
    monkeypatch.setattr(Path, "write_bytes", full)
    message = complaint("--input=poem.txt", "--overwrite")
    assert (
        "--data_dir=data" in message
        and "No space left" in message
        and str(folder.absolute()) in message
    )
    assert contents(folder) == before


@pytest.mark.parametrize("n_done", [0, 1, 2])
@pytest.mark.parametrize(
    "text", [POEM, POEM.swapcase()], ids=["same text", "other text of the same size"]
)
def test_killed_between_the_files(monkeypatch, n_done, text):
    """Old counts and vocabulary never stand beside new tokens; the same text is never missing."""
    folder = prepared(POEM)
    before, moved, replace = contents(folder), [], Path.replace

    def killed(part, path):
        if len(moved) == n_done:
            raise KeyboardInterrupt
        moved.append(path.name)
        return replace(part, path)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepared(text, "poem", "--overwrite")
    assert moved == ["train.bin", "val.bin"][:n_done]
    if text == POEM:
        assert contents(folder) == before
    else:
        with pytest.raises(UserError, match="no prepared data"):
            load_meta(folder)
    assert not list(folder.glob(".*"))


# Tokenizers


def test_char_tokenizer_against_a_dictionary():
    symbols = "".join(sorted(set(POEM + "\u00e9\u4e2d\U0001f600")))
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    chars = CharTokenizer(symbols)
    text = POEM + "caf\u00e9 \U0001f600\u4e2d".replace("c", "d")
    assert chars.encode(text) == [ids[symbol] for symbol in text] and all(
        type(i) is int for i in chars.encode("T")
    )
    assert (
        chars.decode(chars.encode(text)) == text
        and chars.decode_bytes(chars.encode(text)) == text.encode()
    )
    assert chars.decode(np.array([0, 1])) == symbols[:2]
    assert chars.encode("") == [] and chars.decode([]) == "" and chars.decode_bytes([]) == b""
    assert chars.vocab_size == len(symbols) and chars.spec == {"kind": "char", "symbols": symbols}
    assert make_tokenizer(json.loads(json.dumps(chars.spec))).encode(text) == chars.encode(text)


def test_start_token():
    assert CharTokenizer("\t\nab").start_token == 1
    assert CharTokenizer("abc").start_token == 0


def test_unknown_characters_are_listed_with_their_code_points():
    chars = CharTokenizer(" 5aeknv")
    with pytest.raises(UserError) as caught:
        chars.encode(
            "na\u00efve 5\u20ac \u00ef\t\U0001f600!\udcff\u20ac"
        )  # \udcff is argv's for a byte 0xff
    assert (
        "lacks '\u00ef' (U+00EF), '\u20ac' (U+20AC), '\\t' (U+0009), '\U0001f600' (U+1F600), "
        "'!' (U+0021), '\\udcff' (U+DCFF);"
    ) in str(caught.value)
    for unknown, end in (
        ("BCDEFGHIJK", "'K' (U+004B);"),
        ("BCDEFGHIJKLM", "'K' (U+004B) and 2 more;"),
    ):
        with pytest.raises(UserError) as caught:
            chars.encode("a" + unknown + unknown)
        assert end in str(caught.value) and str(caught.value).count("U+") == 10


def test_millions_of_characters_in_a_second_or_so():
    chars = CharTokenizer("".join(map(chr, range(32, 127))))
    text = "".join(map(chr, range(32, 127))) * 30_000  # 2.85 million
    began = time.process_time()
    assert len(chars.encode(text)) == len(text)
    assert time.process_time() - began < 1.5


def test_specs_that_are_none():
    for spec in (
        {"kind": "word", "symbols": "ab"},
        {"kind": "char"},
        {"kind": "char", "symbols": 5},
        {},
        None,
        "gpt2",
    ):
        with pytest.raises(UserError, match="unknown tokenizer"):
            make_tokenizer(spec)
    for symbols in ("", "ba", "aab"):
        with pytest.raises(UserError, match="sorted and distinct"):
            make_tokenizer({"kind": "char", "symbols": symbols})


@pytest.fixture
def tiny_gpt2(monkeypatch):
    """GPT-2's way with 256 bytes, two merges and end-of-text, in the place of its real files."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {**{bytes([i]): i for i in range(256)}, b"th": 256, b"the": 257}
    tiny = tiktoken.Encoding(
        "tiny",
        pat_str=r"\s?\w+|\S|\s",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 258},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": tiny}.__getitem__)


def test_gpt2(tiny_gpt2):
    bytepairs = make_tokenizer({"kind": "gpt2"})
    assert isinstance(bytepairs, GPT2Tokenizer) and bytepairs.spec == {"kind": "gpt2"}
    assert (bytepairs.vocab_size, bytepairs.start_token) == (259, 10)
    assert bytepairs.encode("the at") == [257, 32, 97, 116] and bytepairs.encode("") == []
    assert (
        bytepairs.decode(iter([257, 32])) == "the " and bytepairs.decode(np.array([257])) == "the"
    )
    emoji = bytepairs.encode("\U0001f600")
    assert emoji == [0xF0, 0x9F, 0x98, 0x80]  # one character in four tokens
    assert b"".join(bytepairs.decode_bytes([i]) for i in emoji).decode() == "\U0001f600"
    assert bytepairs.decode(emoji[:2]) == "\ufffd"
    assert 258 not in bytepairs.encode("<|endoftext|>")  # in a text it is text


def test_preparing_for_gpt2(tiny_gpt2, monkeypatch):
    folder = prepared(
        "\U0001f600 the " * 25, "emoji", "--tokenizer=gpt2"
    )  # 150 characters, the last 15 for val
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # reading what is there needs no tokenizer
    meta = load_meta(folder)
    assert meta["tokenizer"] == {"kind": "gpt2"} and (meta["vocab_size"], meta["dtype"]) == (
        259,
        "uint16",
    )
    round_ = [0xF0, 0x9F, 0x98, 0x80, 32, 257, 32]
    assert (
        load_tokens(folder, "val", meta).tolist() == [*b"he ", *round_, *round_]
        and meta["val_tokens"] == 17
    )
    assert load_tokens(folder, "train", meta)[:9].tolist() == [*round_, 0xF0, 0x9F]


def test_gpt2_without_its_files(monkeypatch, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")

    def offline(name):
        import requests

        raise requests.ConnectionError("no route")

    ways = ["TIKTOKEN_CACHE_DIR", "--tokenizer=char"]
    for failing, seconds, reason in (
        (offline, 30, "ConnectionError: no route"),
        (lambda name: time.sleep(60), 0.2, "not complete after 0.2 s"),
    ):
        monkeypatch.setattr(tiktoken, "get_encoding", failing)
        monkeypatch.setattr(tokenizer, "DOWNLOAD_SECONDS", seconds)
        with pytest.raises(UserError) as caught:
            GPT2Tokenizer()
        assert all(part in str(caught.value) for part in [*ways, reason])
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # not installed
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        GPT2Tokenizer()
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = (
            f"http://127.0.0.1:{server.getsockname()[1]}"  # and nobody listens there afterwards
        )
    Path("poem.txt").write_text(POEM)
    message = refusal(
        "--input=poem.txt",
        "--tokenizer=gpt2",
        TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"),
        HTTPS_PROXY=nobody,
        https_proxy=nobody,
    )
    assert all(part in message for part in ways)


def test_a_job_that_hangs_holds_up_neither_the_caller_nor_the_exit():
    code = "import time; from harness.download import within; within(0.1, lambda: time.sleep(60))"
    options = {**command(), "args": [sys.executable, "-c", code], "cwd": ROOT}
    done = subprocess.run(**options, capture_output=True, timeout=20)
    assert done.returncode == 1 and done.stderr.endswith("TimeoutError: not complete after 0.1 s\n")


def test_characters_need_no_tiktoken_no_requests_and_no_network():
    Path("poem.txt").write_text(POEM)
    code = """
        import sys, socket
        sys.modules["tiktoken"] = sys.modules["requests"] = None
        socket.socket = socket.getaddrinfo = None
        import prepare
        from harness.tokenizer import make_tokenizer
        prepare.main(["--input=poem.txt"])
        meta = prepare.load_meta(prepare.Path("data/poem"))
        assert make_tokenizer(meta["tokenizer"]).encode("fox")
    """
    options = {
        **command(),
        "args": [sys.executable, "-c", textwrap.dedent(code)],
        "cwd": os.getcwd(),
    }
    options["env"]["PYTHONPATH"] = str(ROOT)
    assert subprocess.run(**options, capture_output=True).stderr == ""


# pydocs


@pytest.fixture(scope="module")
def pydocs(tmp_path_factory) -> tuple[Path, Path]:
    """The real corpus, prepared by two processes with different hash seeds, silent on stderr."""
    folders = [tmp_path_factory.mktemp("pydocs") for _ in range(2)]
    runs = [
        subprocess.Popen(
            **command(PYTHONHASHSEED=str(i)),
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for i, folder in enumerate(folders)
    ]
    for process in runs:
        assert process.communicate(timeout=120)[1] == "" and process.returncode == 0
    return tuple(folder / "data" / "pydocs" for folder in folders)


def test_pydocs_is_the_same_in_every_process(pydocs):
    assert contents(pydocs[0]) == contents(pydocs[1])


def test_pydocs_is_large_ascii_and_alike_in_both_splits(pydocs):
    meta = load_meta(pydocs[0])
    assert (
        meta["tokenizer"]["symbols"] == "\n" + "".join(map(chr, range(32, 127)))
        and meta["vocab_size"] == 96
    )
    train, val = (load_tokens(pydocs[0], split, meta) for split in ("train", "val"))
    assert (
        1.5e6 < len(train) + len(val) < 2.6e6
        and abs(len(val) / (len(train) + len(val)) - 0.1) < 1e-5
    )
    share = [np.bincount(tokens, minlength=96) / len(tokens) for tokens in (train, val)]
    assert abs(share[0] - share[1]).sum() / 2 < 0.03  # total variation distance
    text = make_tokenizer(meta["tokenizer"]).decode([*train, *val])
    for document in (
        inspect.getdoc(textwrap.wrap),
        inspect.getdoc(http.server),
        *filter(None, [manual.get("break")]),
    ):
        assert text.count(document.strip()) == 1
    assert inspect.getdoc(str) not in text  # written in C, so in no .py file


DOC = "{} has a docstring that is longer than eighty characters, so that it counts as a document."


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A small standard library in the place of the real one, and no pydoc_data."""
    root = tmp_path / "lib"
    monkeypatch.setattr(pydocs_corpus.sysconfig, "get_path", {"stdlib": str(root)}.__getitem__)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    root.mkdir()

    def add(path: str, source: str | bytes) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(
            source if isinstance(source, bytes) else textwrap.dedent(source).encode()
        )

    root.joinpath("gone.py").symlink_to(root / "nowhere.py")
    add(
        "one.py",
        f'''
        """{DOC.format("Module")}"""
        import nothing_of_this_name
        raise SystemExit(3)
        class A:
            """{DOC.format("Class")}"""
            def f(self):
                "{DOC.format("Method")}"
                def g():
                    """{DOC.format("Inner")}"""
            async def h(self):
                """{DOC.format("Async")}"""
        if True:
            def shown(): """{DOC.format("Conditional")}"""
        value = """{DOC.format("Value, which is no docstring,")}"""
    ''',
    )
    add(
        "package/two.py",
        f'''
        def again():
            """{DOC.format("Method")}"""
        def g():
            """{DOC.format("Café")}

            ‘Second’ line.
            """
    ''',
    )
    add("length.py", f'def f(): "{"e" * 80}"\ndef g(): "{"f" * 81}"\n')
    add("bad.py", f'"""{DOC.format("Bad syntax")}"""\n(')
    add("nul.py", f'"""{DOC.format("Nul")}"""\n\0')
    add("latin.py", f'"""{DOC.format("Latin")} \xe9"""'.encode("latin-1"))
    add("text.txt", f'"""{DOC.format("Text file")}"""')
    for folder in (
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "package/tests",
        "idle/idle_test",
    ):
        add(f"{folder}/x.py", f'"""{DOC.format(folder)}"""')
    return root


EXPECTED = {
    *map(DOC.format, ("Module", "Class", "Method", "Inner", "Async", "Conditional")),
    "f" * 81,
    DOC.format("Caf") + "\n\nSecond line.",
}


def test_pydocs_reads_the_docstrings_of_the_library(library):
    text = pydocs_corpus.text()
    documents = text.removesuffix("\n").split("\n\n")
    # the one document of two paragraphs is two of the parts
    assert Counter(documents) == Counter("\n\n".join(EXPECTED).split("\n\n"))
    assert all(document in text for document in EXPECTED)


def test_pydocs_depends_neither_on_the_order_of_files_nor_on_pydoc_data(library, monkeypatch):
    text, found = pydocs_corpus.text(), list(pydocs_corpus.docstrings(str(library)))
    monkeypatch.setattr(pydocs_corpus, "docstrings", lambda root: reversed(found))
    assert pydocs_corpus.text() == text
    documents = sorted(EXPECTED)
    assert [text.index(document) for document in documents] != sorted(
        map(text.index, documents)
    )  # shuffled
    topics = {"if": "The if statement\tis short.\u00a0\n", "same": DOC.format("Class")}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", types.SimpleNamespace(topics=topics))
    with_topics = pydocs_corpus.text()
    assert (
        with_topics.count("The if statement        is short.") == 1
    )  # a tab is blanks up to column 24
    assert with_topics.count(DOC.format("Class")) == 1 and all(
        document in with_topics for document in EXPECTED
    )
    assert re.fullmatch(r"[\n -~]+", with_topics)


def test_a_python_without_sources(library):
    for path in library.rglob("*.py"):
        path.unlink()
    assert "pydocs: " in complaint() and "--input=FILE" in complaint() and not Path("data").exists()


# Tiny Shakespeare, from a server on this machine

PLAY = b"To be, or not to be\n" * 500  # 10,000 bytes


class Server(http.server.BaseHTTPRequestHandler):
    """Serves PLAY at /good; every other path is a way to fail."""

    closing = threading.Event()
    sent = 0

    def log_message(self, *args):
        pass

    def answer(self, status: int, body: bytes, **headers) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        try:
            getattr(self, "get_" + self.path.strip("/"))()
        except OSError:  # the client has gone
            pass

    def get_good(self):
        self.answer(200, PLAY)

    def get_moved(self):
        self.answer(302, b"", Location="/good")

    def get_not_found(self):
        self.answer(404, PLAY)  # even with the right bytes

    def get_login(self):
        self.answer(200, b"<html>Please log in</html>", Content_Type="text/html")

    def get_moved_to_login(self):
        self.answer(302, b"", Location="/login")

    def get_moved_round(self):
        self.answer(302, b"", Location="/moved_round")

    def get_same_size(self):
        self.answer(200, PLAY.swapcase())

    def get_longer(self):
        self.answer(200, PLAY + b"\n")

    def get_nothing(self):
        self.answer(200, b"")

    def get_closes_early(self):
        self.answer(200, PLAY[:5000], Content_Length=len(PLAY))

    def get_closes_early_without_length(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PLAY[:5000])

    def get_bad_gzip(self):
        self.answer(200, PLAY, Content_Encoding="gzip")

    def get_garbage(self):
        self.wfile.write(b"\x00\x01 no HTTP\r\n\r\n")

    def get_hangs(self):
        self.closing.wait(20)

    def get_hangs_in_the_middle(self):
        self.answer(200, PLAY[:5000], Content_Length=len(PLAY))
        self.closing.wait(20)

    def get_drips(self):
        self.answer(200, b"", Content_Length=len(PLAY))
        for i in range(len(PLAY)):
            self.wfile.write(PLAY[i : i + 1])
            if self.closing.wait(0.02):
                break

    def get_drips_headers(self):
        self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
        while not self.closing.wait(0.02):
            self.wfile.write(b"x")

    def get_never_ends(self):
        self.send_response(200)
        self.end_headers()
        while not self.closing.is_set():
            Server.sent += self.wfile.write(b"x" * (1 << 16))


@pytest.fixture(scope="module")
def address():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        Server.closing.set()
        server.shutdown()


@pytest.fixture
def play(address, monkeypatch) -> str:
    """PLAY in the place of tiny Shakespeare."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(shakespeare, "N_BYTES", 10_000)
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(PLAY).hexdigest())
    monkeypatch.setattr(shakespeare, "URL", address)
    return address


@pytest.mark.parametrize("path", ["good", "moved"])
def test_shakespeare(play, monkeypatch, path):
    monkeypatch.setattr(shakespeare, "URL", play + path)
    prepare.main(["shakespeare"])
    meta = load_meta(Path("data/shakespeare"))
    assert (meta["train_tokens"], meta["val_tokens"], meta["source"]) == (9000, 1000, "shakespeare")
    assert meta["sha256"] == hashlib.sha256(PLAY).hexdigest()


@pytest.mark.parametrize(
    "path, reason",
    [
        ("not_found", "404"),
        ("login", "26 bytes arrived"),
        ("moved_to_login", "26 bytes arrived"),
        ("moved_round", "TooManyRedirects"),
        ("same_size", "sha256"),
        ("longer", "10001 bytes arrived"),
        ("nothing", "0 bytes arrived"),
        ("closes_early", ""),
        ("closes_early_without_length", "5000 bytes arrived"),
        ("bad_gzip", ""),
        ("garbage", ""),
        ("hangs", "ReadTimeout"),
        ("hangs_in_the_middle", "timed out"),
        ("drips", "not complete after 0.8 s"),
        ("drips_headers", "not complete after 0.8 s"),
        ("never_ends", "bytes arrived"),
    ],
)
def test_shakespeare_from_a_bad_server(play, monkeypatch, path, reason):
    good = prepared(POEM, "shakespeare")
    before = contents(good)
    monkeypatch.setattr(shakespeare, "URL", play + path)
    if path.startswith("hangs"):
        monkeypatch.setattr(shakespeare, "STALL_SECONDS", 0.3)
    elif path.startswith("drips"):
        monkeypatch.setattr(shakespeare, "DOWNLOAD_SECONDS", 0.8)
    began = time.perf_counter()
    message = complaint("shakespeare")
    assert time.perf_counter() - began < 8
    for part in (
        play + path,
        "python prepare.py pydocs",
        "--input=FILE --name=shakespeare",
        reason,
    ):
        assert part in message, message
    assert contents(good) == before and os.listdir("data") == ["shakespeare"]
    assert (
        Server.sent < 20e6
    )  # it stops reading what is too long: the rest fits into the sockets' buffers


def test_shakespeare_without_network_or_requests(play, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"http://127.0.0.1:{server.getsockname()[1]}/"
    monkeypatch.setattr(shakespeare, "URL", nobody)
    assert "python prepare.py pydocs" in complaint("shakespeare")
    monkeypatch.setattr(shakespeare, "URL", "http://nowhere.invalid/")
    assert "python prepare.py pydocs" in complaint("shakespeare")
    monkeypatch.setitem(sys.modules, "requests", None)
    assert "requests" in complaint("shakespeare")
    assert not Path("data").exists()
    proxy = {name: nobody for name in ("HTTPS_PROXY", "https_proxy")}
    message = refusal(
        "shakespeare", NO_PROXY="", no_proxy="", **proxy
    )  # the real address, through a dead proxy
    assert "raw.githubusercontent.com" in message and "python prepare.py pydocs" in message


# What users get wrong, in processes of their own


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--input=empty.txt"], ["empty.txt", "empty"]),
        (["--input=blank.txt"], ["blank.txt", "blanks only"]),
        (["--input=folder"], ["--input=folder", "directory"]),
        (["--input=missing.txt"], ["--input=missing.txt", "No such file", os.sep]),
        (["--input=latin.txt"], ["--input=latin.txt", "not UTF-8", "byte 3"]),
        (["--input=loop.txt"], ["--input=loop.txt"]),  # a link to itself: there, but unreadable
        (["--input=poem.txt/x"], ["--input=poem.txt/x"]),
        (["--input="], ["--input= must be the name of a text file"]),
        (["--input"], ["--input", "expected one argument"]),
        (["--input=one.txt"], ["--val_fraction=0.1", "1 characters", "0 and 1"]),
        (
            ["--input=poem.txt", "--val_fraction=1e-17"],
            ["--val_fraction=1e-17", "228 characters", "228 and 0"],
        ),
        (
            ["--input=poem.txt", "--val_fraction=0.999"],
            ["--val_fraction=0.999", "228 characters", "0 and 228"],
        ),
        (["--input=poem.txt", "--val_fraction=0"], ["val_fraction=0.0", "between 0 and 1"]),
        (["--input=poem.txt", "--val_fraction=1"], ["val_fraction=1.0", "between 0 and 1"]),
        (["--input=poem.txt", "--val_fraction=nan"], ["--val_fraction", "nan"]),
        (["--input=poem.txt", "--val_fraction=10%"], ["--val_fraction", "'10%'"]),
        (["--input=poem.txt", "--tokenizer=gtp2"], ["--tokenizer", "'gtp2'", "did you mean gpt2?"]),
        (["--input=poem.txt", "--name=../up"], ["--name=../up", "folder name"]),
        (["--input=poem.txt", "--name=.."], ["--name=..", "folder name"]),
        (["--input=poem.txt", "--name="], ["--name=:", "folder name"]),
        (["--input=poem.txt", "--name=a\nb"], ["folder name"]),
        (["--input=poem.txt", "--data_dir=poem.txt"], ["--data_dir=poem.txt", "cannot write"]),
        (["--inptu=poem.txt"], ["'--inptu=poem.txt'", "did you mean input?"]),
        (["pydocs", "--input=poem.txt"], ["one corpus or one --input", "pydocs --input=poem.txt"]),
        (["pydocs", "shakespeare"], ["one corpus or one --input", "pydocs shakespeare"]),
        (
            ["shakspeare"],
            ["'shakspeare'", "did you mean shakespeare?", "pydocs, shakespeare, tasks, cups"],
        ),
        (["poem.txt"], ["'poem.txt'", "--input=poem.txt"]),
    ],
)
def test_refusals(argv, parts):
    Path("poem.txt").write_text(POEM)
    Path("empty.txt").touch()
    Path("blank.txt").write_text("  \t \n")
    Path("one.txt").write_text("a")
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    Path("folder").mkdir()
    Path("loop.txt").symlink_to("loop.txt")
    message = refusal(*argv)
    assert all(part in message for part in parts), message


def test_success_says_nothing_on_stderr():
    Path("poem.txt").write_text(POEM)
    done = subprocess.run(**command("--input=poem.txt"), capture_output=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 3
    done = subprocess.run(**command("--help"), capture_output=True)
    assert (
        done.returncode == 0
        and "--val_fraction" in done.stdout
        and "python prepare.py shakespeare" in done.stdout
    )


# Data that is not there, or damaged


@pytest.mark.parametrize(
    "folder, arguments",
    [
        ("data/pydocs", "pydocs"),
        ("data/mine", "mine"),
        ("data/my text", "'my text'"),
        ("else where/pydocs", "pydocs --data_dir='else where'"),
    ],
)
def test_no_prepared_data(folder, arguments):
    expected = (
        f"no prepared data at {Path.cwd() / folder}; run: python prepare.py {arguments}, or for a "
        f"text of your own: python prepare.py --input=FILE --name={arguments}"
    )
    for make in (
        lambda: None,
        lambda: Path(folder).mkdir(parents=True),
        lambda: Path(folder, "train.bin").touch(),
    ):
        make()
        with pytest.raises(UserError) as caught:
            load_meta(Path(folder))
        assert str(caught.value) == expected


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda meta: "{", "JSON"),
        (lambda meta: "", "JSON"),
        (lambda meta: b"\xe9", "decode"),
        (lambda meta: [meta], ""),
        (lambda meta: 5, ""),
        *(
            (lambda meta, key=key: {k: v for k, v in meta.items() if k != key}, key)
            for key in ("tokenizer", "vocab_size", "dtype", "train_tokens", "val_tokens")
        ),
        (lambda meta: {**meta, "dtype": "float16"}, "float16"),
        (lambda meta: {**meta, "dtype": "uint32"}, "uint32"),
        (lambda meta: {**meta, "vocab_size": 97}, "97"),
        (lambda meta: {**meta, "vocab_size": "28"}, ""),
        (
            lambda meta: {**meta, "train_tokens": 204},
            "train.bin is missing or has 410 bytes where 408",
        ),
        (lambda meta: {**meta, "train_tokens": "205"}, ""),
        (lambda meta: {**meta, "val_tokens": 24}, "val.bin is missing or has 46 bytes where 48"),
        (lambda meta: {**meta, "tokenizer": "char"}, ""),
        (
            lambda meta: {**meta, "tokenizer": {"kind": "words", "symbols": "ab"}},
            "unknown tokenizer",
        ),
        (
            lambda meta: {**meta, "tokenizer": {"kind": "char", "symbols": "ba"}, "vocab_size": 2},
            "sorted",
        ),
    ],
)
def test_damaged_meta(change, part):
    folder = prepared(POEM)
    changed = change(json.loads((folder / "meta.json").read_text()))
    (folder / "meta.json").write_bytes(
        changed
        if isinstance(changed, bytes)
        else (changed if isinstance(changed, str) else json.dumps(changed)).encode()
    )
    with pytest.raises(UserError) as caught:
        load_meta(folder)
    message = str(caught.value)
    assert (
        "\n" not in message
        and part in message
        and f"damaged data at {folder.absolute()}" in message
    )
    assert message.endswith("python prepare.py --input=FILE --name=poem")
    prepared(POEM)  # the way out
    assert load_meta(folder)["train_tokens"] == 205


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_damaged_tokens(name):
    folder = prepared(POEM)
    whole = (folder / name).read_bytes()
    for damage in (whole[:-1], whole + b"\0\0", b"", None):
        (folder / name).unlink()
        if damage is not None:
            (folder / name).write_bytes(damage)
        else:
            (folder / name).mkdir()
        with pytest.raises(
            UserError, match=f"damaged data.*{name} is missing or has {len(damage or b'')} bytes"
        ):
            load_meta(folder)
    (folder / name).rmdir()
    with pytest.raises(UserError, match=f"damaged data.*{name} is missing"):
        load_meta(folder)


def test_folders_and_files_in_each_others_place():
    folder = prepared(POEM)
    with pytest.raises(UserError, match="no prepared data"):
        load_meta(folder / "meta.json" / "pydocs")
    (folder / "meta.json").unlink()
    (folder / "meta.json").mkdir()
    with pytest.raises(UserError, match="damaged data.*directory"):
        load_meta(folder)


def test_an_empty_split_is_damage():
    folder = prepared(POEM)
    (folder / "val.bin").write_bytes(b"")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "val_tokens": 0}))
    with pytest.raises(UserError, match="damaged data"):
        load_meta(folder)
