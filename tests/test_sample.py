"""sample.py from end to end, against a naive decoder written here.

The naive one has no cache: it computes everything anew for every token.
"""

import io
import math
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sample as sample_file
from harness.configurator import UserError
from harness.tokenizer import CharTokenizer
from model import GPT, GPTConfig
from sample import departure, main

HERE = Path(__file__).parents[1]
SYMBOLS = "\n abcdefghijk"
BLOCK, V = 8, len(SYMBOLS)
SHAPE = {"vocab_size": V, "block_size": BLOCK, "n_layer": 2, "n_head": 2, "n_embd": 16}
MODES = ("standard", "soft", "fused")


def make_checkpoint(folder, feedback_steps=5, tokenizer=None, **shape) -> GPT:
    """Writes folder/ckpt.pt of a random model -> the model.

    Its logits are far from even, and its greedy text is varied.
    """
    torch.manual_seed(5)  # one whose recurrence contracts, so that rounding does not grow
    model = GPT(GPTConfig(**SHAPE | shape)).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(20)
        model.input_norm.weight.uniform_(0.5, 1.5)
        for block in model.blocks:
            block.attn.out.weight.mul_(5)
            block.mlp.down.weight.mul_(5)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "format": "nanofbt-1",
            "model_config": asdict(model.config),
            "model": model.state_dict(),
            "tokenizer": tokenizer or {"kind": "char", "symbols": SYMBOLS},
            "feedback_steps": feedback_steps,
            "train_config": {"seed": 1},
            "dataset": {},
            "step": 9,
        },
        folder / "ckpt.pt",
    )
    return model


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> tuple[str, GPT]:
    """A run that trained feedback, and its model."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    return str(folder), make_checkpoint(folder)


@pytest.fixture
def run_main(capsys, trained):
    """run_main(flags...) -> what `python sample.py RUN flags...` writes on stdout and stderr."""

    def run_main(*flags, run=trained[0]) -> tuple[str, str]:
        capsys.readouterr()
        main([run, "--device=cpu", *flags])
        return capsys.readouterr()

    return run_main


@pytest.fixture
def complaint(capsys, trained):
    """complaint(flags...) -> the one line of UserError; nothing may have been printed before it."""

    def complaint(*flags, run=trained[0]) -> str:
        with pytest.raises(UserError) as caught:
            main([run, *flags])
        assert "\n" not in str(caught.value) and capsys.readouterr().out == ""
        return str(caught.value)

    return complaint


def process(*argv, cwd=HERE) -> subprocess.CompletedProcess:
    command = [sys.executable, HERE / "sample.py", *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=180)


def encode(text) -> list[int]:
    return [SYMBOLS.index(character) for character in text]


def prompt_of(length) -> str:
    generator = torch.Generator().manual_seed(length)
    return "".join(SYMBOLS[i] for i in torch.randint(1, V, (length,), generator=generator))


# The naive decoder


def gate(model, h, e):
    """Eq. (4): states and embeddings (..., D) -> fused inputs (..., D)."""
    normed = e / (e.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.input_norm.weight
    return (h @ model.fusion.W_H.weight.T) / (1 + torch.exp(-normed @ model.fusion.W_G.weight.T))


def naive(model, prompt, mode, choose, n, passes=1) -> tuple[list[int], list[float]]:
    """n new tokens and their log-probabilities; choose(step, logits (V,)) -> token.

    The rule: the prompt's last block is read; where the context is full, its last half block of
    inputs continues alone.
    """
    with torch.no_grad():
        e = model.embedding.weight
        ids = torch.tensor(prompt[-BLOCK:])
        u = e[ids]  # (T, D)
        h = model.stack(u[None])[0]
        for _ in range(passes if mode == "fused" else 0):
            u = torch.cat([e[ids[:1]], gate(model, h[:-1], e[ids[1:]])])
            h = model.stack(u[None])[0]
        tokens, log_probs, state = [], [], h[-1]
        for step in range(n):
            logits = e @ state
            tokens.append(int(choose(step, logits)))
            log_probs.append(float(logits[tokens[-1]] - logits.exp().sum().log()))
            fed = e[tokens[-1]] if mode == "standard" else gate(model, state, e[tokens[-1]])
            u = torch.cat([u[-(BLOCK // 2) :] if len(u) == BLOCK else u, fed[None]])
            state = model.stack(u[None])[0, -1]
    return tokens, log_probs


def likeliest(step, logits):
    return logits.argmax()


def greedy_text(model, prompt, mode, n, passes=1) -> str:
    return "".join(SYMBOLS[i] for i in naive(model, encode(prompt), mode, likeliest, n, passes)[0])


def log_probs_of(model, prompt, text, mode, passes=1) -> list[float]:
    """Of a text that was drawn after the prompt."""
    tokens = encode(text)
    return naive(
        model, encode(prompt), mode, lambda step, logits: tokens[step], len(tokens), passes
    )[1]


def sections(report) -> dict[str, tuple[str, str]]:
    """The report of --mode=all: {mode: (text, statistics)}; the whole report must be of these."""
    found = re.findall(r"=== (\w+)\n(.*?)\n\[(.*?)\]\n\n", report, flags=re.DOTALL)
    assert (
        "".join(f"=== {mode}\n{text}\n[{statistics}]\n\n" for mode, text, statistics in found)
        == report
    )
    return {mode.lower(): (text, statistics) for mode, text, statistics in found}


# Prompts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5000])
def test_three_blocks_of_greedy_text_equal_the_naive_ones(run_main, trained, mode, length):
    prompt = prompt_of(length)
    expected = greedy_text(trained[1], prompt, mode, 3 * BLOCK)
    assert len(set(expected)) > 2
    for seed in (1, 2):
        out, err = run_main(
            f"--mode={mode}",
            f"--prompt={prompt}",
            f"--max_new_tokens={3 * BLOCK}",
            "--temperature=0",
            f"--seed={seed}",
        )
        assert out == f"{prompt}{expected}\n"
        shown = f"{length:,} tokens; its last {BLOCK} (block_size) are read"
        assert (shown in err) == (length > BLOCK) and err.count("\n") == 1 + (length > BLOCK)


def test_compiled_blocks_write_the_same_texts_by_a_few_graphs(run_main, tmp_path, count_graphs):
    """As many graphs for four layers as for two, though the cache grows with every token."""
    graphs = count_graphs(sample_file)
    counts = []
    for n_layer in (2, 4):
        folder = tmp_path / str(n_layer)
        make_checkpoint(folder, n_layer=n_layer)
        flags = ("--prompt=abcde", f"--max_new_tokens={3 * BLOCK}")
        eager = run_main(*flags, run=str(folder))[0]
        assert not graphs
        compiled = run_main(*flags, "--compile", run=str(folder))[0]
        speed = r"[\d,]+ tokens/s"
        assert re.sub(speed, "", compiled) == re.sub(speed, "", eager)
        counts.append(len(graphs))
        graphs.clear()
    assert counts == [3, 3]  # one for the prompt, one for a token, one for any number of tokens


def test_nothing_is_compiled_while_a_mode_is_timed(run_main, tmp_path, count_graphs, monkeypatch):
    """Standard is the first to be timed; compiling within it would make it the slowest."""
    graphs = count_graphs(sample_file)
    make_checkpoint(tmp_path / "run", window=3, window_every=2)
    counts = []
    decode = sample_file.sample

    def counting(*arguments):
        counts.append(len(graphs))
        return decode(*arguments)

    monkeypatch.setattr(sample_file, "sample", counting)
    for length in (2, BLOCK, 3 * BLOCK):
        flags = (f"--prompt={prompt_of(length)}", f"--max_new_tokens={2 * BLOCK}", "--compile")
        run_main(*flags, run=str(tmp_path / "run"))
        assert counts == [len(graphs)] * 3 and counts[0] > 0
        graphs.clear()
        counts.clear()


@pytest.mark.parametrize("passes", [2, 5])
def test_prefill_passes_reach_fused(run_main, trained, passes):
    prompt, model = prompt_of(BLOCK), trained[1]
    flags = ("--mode=fused", f"--prompt={prompt}", "--max_new_tokens=12", "--temperature=0")
    expected = greedy_text(model, prompt, "fused", 12, passes)
    assert expected != greedy_text(model, prompt, "fused", 12)
    assert run_main(*flags, f"--prefill_passes={passes}")[0] == f"{prompt}{expected}\n"
    once = f"{prompt}{greedy_text(model, prompt, 'fused', 12)}\n"
    assert (
        run_main(*flags, f"--prefill_passes={passes}", "--tol=1e9")[0] == once
    )  # tol ends them after the first


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_prompt_starts_from_a_newline(run_main, trained, tmp_path, mode):
    (tmp_path / "empty.txt").write_text("")
    expected = greedy_text(trained[1], "\n", mode, 12) + "\n"
    for flags in ((), ("--prompt=",), (f"--prompt_file={tmp_path}/empty.txt",)):
        out, err = run_main(f"--mode={mode}", "--max_new_tokens=12", "--temperature=0", *flags)
        assert out == expected and err.count("\n") == 1


def test_an_empty_prompt_without_newline_in_the_vocabulary_says_what_it_stands_for(
    run_main, tmp_path
):
    make_checkpoint(
        tmp_path / "run", tokenizer={"kind": "char", "symbols": SYMBOLS[1:]}, vocab_size=V - 1
    )
    out, err = run_main("--mode=soft", "--max_new_tokens=3", run=str(tmp_path / "run"))
    assert len(out) == 4 and "no newline; the empty prompt stands for its first symbol, ' '" in err
    assert (
        "newline"
        not in run_main(
            "--mode=soft", "--prompt=ab", "--max_new_tokens=3", run=str(tmp_path / "run")
        )[1]
    )


@pytest.mark.parametrize(
    "content",
    [b"ab\ncd\n", b"\xef\xbb\xbfab\ncd\n", b"ab\r\ncd\r\n", b"ab\rcd\r", b"ab\r\ncd\r"],
    ids=["plain", "with a byte order mark", "CRLF", "CR", "mixed"],
)
def test_prompts_follow_one_rule_wherever_they_come_from(
    run_main, trained, tmp_path, monkeypatch, content
):
    flags = ("--mode=soft", "--max_new_tokens=5", "--temperature=0")
    expected = "ab\ncd\n" + greedy_text(trained[1], "ab\ncd\n", "soft", 5) + "\n"
    (tmp_path / "prompt.txt").write_bytes(content)
    assert run_main(*flags, f"--prompt_file={tmp_path}/prompt.txt")[0] == expected
    text = content.decode("utf-8-sig")
    assert run_main(*flags, f"--prompt={text}")[0] == expected
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert run_main(*flags, "--prompt_file=-")[0] == expected


def test_a_prompt_file_in_the_home_folder(run_main, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "prompt.txt").write_text("abc")
    flags = ("--mode=soft", "--max_new_tokens=0")
    assert run_main(*flags, "--prompt_file=~/prompt.txt")[0] == "abc\n"


def test_a_prompt_that_starts_with_a_dash(run_main, tmp_path):
    symbols = "\n" + "".join(sorted("+-0123456789"))
    tokenizer = {"kind": "char", "symbols": symbols}
    make_checkpoint(tmp_path / "run", tokenizer=tokenizer, vocab_size=len(symbols))
    run = str(tmp_path / "run")
    for flags in (["--prompt", "-5+3"], ["--prompt=-5+3"]):
        out, _ = run_main(*flags, "--mode=soft", "--max_new_tokens=2", run=run)
        assert out.startswith("-5+3") and len(out) == 7


def test_unknown_characters_are_listed_with_their_code_points(complaint, tmp_path):
    message = complaint("--prompt=naïve 5€\t😀")
    assert message.startswith("--prompt: ")
    for shown in (
        "'n' (U+006E)",
        "'ï' (U+00EF)",
        "'5' (U+0035)",
        "'€' (U+20AC)",
        "'\\t' (U+0009)",
        "'😀' (U+1F600)",
    ):
        assert shown in message
    assert "'a'" not in message
    (tmp_path / "tab.txt").write_bytes(b"ab\t\n")
    assert "tab.txt: " in complaint(f"--prompt_file={tmp_path}/tab.txt")


def test_prompt_files_that_cannot_be_read_are_named(complaint, tmp_path):
    long_name = tmp_path / ("long" * 100)
    for path in (tmp_path / "missing.txt", tmp_path, long_name):
        message = complaint(f"--prompt_file={path}")
        assert message.startswith(f"--prompt_file={path}: ")
        assert message.endswith("name a UTF-8 text file")
    (tmp_path / "utf16.txt").write_bytes("abc\n".encode("utf-16-le"))
    message = complaint(f"--prompt_file={tmp_path}/utf16.txt")
    assert "UTF-16LE" in message
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    message = complaint(f"--prompt_file={tmp_path}/latin.txt")
    assert message.startswith(f"--prompt_file={tmp_path}/latin.txt: not UTF-8 text (at byte 3)")


# Flags


@pytest.mark.parametrize(
    "flags, shown",
    [
        (["--temperature=-1"], ["--temperature=-1.0", "0 for the likeliest"]),
        (["--temperature=nan"], ["--temperature", "nan"]),
        (["--temperature=inf"], ["--temperature", "inf"]),
        (["--top_k=-1"], ["--top_k=-1", "0 for all"]),
        (["--num_samples=0"], ["--num_samples=0", "at least 1"]),
        (["--num_samples=-2"], ["--num_samples=-2"]),
        (["--max_new_tokens=-1"], ["--max_new_tokens=-1"]),
        (["--max_new_tokens=2.5"], ["--max_new_tokens", "2.5"]),
        (["--seed=-1"], ["--seed=-1"]),
        (["--seed=9223372036854775808"], ["--seed=9223372036854775808"]),
        (["--mode=sof"], ["--mode", "'sof'", "did you mean soft"]),
        (["--temprature=1"], ["--temprature", "did you mean temperature"]),
        (["--prefill_passes=0"], ["--prefill_passes=0"]),
        (["--prefill_passes=3", "--mode=soft"], ["--prefill_passes=3", "--mode=fused"]),
        (["--prefill_passes=3", "--mode=standard"], ["--prefill_passes=3", "--mode=fused"]),
        (["--tol=-1", "--prefill_passes=3"], ["--tol=-1.0", "a positive number"]),
        (["--tol=0.1", "--mode=soft"], ["--tol=0.1", "no passes"]),
        (["--tol=0.1", "--mode=fused"], ["--tol=0.1", "no passes"]),
        (
            ["--prompt=a", "--prompt_file=b"],
            ["--prompt_file=b must be left out if --prompt is given"],
        ),
        (["--device=gpu"], ["--device=gpu", "cpu"]),
        (["be"], ["one checkpoint", "be", "quote"]),
    ],
)
def test_mistakes_are_refused_in_one_line(complaint, flags, shown):
    message = complaint(*flags)
    assert all(part in message for part in shown), message


@pytest.mark.parametrize("mode", [*MODES, "all"])
def test_no_new_tokens_is_the_prompt_alone(run_main, mode):
    out, err = run_main(f"--mode={mode}", "--prompt=abc", "--max_new_tokens=0")
    if mode != "all":
        assert out == "abc\n" and "0 tokens" in err
    else:
        assert {text for text, _ in sections(out).values()} == {"abc"}
        assert sections(out)["soft"][1] == "0 tokens; same text as Standard"
    assert run_main(f"--mode={mode}", "--max_new_tokens=0", "--num_samples=2")[0].count("---") in (
        1,
        3,
    )


def test_top_k_of_one_is_greedy_at_any_temperature(run_main, trained):
    out, _ = run_main(
        "--mode=soft", "--prompt=abc", "--top_k=1", "--temperature=50", "--max_new_tokens=20"
    )
    assert out == "abc" + greedy_text(trained[1], "abc", "soft", 20) + "\n"


# Several samples


@pytest.mark.parametrize("mode", MODES)
def test_a_greedy_batch_equals_the_single_run(run_main, trained, mode):
    flags = (f"--mode={mode}", "--prompt=abc", "--max_new_tokens=20", "--temperature=0")
    expected = "abc" + greedy_text(trained[1], "abc", mode, 20)
    assert run_main(*flags)[0] == f"{expected}\n"
    assert (
        run_main(*flags, "--num_samples=3")[0] == f"{expected}\n---\n{expected}\n---\n{expected}\n"
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_sample_is_a_text_of_its_own_from_its_first_token(run_main, trained, mode):
    flags = (
        f"--mode={mode}",
        "--prompt=abc",
        "--max_new_tokens=10",
        "--temperature=1.5",
        "--num_samples=30",
    )
    out, err = run_main(*flags)
    texts = out.removesuffix("\n").split("\n---\n")
    assert len(texts) == 30 and {len(text) for text in texts} == {13} and len(set(texts)) == 30
    assert len({text[3] for text in texts}) > 3
    log_probs = [log_probs_of(trained[1], "abc", text[3:], mode) for text in texts]
    mean = sum(map(sum, log_probs)) / 300
    assert re.search(
        rf"sample.py: {mode}: 300 tokens, [\d,]+ tokens/s, mean log-probability (.*)\n$", err
    )
    assert float(err.split()[-1]) == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top_k", [0, 4])
def test_a_sample_is_the_same_whatever_num_samples_is(run_main, mode, top_k):
    flags = (
        f"--mode={mode}",
        "--prompt=abc",
        "--max_new_tokens=12",
        "--seed=3",
        f"--top_k={top_k}",
    )
    texts = {}
    for n in (1, 2, 4):
        out, _ = run_main(*flags, f"--num_samples={n}")
        texts[n] = out.removesuffix("\n").split("\n---\n")
    assert len(set(texts[4])) == 4  # draws of their own
    assert texts[1] == texts[4][:1]
    assert texts[2] == texts[4][:2]


def test_more_samples_than_memory_holds(complaint):
    message = complaint(
        "--num_samples=1000000000000", "--prompt=abc", "--mode=soft", "--device=cpu"
    )
    assert message.startswith("out of memory (")
    assert message.endswith("; lower --num_samples=1000000000000")


# The report of --mode=all, which is the default


@pytest.mark.parametrize("passes", [1, 3])
def test_the_report_s_numbers(run_main, trained, monkeypatch, passes):
    ticks = iter(range(0, 100, 2))  # two seconds from one look at the clock to the next
    monkeypatch.setattr(sample_file, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    n = 30
    out, err = run_main(
        "--prompt=abcde", f"--max_new_tokens={n}", "--temperature=0.7", f"--prefill_passes={passes}"
    )
    assert err == ""
    report = sections(out)
    assert list(report) == list(MODES)
    texts = {mode: text.removeprefix("abcde") for mode, (text, _) in report.items()}
    assert {len(text) for text in texts.values()} == {n} and len(set(texts.values())) == 3
    for mode, (_, statistics) in report.items():
        rate, log_prob = re.match(
            r"30 tokens, (\d+) tokens/s, mean log-probability (-?[\d.]+)", statistics
        ).groups()
        assert rate == "15"
        log_probs = log_probs_of(trained[1], "abcde", texts[mode], mode, passes)
        assert float(log_prob) == pytest.approx(sum(log_probs) / n, abs=1e-4)
    assert "departs" not in report["standard"][1] and "same" not in report["standard"][1]
    for mode in ("soft", "fused"):
        at = next(i for i in range(n) if texts[mode][i] != texts["standard"][i])
        ours, theirs = (texts[name][max(at - 10, 0) : at + 10] for name in (mode, "standard"))
        assert report[mode][1].endswith(
            f"; departs from Standard at token {at + 1}: {ours!r}, there {theirs!r}"
        )


def test_the_report_is_the_single_modes_put_together(run_main):
    flags = ("--prompt=abc", "--max_new_tokens=25", "--seed=4", "--top_k=5")
    report = sections(run_main(*flags)[0])
    assert report.keys() == sections(run_main(*flags, "--mode=all")[0]).keys()
    for mode in MODES:
        assert run_main(*flags, f"--mode={mode}")[0] == report[mode][0] + "\n"


def test_several_samples_in_the_report_name_the_first_that_departs(run_main):
    report = sections(run_main("--prompt=abcd", "--max_new_tokens=12", "--num_samples=4")[0])
    texts = {
        mode: [part.removeprefix("abcd") for part in text.split("\n---\n")]
        for mode, (text, _) in report.items()
    }
    for mode in ("soft", "fused"):
        pairs = list(zip(texts[mode], texts["standard"], strict=True))
        at, which = min(
            (i, row) for row in range(4) for i in range(12) if pairs[row][0][i] != pairs[row][1][i]
        )
        assert f"departs from Standard at token {at + 1} of sample {which + 1}: " in report[mode][1]


def test_departure_by_hand():
    letters = CharTokenizer("abcdefghijkl")
    standard = [
        letters.encode("aaaaaaaaaaaaaaaaaaaaaaaa"),
        letters.encode("abcdefghijklabcdefghijkl"),
    ]
    ours = [letters.encode("aaaaaaaaaaaaaaaaaaaabaaa"), letters.encode("abcdefghijkllbcdefghijkl")]
    assert departure(letters, ours, standard) == (
        "departs from Standard at token 13 of sample 2: "
        "'cdefghijkllbcdefghij', there 'cdefghijklabcdefghij'"
    )
    assert departure(letters, ours[:1], standard[:1]) == (
        "departs from Standard at token 21: 'aaaaaaaaaabaaa', there 'aaaaaaaaaaaaaa'"
    )
    assert departure(letters, standard, standard) == "same text as Standard"


def test_equal_texts_are_called_the_same(run_main):
    report = sections(run_main("--max_new_tokens=1", "--prompt=a")[0])
    assert report["soft"][1].endswith(
        "; same text as Standard"
    )  # the state comes in with the second token
    assert report["fused"][1].endswith(
        "; same text as Standard"
    )  # a prompt of one token has nothing to fuse


def test_soft_s_first_token_is_standard_s(run_main):
    firsts = set()
    for seed in range(12):
        report = sections(
            run_main("--prompt=abcdefg", "--max_new_tokens=1", "--temperature=2", f"--seed={seed}")[
                0
            ]
        )
        assert report["soft"][0] == report["standard"][0]
        firsts.add(report["soft"][0])
    assert len(firsts) > 2


@pytest.mark.parametrize(
    "steps, shape, way_out",
    [
        (0, {}, "--pass_mix=0,0,1"),
        (0, {"fusion": "none"}, "--fusion=residual"),
        (3, {"fusion": "none"}, "--fusion=residual"),
    ],
)
def test_feedback_that_was_never_trained_is_refused(
    run_main, complaint, tmp_path, steps, shape, way_out
):
    run = str(tmp_path / "my run")
    make_checkpoint(tmp_path / "my run", steps, **shape)
    for mode in ("soft", "fused"):
        message = complaint(f"--mode={mode}", run=run)
        assert message.startswith(
            f"--mode={mode}: {run} never trained latent feedback; continue with: python train.py "
        )
        assert f"--init_from='{run}'" in message and way_out in message
    text, err = run_main("--mode=standard", "--prompt=ab", "--max_new_tokens=20", run=run)
    assert "never" not in err
    out, err = run_main("--prompt=ab", "--max_new_tokens=20", run=run)
    assert list(sections(out)) == ["standard"] and sections(out)["standard"][0] + "\n" == text
    assert err.startswith("sample.py: Standard only: ") and way_out in err and err.count("\n") == 1


def test_one_call_leaves_nothing_to_the_next(run_main):
    flags = ("--prompt=abc", "--max_new_tokens=20", "--num_samples=2", "--mode=soft")
    first = run_main(*flags)[0]
    run_main("--prompt=kkkkkkk", "--max_new_tokens=9", "--mode=fused", "--seed=8")
    torch.manual_seed(5)
    assert run_main(*flags)[0] == first != run_main(*flags, "--seed=2")[0]


# Streams, and tokens that are parts of characters


class Terminal:
    """A stdout that keeps what was visible at each flush."""

    def __init__(self):
        self.pending = self.visible = ""

    def write(self, text):
        self.pending += text

    def flush(self):
        self.visible, self.pending = self.visible + self.pending, ""

    def isatty(self):
        return True


class Bytes:
    """A byte-level tokenizer in place of GPT-2's: three symbols are parts of characters."""

    pieces = (b"\n", b"a", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac")
    spec, vocab_size, start_token = {"kind": "gpt2"}, len(pieces), 0

    def encode(self, text):
        return [self.pieces.index(character.encode()) for character in text]

    def decode_bytes(self, ids):
        return b"".join(self.pieces[i] for i in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode(errors="replace")


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """scripted(ids, before): a run with the tokenizer Bytes whose draws are ids.

    before(n) is called before draw n.
    """
    make_checkpoint(tmp_path / "bytes", tokenizer=Bytes.spec, vocab_size=Bytes.vocab_size)

    def scripted(ids, before=lambda n: None) -> str:
        def pick(logits):
            n = next(counter)
            before(n)
            return torch.full((len(logits),), ids[n])

        counter = iter(range(len(ids)))
        monkeypatch.setattr(sample_file, "make_tokenizer", lambda spec: Bytes())
        monkeypatch.setattr(sample_file, "sampler", lambda *settings: pick)
        return str(tmp_path / "bytes")

    return scripted


def test_a_single_text_appears_as_it_is_drawn_in_whole_characters(scripted, monkeypatch):
    terminal = Terminal()
    shown = []
    run = scripted([1, 2, 3, 4, 5, 1, 2], before=lambda n: shown.append(terminal.visible))
    monkeypatch.setattr(sys, "stdout", terminal)
    main([run, "--mode=soft", "--prompt=aa", "--max_new_tokens=7", "--device=cpu"])
    assert shown == ["aa", "aaa", "aaa", "aaaé", "aaaé", "aaaé€", "aaaé€a"]
    assert terminal.visible + terminal.pending == "aaaé€a\ufffd\n"


def test_a_text_that_starts_from_a_newline_does_not_show_it(scripted, run_main):
    out, err = run_main("--mode=soft", "--max_new_tokens=3", run=scripted([1, 2, 3]))
    assert out == "aé\n" and err.count("\n") == 1


def test_several_texts_come_out_when_done_in_whole_characters(scripted, monkeypatch):
    terminal = Terminal()
    shown = []
    run = scripted([2, 3, 1], before=lambda n: shown.append(terminal.visible))
    monkeypatch.setattr(sys, "stdout", terminal)
    main(
        [run, "--mode=fused", "--prompt=a", "--max_new_tokens=3", "--num_samples=2", "--device=cpu"]
    )
    assert shown == ["", "", ""] and terminal.visible + terminal.pending == "aéa\n---\naéa\n"


# As a program


def test_piped_text_is_plain_and_statistics_go_to_stderr(trained, tmp_path):
    shutil.copy(
        Path(trained[0]) / "ckpt.pt", tmp_path / "alone.pt"
    )  # the file is all that it needs
    done = process(
        "alone.pt",
        "--mode=soft",
        "--prompt=abc",
        "--device=cpu",
        "--max_new_tokens=9",
        "--temperature=0",
        cwd=tmp_path,
    )
    assert (
        done.returncode == 0
        and done.stdout == "abc" + greedy_text(trained[1], "abc", "soft", 9) + "\n"
    )
    assert re.fullmatch(
        r"sample.py: soft: 9 tokens, [\d,]+ tokens/s, mean log-probability -\d\.\d+\n", done.stderr
    )


def test_help_states_the_rules(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "Of a long prompt the last block_size tokens are read" in words
    assert "the stack re-reads the last half block of the inputs" in words
    assert "An empty prompt stands for a newline" in words
    assert "A carriage return, alone or before a newline, is read as a newline" in words
    assert "sample 1 is the same whatever --num_samples is" in words


@pytest.mark.parametrize(
    "argv, shown",
    [
        (["no/such.pt"], "no checkpoint at no/such.pt"),
        (["{run}", "--prompt=é€"], "'€' (U+20AC)"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(trained, argv, shown):
    done = process(*(word.format(run=trained[0]) for word in argv))
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("sample.py: ")
        and done.stderr.count("\n") == 1
        and shown in done.stderr
    )


def test_without_a_checkpoint_it_names_the_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hints = ("none were found under out/", "there are: out/one", "there are: out/one, out/two")
    for hint, name in zip(hints, ("one", "two", "three"), strict=True):
        with pytest.raises(UserError, match=f"^name one checkpoint, .*; {hint}$"):
            main([])
        make_checkpoint(tmp_path / "out" / name)


@pytest.mark.parametrize(
    "content, shown", [(b"", "(0 bytes)"), (b"a text\n", "(7 bytes)"), (None, "cut short")]
)
def test_files_that_are_no_checkpoint_are_named(complaint, trained, tmp_path, content, shown):
    whole = (Path(trained[0]) / "ckpt.pt").read_bytes()
    (tmp_path / "ckpt.pt").write_bytes(whole[: len(whole) // 2] if content is None else content)
    message = complaint(run=str(tmp_path))
    assert str(tmp_path / "ckpt.pt") in message and shown in message


def change_checkpoint(trained, tmp_path, change) -> str:
    """A copy of the trained run whose checkpoint `change` altered."""
    checkpoint = torch.load(Path(trained[0]) / "ckpt.pt", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    return str(tmp_path)


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda saved: saved["model_config"].update(n_experts=4), "n_experts"),
        (lambda saved: saved["model_config"].pop("eps"), "eps"),
        (lambda saved: saved["model"].pop("blocks.0.attn.q.weight"), "blocks.0.attn.q.weight"),
        (lambda saved: saved["model"].update(extra=torch.ones(2)), "extra"),
        (lambda saved: saved["model"]["embedding.weight"].fill_(math.nan), "embedding.weight"),
        (lambda saved: saved["model"]["embedding.weight"][0].fill_(math.inf), "not finite"),
        (lambda saved: saved.update(tokenizer={"kind": "words"}), "unknown tokenizer"),
        (lambda saved: saved.pop("tokenizer"), "tokenizer"),
    ],
)
def test_a_checkpoint_of_other_code_or_without_finite_weights(
    complaint, trained, tmp_path, change, part
):
    run = change_checkpoint(trained, tmp_path, change)
    for flags in ((), ("--temperature=0",)):
        assert part in complaint(*flags, run=run)


def test_a_checkpoint_s_path_that_is_too_long(complaint):
    assert "long" in complaint(run="long" * 100)


def test_a_folder_without_a_checkpoint_is_named_with_the_runs_there_are(
    complaint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_checkpoint(tmp_path / "out/one")
    message = complaint(run="empty")
    assert "no checkpoint at empty/ckpt.pt" in message and "there are: out/one" in message
