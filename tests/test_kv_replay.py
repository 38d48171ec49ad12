"""kv_replay in miniature, against a recurrence and passes without any cache."""

import json
import math

import naive
import pytest
import torch
from by_hand import validation, window_rows

from experiments import kv_replay, likelihood, timing
from harness.checkpoint import load_model
from harness.configurator import UserError, build
from model import GPT

PROMPT = 4
NEW = 13  # of block_size 16: the last token is sampled and never fed
PASSES = (1, 2, 3, 20)


@pytest.fixture(scope="module")
def model(tiny_run) -> GPT:
    return load_model(tiny_run)[0]


@pytest.fixture(scope="module")
def prompts(corpus) -> torch.Tensor:
    return window_rows(validation(corpus), 3)[:, :PROMPT]


@pytest.fixture(scope="module")
def rollouts(model, prompts):
    """Greedy ones: tokens, inputs, states, logits."""
    return naive.recurrence(model, prompts, lambda n, logits: logits.argmax(-1), NEW)


@torch.no_grad()
def keys_and_values(model: GPT, u: torch.Tensor) -> dict[str, torch.Tensor]:
    """(L, B, T, H, D_h) of inputs u, from what the projections put out; rotated as complex."""
    seen = {"k": [], "v": []}
    hooks = []
    for block in model.blocks:
        for name in ("k", "v"):

            def keep(module, inputs, output, name=name):
                seen[name].append(output)

            hooks.append(getattr(block.attn, name).register_forward_hook(keep))
    model.stack(u)
    for hook in hooks:
        hook.remove()
    heads = (model.config.kv_heads, -1)
    keys = torch.stack(seen["k"]).unflatten(-1, heads)
    keys = torch.stack([block.attn.k_norm(k) for block, k in zip(model.blocks, keys, strict=True)])
    half = keys.size(-1) // 2
    frequency = model.config.rope_base ** (-torch.arange(half) / half)
    angle = torch.arange(u.size(1))[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = torch.complex(keys[..., :half], keys[..., half:]) * turn
    values = torch.stack(seen["v"]).unflatten(-1, heads)
    return {"keys": torch.cat([turned.real, turned.imag], dim=-1), "values": values}


def ratio(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative l2 error as a sum over numbers."""
    error = sum(x * x for x in (ours - exact).flatten().tolist())
    return math.sqrt(error / sum(x * x for x in exact.flatten().tolist()))


@pytest.fixture(scope="module")
def replayed(tiny_run, corpus, tmp_path_factory) -> dict:
    """The JSON of a run over three greedy rollouts."""
    results = tmp_path_factory.mktemp("results")
    flags = [f"--data_dir={corpus}", f"--results_dir={results}", "--device=cpu", "--repeats=1"]
    flags += ["--n_windows=3", f"--n_prompt={PROMPT}", f"--passes={','.join(map(str, PASSES))}"]
    assert kv_replay.main([tiny_run, *flags]) == 0
    assert (results / "kv_replay.png").stat().st_size > 10_000
    return json.loads((results / "kv_replay.json").read_text())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_errors_of_k_passes_equal_a_naive_computation(replayed, model, rollouts, k):
    tokens, u, _, logits = rollouts
    our_u, our_h = naive.jacobi(model, tokens[:, :-1], k, PROMPT)
    row = replayed["float32"]["passes"][str(k)]
    assert (replayed["n_prompt"], replayed["n_new"], replayed["rollouts"]) == (PROMPT, NEW, 3)
    assert tokens.size(1) == 17 and u.size(1) == 16
    theirs = keys_and_values(model, u)
    for name, ours in keys_and_values(model, our_u).items():
        exact = theirs[name]
        our_response = ours[:, :, PROMPT:]
        response = exact[:, :, PROMPT:]
        assert row[name] == pytest.approx(ratio(our_response, response), rel=1e-3)
        assert row[name] > 0.01
        by_layer = [ratio(our_response[layer], response[layer]) for layer in range(2)]
        assert row[f"{name}_by_layer"] == pytest.approx(by_layer, rel=1e-3)
        by_position = [ratio(ours[:, :, t], exact[:, :, t]) for t in range(16)]
        assert row[f"{name}_by_position"] == pytest.approx(by_position, rel=1e-3, abs=1e-5)
        assert max(by_position[: PROMPT + k - 1]) < 1e-5  # exact up to here, and not after
        assert by_position[PROMPT + k - 1] > 1e-3
    log_p = logits.double().log_softmax(-1)[:, PROMPT:].flatten(0, 1)
    log_q = model.head(our_h).double().log_softmax(-1)[:, PROMPT:].flatten(0, 1)
    kl = []
    same = []
    for p, q in zip(log_p.tolist(), log_q.tolist(), strict=True):
        kl.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
        same.append(p.index(max(p)) == q.index(max(q)))
    assert len(kl) == 3 * (NEW - 1)
    assert row["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3) and row["kl"] > 1e-5
    assert row["argmax"] == pytest.approx(sum(same) / len(same))


def test_as_many_passes_as_positions_and_the_control_are_exact_up_to_rounding(replayed):
    for row in (replayed["float32"]["passes"]["20"], replayed["float32"]["control"]):
        assert 0 < row["keys"] < 1e-5 and 0 < row["values"] < 1e-5
        assert row["argmax"] == 1 and abs(row["kl"]) < 1e-9
        assert len(row["keys_by_layer"]) == 2 and len(row["keys_by_position"]) == 16
    rounded = replayed["bfloat16"]
    for row in (rounded["passes"]["20"], rounded["control"]):  # now rounding shows
        assert 1e-4 < row["keys"] < 0.05 and 1e-4 < row["values"] < 0.05
    exact = replayed["float32"]["passes"]["1"]["values"]
    assert rounded["passes"]["1"]["values"] == pytest.approx(exact, rel=0.2)


def test_the_control_fails_with_other_states(model, prompts):
    tokens, exact = kv_replay.decode(model, prompts, NEW, lambda n, h: model.head(h).argmax(-1))
    shifted = exact[1].roll(1, dims=1)
    wrong = kv_replay.pass_from_states(model, tokens[:, :-1], PROMPT, shifted)
    assert kv_replay.compare(model, wrong, exact, PROMPT)["keys"] > 0.01


def test_replay_is_the_recurrence(model):
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(model.config.vocab_size, (2, 17), generator=generator)
    _, u, h, _ = naive.recurrence(model, drawn[:, :PROMPT], lambda n, _: drawn[:, PROMPT + n], NEW)
    cache, states = kv_replay.replay(model, drawn, PROMPT)
    assert states.shape == (2, 16, 32) and cache.length == 16
    torch.testing.assert_close(states, h, rtol=0, atol=1e-5)
    torch.testing.assert_close(cache.u[:, :16], u, rtol=0, atol=1e-5)


def test_time_is_a_share_of_the_replay(model, prompts, monkeypatch):
    calls = [0]
    stack = GPT.stack

    def counted(self, *given):
        calls[0] += 1
        return stack(self, *given)

    monkeypatch.setattr(GPT, "stack", counted)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: calls[0])  # ticks with every stack
    settings = build(kv_replay.Settings, {"passes": (1, 4), "repeats": 3})
    by_passes = kv_replay.rollout_errors(model, prompts, 8, settings)["passes"]
    # A replay is a prefill and seven steps.
    assert {k: row["time"] for k, row in by_passes.items()} == {1: 1 / 8, 4: 4 / 8}


def test_temperature_draws_by_seed(model, prompts):
    def error(**settings):
        settings = build(kv_replay.Settings, {"passes": (1,), "repeats": 1} | settings)
        return kv_replay.rollout_errors(model, prompts, NEW, settings)["passes"][1]["keys"]

    greedy = error()
    hot = error(temperature=1.0)
    assert error(seed=2) == greedy != hot
    assert error(temperature=1.0) == hot != error(temperature=1.0, seed=2)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--n_prompt=16"], "because the cache must not slide; give at most --n_prompt=15"),
        (["--n_prompt=4", "--max_new_tokens=14"], "give at most --max_new_tokens=13"),
        (["--n_prompt=-1"], "--n_prompt=-1 must be"),
        (["--max_new_tokens=1"], "--max_new_tokens=1 must be at least 2"),
        (["--passes=2,0"], r"--passes=\(0, 2\) must be at least 1"),
        (["--temperature=-1"], "temperature=-1.0 must be"),
        (["--repeats=0"], "--repeats=0 must be at least 1"),
    ],
)
def test_mistakes_end_in_one_line(tiny_run, corpus, tmp_path, flags, message):
    place = [f"--data_dir={corpus}", f"--results_dir={tmp_path}/results"]
    with pytest.raises(UserError, match=message):
        kv_replay.main([tiny_run, *place, *flags])
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("experiment", [kv_replay, likelihood])
def test_both_need_one_checkpoint_that_trained_feedback(
    experiment, tiny_run, plain_run, corpus, tmp_path
):
    flags = [f"--data_dir={corpus}", f"--results_dir={tmp_path}"]
    with pytest.raises(UserError, match="never trained latent feedback"):
        experiment.main([plain_run, *flags])
    for words in ([], [tiny_run, plain_run]):
        with pytest.raises(UserError, match="name one checkpoint"):
            experiment.main([*words, *flags])
