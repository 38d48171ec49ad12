"""bench in miniature, against counts made here."""

import json
import math

import numpy as np
import pytest
import torch

from experiments import bench
from harness.configurator import UserError
from model import GPT

T = 16  # block_size of the fixtures' runs

SMALL = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=16",
    "--batch_size=2",
    "--rounds=2",
    "--threads=1",
    "--compile=false",
    "--device=cpu",
]
TRAINING = [
    "machine_gflops",
    "step_share",
    "products_share",
    "step_2_passes",
    "step_3_passes",
    "step_4_passes",
    *(f"memory_{k}_passes" for k in (1, 2, 3, 4)),
]
DECODING = [
    "standard_tokens",
    "soft_token",
    "fused_token",
    "uncached_token",
    "parallel_1",
    "parallel_2",
    "parallel_4",
    "parallel_8",
]
NORMS = ["rms_norm", "rsqrt_norm"]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bench, "SHORTEST", 1e-4)
    monkeypatch.setattr(bench, "SQUARE", 64)


def bench_lines(capsys, tmp_path, *argv: str) -> dict[str, float]:
    """The printed numbers, which must be those of the JSON file and finite."""
    assert bench.main([*argv, f"--json={tmp_path}/bench.json"]) == 0
    printed = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:])
    told = json.loads((tmp_path / "bench.json").read_text())
    assert list(told["measured"]) == list(printed) and told["where"].startswith("cpu, 1 threads")
    for name, entry in told["measured"].items():
        assert 0 < entry["value"] < math.inf and float(printed[name]) == pytest.approx(
            entry["value"], rel=1e-3
        )
        assert entry["what"]
    return {name: entry["value"] for name, entry in told["measured"].items()}


def test_bench_in_miniature(quick, capsys, tmp_path):
    found = bench_lines(capsys, tmp_path, *SMALL)
    assert list(found) == TRAINING + DECODING + NORMS
    growth = np.diff([found[f"memory_{k}_passes"] for k in (1, 2, 3, 4)])
    assert (growth > 0).all() and growth[1] == pytest.approx(
        growth[2], rel=0.05
    )  # each pass costs the same


def test_bench_of_a_plain_model_and_of_a_checkpoint(quick, tiny_run, capsys, tmp_path):
    plain = bench_lines(capsys, tmp_path, *SMALL, "--fusion=none")
    assert list(plain) == [
        "machine_gflops",
        "step_share",
        "products_share",
        "memory_1_passes",
        "standard_tokens",
        "uncached_token",
        "parallel_1",
        *NORMS,
    ]
    trained = bench_lines(
        capsys, tmp_path, tiny_run, "--rounds=1", "--compile=false", "--device=cpu", "--threads=1"
    )
    assert list(trained) == TRAINING + DECODING + NORMS
    assert json.loads((tmp_path / "bench.json").read_text())["model_config"]["block_size"] == T


def test_bench_counts_by_hand(monkeypatch, capsys, tmp_path):
    """A clock that gives every thing its known seconds makes shares that one can count."""
    took = {
        "square": 2.0,
        "products": 4.0,
        "step 1": 8.0,
        "step 2": 20.0,
        "step 3": 36.0,
        "step 4": 32.0,
        "eager": 3.0,
        "fast": 1.5,
        "standard": 0.5,
        "soft": 0.75,
        "fused": 1.0,
        "uncached": 2.0,
        "replay": 4.0,
        "parallel 1": 1.0,
        "parallel 2": 2.0,
        "parallel 4": 6.0,
        "parallel 8": 8.0,
        "layer_norm": 2.0,
        "rms_norm": 5.0,
        "rsqrt_norm": 3.0,
    }

    positions, work, stack = [], {}, GPT.stack
    monkeypatch.setattr(
        GPT, "stack", lambda *args: positions.append(args[1][..., 0].numel()) or stack(*args)
    )

    def fake(things, rounds, device):
        for name, thing in things.items():
            thing()  # a second call must do the same
            positions.clear()
            thing()
            work[name] = sum(positions)
        return [{name: took[name] for name in things}] * rounds

    monkeypatch.setattr(bench, "turns", fake)
    monkeypatch.setattr(bench, "compiled", lambda model, device: lambda *args: model(*args))
    found = bench_lines(capsys, tmp_path, *SMALL, "--compile=true")
    block = 4 * 32 * 32 + 3 * 32 * 96  # n_hidden is 8/3 of 32, rounded up to a multiple of 32
    matrices = 256 * 32 + 2 * block
    gains = (
        2 * (2 * 32 + 2 * 16) + 2 * 32
    )  # two norms and QK-norm in a block, and two around the stack
    assert found["machine_gflops"] == pytest.approx(2 * 1024**3 / 2.0 / 1e9)
    assert found["step_share"] == pytest.approx(
        6 * (matrices + gains) * 2 * T / 8.0 / (2 * 1024**3 / 2.0)
    )
    assert found["products_share"] == pytest.approx(
        6 * matrices * 2 * T / 4.0 / (2 * 1024**3 / 2.0)
    )
    expected = {
        "step_2_passes": 20 / 16,
        "step_3_passes": 36 / 24,
        "step_4_passes": 1.0,
        "compiled_step": 0.5,
        "standard_tokens": 8 / 0.5,
        "soft_token": 1.5,
        "fused_token": 2.0,
        "uncached_token": 4.0,
        "parallel_1": 0.25,
        "parallel_2": 0.5,
        "parallel_4": 1.5,
        "parallel_8": 2.0,
        "rms_norm": 2.5,
        "rsqrt_norm": 1.5,
    }
    assert {name: found[name] for name in expected} == expected
    half = T // 2  # of the window is the prompt, whose prefill only the replay repeats
    assert {name: positions for name, positions in work.items() if positions} == (
        {f"step {k}": 2 * T * k for k in (1, 2, 3, 4)}
        | {"eager": 2 * T, "fast": 2 * T}
        | {mode: half for mode in ("standard", "soft", "fused")}
        | {"uncached": sum(range(half + 1, T + 1))}
        | {"replay": T}
        | {f"parallel {k}": T * k for k in (1, 2, 4, 8)}
    )


def test_bench_without_a_compiler_goes_on(quick, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        bench, "compiled", lambda model, device: model
    )  # what machine.compiled does then
    found = bench_lines(capsys, tmp_path, *SMALL, "--compile=true", "--rounds=1")
    assert list(found) == TRAINING + DECODING + NORMS


def test_products_multiply_what_a_step_does():
    matrices = [torch.randn(3, 5), torch.randn(4, 2)]
    for weight, (y, dx, dw) in zip(matrices, bench.products(matrices, 7)(), strict=True):
        assert (
            y.shape == (7, weight.size(0))
            and dx.shape == (7, weight.size(1))
            and dw.shape == weight.shape
        )


def test_kept_bytes_by_hand():
    x = torch.randn(10, 5, requires_grad=True)
    assert (
        bench.kept_bytes(lambda: (x * x).sum()) == 50 * 4 + 4
    )  # x, saved twice, and the sum itself
    assert bench.kept_bytes(lambda: x.exp().sum()) == 50 * 4 + 4  # exp(x)
    assert bench.kept_bytes(lambda: (x.exp() * x).sum()) == 2 * 50 * 4 + 4
    assert (
        bench.kept_bytes(lambda: (x[:2] ** 2).sum()) == 50 * 4 + 4
    )  # a view keeps its whole storage


def test_turns_are_taken_in_turn(monkeypatch):
    now, calls = [0.0], []

    def thing(name: str, seconds: float):
        def call():
            calls.append(name)
            now[0] += seconds * (
                10 if calls.count(name) == 1 else 1
            )  # the first call is slow, as in life

        return call

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench, "SHORTEST", 0.02)
    seconds = bench.turns(
        {"quick": thing("quick", 0.008), "slow": thing("slow", 1.0)}, 3, torch.device("cpu")
    )
    assert calls == ["quick"] * 2 + ["slow"] * 2 + (["quick"] * 3 + ["slow"]) * 3
    assert [list(turn.values()) for turn in seconds] == [pytest.approx([0.008, 1.0])] * 3
    assert (
        bench.ratio([{"a": 2.0, "b": 1.0}, {"a": 9.0, "b": 3.0}, {"a": 5.0, "b": 1.0}], "a", "b")
        == 3.0
    )


@pytest.mark.parametrize(
    "argv, told",
    [
        (["a", "b"], "one checkpoint"),
        (["out/demo", "--n_layer=2"], "its own shape"),
        (["--rounds=0"], "rounds=0"),
        (["--batch_size=0"], "batch_size=0"),
        (["--threads=-1"], "threads=-1"),
        (["--json=no/such/x.json"], "--json=no/such"),
        (["--json=."], "--json=."),
        (["--n_head=3"], "n_embd=128"),
        (["--device=gpu"], "--device=gpu"),
        (["no/such/run"], "no checkpoint at no/such/run"),
    ],
)
def test_bench_names_the_mistake(argv, told):
    with pytest.raises(UserError, match=told.replace(".", r"\.")):
        bench.main(argv)
