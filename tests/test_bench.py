"""The bench in miniature: its clock, its counts, its numbers, against arithmetic written here."""

import datetime
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from by_hand import naive_inputs
from torch import nn

from experiments import bench, peers, timing
from harness.checkpoint import load_model
from harness.configurator import UserError
from model import GPT, GPTConfig

T = 16  # block_size of the fixtures' runs

SMALL = [
    "--n_layer=1",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=16",
    "--batch_size=2",
    "--rounds=1",
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
]
MEMORY = [
    *(f"memory_{k}_passes" for k in (1, 2, 3, 4)),
    *(f"recompute_memory_{k}" for k in (1, 2, 3, 4)),
    *(f"recompute_step_{k}" for k in (1, 2, 3, 4)),
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
ALL = TRAINING + MEMORY + DECODING + NORMS


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timing, "SHORTEST", 1e-4)
    monkeypatch.setattr(bench, "SQUARE", 64)


def bench_lines(capsys, tmp_path, *argv: str) -> dict[str, float]:
    """The printed numbers, which must be those of the JSON file and finite."""
    assert bench.main([*argv, f"--json={tmp_path}/bench.json"]) == 0
    printed = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:])
    told = json.loads((tmp_path / "bench.json").read_text())
    assert list(told["measured"]) == list(printed)
    assert told["command"].startswith("python -m experiments.bench ") and told["commit"]
    assert told["date"] == datetime.date.today().isoformat() and told["settings"]["threads"] == 1
    assert told["where"].startswith("cpu, 1 threads")
    found = {}
    for name, entry in told["measured"].items():
        assert 0 < entry["value"] < math.inf
        assert float(printed[name]) == pytest.approx(entry["value"], rel=1e-3)
        assert entry["what"]
        found[name] = entry["value"]
    return found


def test_bench_in_miniature(quick, capsys, tmp_path):
    found = bench_lines(capsys, tmp_path, *SMALL)
    assert list(found) == ALL
    growth = np.diff([found[f"memory_{k}_passes"] for k in (1, 2, 3, 4)])
    assert (growth > 0).all()
    assert growth[1] == pytest.approx(growth[2], rel=0.05)  # each pass costs the same
    for k in (2, 3, 4):
        kept = found[f"memory_{k}_passes"] / found["memory_1_passes"]
        assert found[f"recompute_memory_{k}"] < kept - 0.1


def test_bench_of_a_plain_model(quick, capsys, tmp_path):
    plain = bench_lines(capsys, tmp_path, *SMALL, "--fusion=none")
    expected = ["machine_gflops", "step_share", "products_share"]
    expected += ["memory_1_passes", "recompute_memory_1", "recompute_step_1"]
    expected += ["standard_tokens", "uncached_token", "parallel_1", *NORMS]
    assert list(plain) == expected


def test_bench_of_a_checkpoint(quick, tiny_run, monkeypatch, capsys, tmp_path):
    seen = []

    def section(model, settings, device):
        seen.append(model)
        yield "weights", float(model.embedding.weight.detach().abs().sum()), "of the checkpoint"

    monkeypatch.setattr(bench, "SECTIONS", (section,))
    found = bench_lines(capsys, tmp_path, tiny_run, "--device=cpu", "--threads=1")
    trained, _ = load_model(tiny_run, "cpu")
    assert found["weights"] == float(trained.embedding.weight.detach().abs().sum())
    told = json.loads((tmp_path / "bench.json").read_text())
    assert told["model_config"]["block_size"] == seen[0].config.block_size == T


TOOK = {
    "square": 2.0,
    "products": 4.0,
    "step 1": 8.0,
    "step 2": 20.0,
    "step 3": 36.0,
    "step 4": 32.0,
    "eager 1": 3.0,
    "fast 1": 1.5,
    "eager 3": 8.0,
    "fast 3": 6.0,
    "keep 1": 2.0,
    "keep 2": 4.0,
    "keep 3": 6.0,
    "keep 4": 8.0,
    "recompute 1": 2.5,
    "recompute 2": 6.0,
    "recompute 3": 7.5,
    "recompute 4": 8.0,
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


@pytest.fixture
def work(monkeypatch) -> dict[str, int]:
    """Gives every thing its seconds of TOOK; -> the positions the stack read in a call of it."""
    positions = []
    found = {}
    stack = GPT.stack

    def counting_stack(model, u, cache=None):
        positions.append(u[..., 0].numel())
        return stack(model, u, cache)

    def fake_turns(things, rounds, device):
        for name, thing in things.items():
            thing()  # a second call must do the same
            positions.clear()
            thing()
            found[name] = sum(positions)
        return [{name: TOOK[name] for name in things}] * rounds

    monkeypatch.setattr(GPT, "stack", counting_stack)
    monkeypatch.setattr(bench, "turns", fake_turns)
    monkeypatch.setattr(bench, "compile_blocks", lambda blocks, device: True)
    return found


def test_bench_counts_by_hand(work, capsys, tmp_path):
    """With a clock that gives every thing its known seconds, the shares are numbers to count."""
    compiling = [word for word in SMALL if not word.startswith("--compile")]
    found = bench_lines(capsys, tmp_path, *compiling, "--compile=true")
    block = 4 * 32 * 32 + 3 * 32 * 96  # n_hidden is 8/3 of 32, rounded up to a multiple of 32
    matrices = 256 * 32 + block
    gains = (2 * 32 + 2 * 16) + 2 * 32  # two norms and QK-norm in a block, two around the stack
    rate = 2 * 1024**3 / 2.0
    assert found["machine_gflops"] == pytest.approx(rate / 1e9)
    assert found["step_share"] == pytest.approx(6 * (matrices + gains) * 2 * T / 8.0 / rate)
    assert found["products_share"] == pytest.approx(6 * matrices * 2 * T / 4.0 / rate)
    expected = {
        "step_2_passes": 20 / 16,
        "step_3_passes": 36 / 24,
        "step_4_passes": 1.0,
        "compiled_1_passes": 0.5,
        "compiled_3_passes": 0.75,
        "recompute_step_1": 1.25,
        "recompute_step_2": 1.5,
        "recompute_step_3": 1.25,
        "recompute_step_4": 1.0,
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
    read = {f"step {k}": 2 * T * k for k in (1, 2, 3, 4)}
    read |= {f"{name} {k}": 2 * T * k for name in ("eager", "fast") for k in (1, 3)}
    read |= {f"{name} {k}": 2 * T * k for name in ("keep", "recompute") for k in (1, 2, 3, 4)}
    read |= {mode: half for mode in ("standard", "soft", "fused")}
    read |= {"uncached": sum(range(half + 1, T + 1)), "replay": T}
    read |= {f"parallel {k}": T * k for k in (1, 2, 4, 8)}
    assert {name: n for name, n in work.items() if n} == read


def test_one_compilation_serves_all_passes(quick, monkeypatch):
    def compile_blocks(blocks, device) -> bool:
        for block in blocks:
            block.compile(backend="eager")
        return True

    monkeypatch.setattr(bench, "compile_blocks", compile_blocks)
    torch.compiler.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    model = GPT(GPTConfig(block_size=8, n_layer=2, n_head=2, n_embd=16))
    settings = bench.Settings(batch_size=2, rounds=1)
    found = [name for name, _, _ in bench.compiling(model, settings, torch.device("cpu"))]
    assert found == ["compiled_1_passes", "compiled_3_passes"]
    # `layer`, which the cache asks for, is one number in one block and another in the next
    assert 1 <= graphs["unique_graphs"] - before <= 2
    assert model.blocks[0]._compiled_call_impl is None  # a copy was compiled


def test_bench_without_a_compiler_continues(monkeypatch):
    monkeypatch.setattr(bench, "compile_blocks", lambda blocks, device: False)
    model = GPT(GPTConfig(block_size=8, n_layer=1, n_head=2, n_embd=16))
    assert list(bench.compiling(model, bench.Settings(), torch.device("cpu"))) == []


def test_products_multiply_what_a_step_does():
    matrices = [torch.randn(3, 5), torch.randn(4, 2)]
    for weight, (y, dx, dw) in zip(matrices, bench.products(matrices, 7)()):
        assert y.shape == (7, weight.size(0))
        assert dx.shape == (7, weight.size(1))
        assert dw.shape == weight.shape


# --------------------------------------------------------------------------------------------------
# timing


def peak(work) -> int:
    with timing.PeakMemory() as memory:
        work()
    assert memory.held == 0
    return memory.peak


def test_peak_memory_by_hand():
    x = torch.randn(10, 5)  # 200 bytes, which were there before

    def chain():
        y = x + 1
        z = y + 1  # y and z: 400
        del y
        return z + 1  # z and this: 400

    def with_gradient():
        leaf = x.detach().requires_grad_()  # shares x's storage
        y = leaf.exp()  # kept for the backward: 200
        total = y.sum()  # 4
        del y
        total.backward()

    assert peak(chain) == 400
    assert peak(lambda: x[:2].view(-1)) == 0  # views hold nothing of their own
    assert peak(lambda: x.add_(1)) == 0  # nor does what changes in place
    assert peak(lambda: x.double()) == 400
    # backward: d total (4), which is expanded, then dx = dy * y (200)
    assert peak(with_gradient) == 200 + 4 + 4 + 200


def test_turns_are_taken_in_turn(monkeypatch):
    now = [0.0]
    calls = []

    def thing(name: str, seconds: float):
        def call():
            calls.append(name)
            slow = calls.count(name) == 1  # the first call is slow, as in life
            now[0] += seconds * (10 if slow else 1)

        return call

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "SHORTEST", 0.02)
    things = {"quick": thing("quick", 0.008), "slow": thing("slow", 1.0)}
    seconds = timing.turns(things, 3, torch.device("cpu"))
    assert calls == ["quick"] * 2 + ["slow"] * 2 + (["quick"] * 3 + ["slow"]) * 3
    assert [list(turn.values()) for turn in seconds] == [pytest.approx([0.008, 1.0])] * 3


def test_turns_read_the_clock_that_is_given():
    now = [0.0]

    def thing():
        now[0] += 2.0

    seconds = timing.turns({"one": thing}, 2, torch.device("cpu"), lambda: now[0])
    assert seconds == [{"one": 2.0}] * 2


def test_turns_wait_for_the_device_that_works(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device = torch.device("cuda:1")
    timing.turns({"sum": lambda: sum(range(100))}, 1, device)
    assert waited and set(waited) == {device}


def test_medians_over_turns():
    seconds = [{"a": 2.0, "b": 1.0}, {"a": 9.0, "b": 3.0}, {"a": 5.0, "b": 1.0}]
    assert timing.ratio(seconds, "a", "b") == 3.0  # of 2, 3 and 5
    assert timing.typical(seconds, "a") == 5.0


def test_a_step_clips_and_descends():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    timing.train_step(lambda: (weight * torch.tensor([6.0, 8.0])).sum(), optimizer)
    # the gradient (6, 8) has norm 10 and is clipped to norm 1: (0.6, 0.8)
    assert weight.tolist() == pytest.approx([2.7, 3.6])
    assert weight.grad is None


# --------------------------------------------------------------------------------------------------
# --peers

TINY = peers.Shape(n_layer=1, n_embd=32, n_head=2, block_size=16, batch_size=2)


@pytest.fixture
def tiny_shape(quick, monkeypatch):
    monkeypatch.setattr(peers, "SHAPES", (TINY,))


def test_ours_have_equal_parameters():
    for shape in peers.SHAPES:
        model, plain = peers.our_models(shape)
        assert plain.fusion is None
        assert peers.n_params(plain) == pytest.approx(peers.n_params(model), rel=0.01)
        assert plain.config.d_hidden > model.config.d_hidden


def test_decoding_feeds_the_soft_inputs_and_leaves_the_cache_as_long_as_it_was():
    model = GPT(GPTConfig(block_size=8, n_layer=1, n_head=2, n_embd=16)).eval()
    idx = torch.randint(256, (1, 8))
    cache, h = model.prefill(idx[:, :5], "soft")
    timing.decode(model, "soft", cache, h, idx[:, 5:])
    assert cache.length == 5
    expected = naive_inputs(model, idx, 5, "soft")
    assert torch.allclose(cache.u[:, 5:8], expected[:, 5:8], atol=1e-5)


def test_peers_without_the_libraries(tiny_shape, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "bench.json"
    argv = ["--peers", "--rounds=1", "--compile=false", "--device=cpu", f"--json={file}"]
    assert bench.main(argv) == 0
    said = capsys.readouterr()
    for package in ("transformers", "x_transformers"):
        assert f"{package} is left out: not installed; pip install" in said.err
    (numbers,) = json.loads(file.read_text())["measured"].values()
    rows = [line for line in said.out.splitlines() if line.startswith("|")]
    headers = [cell.strip() for cell in rows[0].strip("|").split("|")]
    cells = [cell.strip() for cell in rows[2].strip("|").split("|")]
    assert len(rows) == 3 and len({row.count("|") for row in rows}) == 1
    assert cells[0] == "1 x 32, 16, 2"
    assert cells[2] == f"{numbers['plain_step_ms']:.1f}"
    assert cells[headers.index("ours, Soft")] == f"{numbers['soft_tokens']:.0f}"
    assert cells[1] == cells[3] == ""


def test_ratios_of_peers_by_hand(monkeypatch):
    took = {"plain": 2.0, "soft": 8.0, "compiled": 6.0, "hf": 4.0, "xt": 10.0}
    took |= {"standard": 0.5, "dynamic": 2.0, "static": 1.0, "loop": 4.0}
    took |= {"soft_compiled": 0.25}
    ways = {"standard": None, "soft": None, "soft_compiled": None}
    others = {"hf": {"dynamic": None, "static": None}, "xt": {"loop": None}}

    def fake_turns(things, rounds, device):
        return [{name: took[name] for name in things}]

    monkeypatch.setattr(peers, "turns", fake_turns)
    model = nn.Linear(3, 2)
    losses = {name: (model, None) for name in ("plain", "soft", "compiled", "hf", "xt")}
    found = peers.step_results(losses, 1, torch.device("cpu"))
    assert found["plain_step_over_hf"] == 0.5
    assert found["soft_step_over_xt"] == 0.8
    assert found["compiled_step_over_soft"] == 0.75
    assert found["compiled_step_over_xt"] == 0.6
    assert found["hf_step_ms"] == 4000 and found["hf_params"] == 8
    found = peers.decoding_results(ways, others, 16, 1, torch.device("cpu"))
    assert found["hf_tokens"] == found["static_tokens"] == 16  # its quickest way
    assert found["dynamic_tokens"] == 8 and found["soft_tokens"] == 2
    assert found["soft_tokens_over_hf"] == 1 / 8 and found["soft_tokens_over_xt"] == 0.5
    assert found["soft_compiled_tokens_over_hf"] == 4 and found["soft_compiled_tokens"] == 64
    assert found["soft_compiled_tokens_over_dynamic"] == 8
    assert found["soft_token_over_standard"] == 16


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_has_equal_parameters_and_does_its_work(name):
    peer = peers.PEERS[name]
    pytest.importorskip(peer.package)
    device = torch.device("cpu")
    target = peers.n_params(peers.our_models(TINY)[0])
    other = peer(TINY, target, device)
    n_unit = 3 * TINY.n_embd * peers.UNIT  # weights that one step of the width costs
    assert abs(peers.n_params(other.model) - target) <= n_unit
    idx = torch.randint(peers.VOCAB_SIZE, (2, TINY.block_size))
    loss = other.loss(idx, idx.roll(-1, dims=1))
    assert loss.shape == () and math.isfinite(loss.item())
    other.model.eval()
    read = []  # positions of each call of its first matrix: one per token
    matrix = next(m for m in other.model.modules() if isinstance(m, nn.Linear))
    ways = other.decoders(idx[:1, :8], idx[:1, 8:], compiling=False)
    matrix.register_forward_hook(lambda module, given, y: read.append(y[..., 0].numel()))
    for way in [way for way in ways if "generate" not in way]:
        for _ in range(2):  # the second time does the same
            read.clear()
            ways[way]()
            assert read == [1] * 8, way


def test_hugging_face_decodes_with_its_cache():
    """Without it each token would be read alone, which is as many positions and less work."""
    pytest.importorskip("transformers")
    other = peers.HuggingFace(TINY, 30_000, torch.device("cpu"))
    other.model.eval()
    idx = torch.randint(peers.VOCAB_SIZE, (1, TINY.block_size))
    ways = other.decoders(idx[:, :8], idx[:, 8:], compiling=False)
    with torch.no_grad():
        expected = other.model(input_ids=idx, use_cache=False).logits[:, 8:]
    seen = []
    other.model.lm_head.register_forward_hook(lambda module, given, logits: seen.append(logits))
    for name in ("hf_dynamic", "hf_static"):
        for _ in range(2):  # the second time does the same
            seen.clear()
            ways[name]()
            assert torch.allclose(torch.cat(seen, dim=1), expected, atol=1e-5), name


@pytest.mark.parametrize(
    "argv, told",
    [
        (["a", "b"], "one checkpoint"),
        (["out/demo", "--n_layer=2"], "its own shape"),
        (["--peers", "--n_layer=2"], "--peers has shapes of its own"),
        (["--peers", "out/demo"], "--peers has shapes of its own"),
        (["--rounds=0"], "--rounds=0"),
        (["--batch_size=0"], "--batch_size=0"),
        (["--threads=-1"], "--threads=-1"),
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


def test_it_runs_by_its_file_from_any_folder(tmp_path):
    script = Path(__file__).parents[1] / "experiments/bench.py"
    command = [sys.executable, str(script), "--rounds=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("bench.py: --rounds=0 must be at least")
