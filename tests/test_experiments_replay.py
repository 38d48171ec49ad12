"""experiments.kv_replay and experiments.likelihood in miniature, against a recurrence and passes without any cache."""

import json
import math

import numpy as np
import pytest
import torch

from harness.checkpoint import load_checkpoint, load_model, save_checkpoint
from harness.configurator import UserError, build
from experiments import kv_replay, likelihood
from model import GPT

PROMPT, NEW = 4, 13  # of block_size 16: the last token is sampled and never fed
PASSES = (1, 2, 3, 20)


@pytest.fixture(scope="module")
def other_run(make_run):
    return make_run(seed=2)


def prompts_of(run: str, corpus: str, n_windows: int) -> torch.Tensor:
    """The first tokens of evenly spaced windows of the validation split, read here from its file."""
    tokens = np.fromfile(f"{corpus}/tiny/val.bin", dtype=np.uint16).astype(np.int64)
    starts = np.linspace(0, len(tokens) - 17, n_windows).astype(int)
    return torch.stack([torch.from_numpy(tokens[start:start + PROMPT]) for start in starts])


@torch.no_grad()
def recurrence(model: GPT, prompt: torch.Tensor, choose, n_new: int = NEW, soft: bool = True):
    """Soft (or Standard) without a cache: the stack over all inputs at every step -> tokens, inputs, states, logits."""
    tokens, u, h = prompt, model.embedding(prompt), None
    for n in range(n_new):
        h = model.stack(u)
        token = choose(n, model.head(h[:, -1]))[:, None]
        tokens = torch.cat([tokens, token], dim=1)
        if n < n_new - 1:
            e = model.embedding(token)
            fed = model.fusion(h[:, -1:], model.input_norm(e)) if soft else e
            u = torch.cat([u, fed], dim=1)
    return tokens, u, h, model.head(h)


@torch.no_grad()
def jacobi(model: GPT, tokens: torch.Tensor, k: int):
    """The inputs and states of pass k, one position at a time; the prompt is plain."""
    e = model.embedding(tokens)
    u, h = e, model.stack(e)
    for _ in range(k - 1):
        u = torch.stack([e[:, t] if t < PROMPT else model.fusion(h[:, t - 1], model.input_norm(e[:, t]))
                         for t in range(tokens.size(1))], dim=1)
        h = model.stack(u)
    return u, h


@torch.no_grad()
def keys_and_values(model: GPT, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, B, T, H, D_h) of the inputs u, from the outputs of the projections; the rotation by complex numbers."""
    seen = {"k": [], "v": []}
    hooks = [getattr(block.attn, name).register_forward_hook(lambda _, __, y, name=name: seen[name].append(y))
             for block in model.blocks for name in ("k", "v")]
    model.stack(u)
    for hook in hooks:
        hook.remove()
    heads = {name: torch.stack(ys).unflatten(-1, (model.config.kv_heads, -1)) for name, ys in seen.items()}
    keys = torch.stack([block.attn.k_norm(k) for block, k in zip(model.blocks, heads["k"])])
    half = keys.size(-1) // 2
    angle = torch.arange(u.size(1))[:, None] * model.config.rope_base ** (-torch.arange(half) / half)
    turned = torch.complex(keys[..., :half], keys[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1), heads["v"]


def ratio(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative l2 error as a sum over numbers."""
    squares = [sum(x * x for x in part.flatten().tolist()) for part in (ours - exact, exact)]
    return math.sqrt(squares[0] / squares[1])


@pytest.fixture(scope="module")
def replayed(tiny_run, corpus, tmp_path_factory) -> dict:
    """The JSON of a kv_replay run over three greedy rollouts."""
    results = tmp_path_factory.mktemp("results")
    assert kv_replay.main([tiny_run, f"--data_dir={corpus}", f"--results_dir={results}", "--n_windows=3", "--repeats=1",
                           f"--n_prompt={PROMPT}", f"--passes={','.join(map(str, PASSES))}", "--device=cpu"]) == 0
    assert (results / "kv_replay.png").stat().st_size > 10_000
    return json.loads((results / "kv_replay.json").read_text())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_errors_of_k_passes_equal_a_naive_computation(replayed, tiny_run, corpus, k):
    model, _ = load_model(tiny_run)
    tokens, u, _, logits = recurrence(model, prompts_of(tiny_run, corpus, 3), lambda n, logits: logits.argmax(-1))
    ours_u, ours_h = jacobi(model, tokens[:, :-1], k)
    row = replayed["float32"]["passes"][str(k)]
    assert replayed["n_prompt"] == PROMPT and replayed["n_new"] == NEW and replayed["rollouts"] == 3
    assert tokens.size(1) == 17 and u.size(1) == 16
    for name, ours, exact in zip(("keys", "values"), keys_and_values(model, ours_u), keys_and_values(model, u)):
        response = ours[:, :, PROMPT:], exact[:, :, PROMPT:]
        assert row[name] == pytest.approx(ratio(*response), rel=1e-3) and row[name] > 0.01
        assert row[f"{name}_by_layer"] == pytest.approx([ratio(*pair) for pair in zip(*response)], rel=1e-3)
        by_position = [ratio(ours[:, :, t], exact[:, :, t]) for t in range(16)]
        assert row[f"{name}_by_position"] == pytest.approx(by_position, rel=1e-3, abs=1e-5)
        assert max(by_position[:PROMPT + k - 1]) < 1e-5 and by_position[PROMPT + k - 1] > 1e-3  # exact, then not
    log_p, log_q = (states.double().log_softmax(-1)[:, PROMPT:] for states in (logits, model.head(ours_h)))
    kl, same = [], []
    for p, q in zip(log_p.flatten(0, 1).tolist(), log_q.flatten(0, 1).tolist()):
        kl.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q)))
        same.append(p.index(max(p)) == q.index(max(q)))
    assert len(kl) == 3 * (NEW - 1)
    assert row["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3) and row["kl"] > 1e-5
    assert row["argmax"] == pytest.approx(sum(same) / len(same))


def test_as_many_passes_as_positions_and_the_control_are_exact_up_to_rounding(replayed):
    for row in (replayed["float32"]["passes"]["20"], replayed["float32"]["control"]):
        assert 0 < row["keys"] < 1e-5 and 0 < row["values"] < 1e-5 and row["argmax"] == 1 and abs(row["kl"]) < 1e-9
        assert len(row["keys_by_layer"]) == 2 and len(row["keys_by_position"]) == 16
    rounded = replayed["bfloat16"]
    for row in (rounded["passes"]["20"], rounded["control"]):  # now rounding is seen, in the recording as in the passes
        assert 1e-4 < row["keys"] < 0.05 and 1e-4 < row["values"] < 0.05
    assert rounded["passes"]["1"]["values"] == pytest.approx(replayed["float32"]["passes"]["1"]["values"], rel=0.2)


def test_the_control_fails_with_other_states(tiny_run, corpus):
    model, _ = load_model(tiny_run)
    tokens, exact = kv_replay.decode(model, prompts_of(tiny_run, corpus, 2), NEW, lambda n, h: model.head(h).argmax(-1))
    wrong = kv_replay.pass_from_states(model, tokens[:, :-1], PROMPT, exact[1].roll(1, dims=1))
    assert kv_replay.compare(model, wrong, exact, PROMPT)["keys"] > 0.01


def test_replay_is_the_recurrence(tiny_run, corpus):
    model, _ = load_model(tiny_run)
    drawn = torch.randint(model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(3))
    _, u, h, _ = recurrence(model, drawn[:, :PROMPT], lambda n, _: drawn[:, PROMPT + n])
    cache, states = kv_replay.replay(model, drawn, PROMPT)
    assert states.shape == (2, 16, 32) and cache.length == 16
    torch.testing.assert_close(states, h, rtol=0, atol=1e-5)
    torch.testing.assert_close(cache.u[:, :16], u, rtol=0, atol=1e-5)


def test_time_is_a_share_of_the_replay(tiny_run, corpus, monkeypatch):
    calls, stack = [0], GPT.stack

    def counted(self, *given):
        calls[0] += 1
        return stack(self, *given)

    monkeypatch.setattr(GPT, "stack", counted)
    monkeypatch.setattr(kv_replay.time, "perf_counter", lambda: calls[0])  # a clock that ticks with every stack
    model, _ = load_model(tiny_run)
    settings = build(kv_replay.Settings, {"passes": (1, 4), "repeats": 3})
    numbers = kv_replay.measure(model, prompts_of(tiny_run, corpus, 2), 8, settings)
    assert {k: row["time"] for k, row in numbers["passes"].items()} == {1: 1 / 8, 4: 4 / 8}  # prefill and seven steps


def test_temperature_draws_by_seed(tiny_run, corpus):
    model, _ = load_model(tiny_run)
    prompts = prompts_of(tiny_run, corpus, 2)

    def error(**settings):
        settings = build(kv_replay.Settings, {"passes": (1,), "repeats": 1} | settings)
        return kv_replay.measure(model, prompts, NEW, settings)["passes"][1]["keys"]

    greedy, hot = error(), error(temperature=1.0)
    assert error(seed=2) == greedy != hot == error(temperature=1.0) != error(temperature=1.0, seed=2)


@pytest.mark.parametrize("flags, message", [
    (["--n_prompt=16"], "block_size=16, as the cache must not slide; give at most --n_prompt=15"),
    (["--n_prompt=4", "--max_new_tokens=14"], "give at most --max_new_tokens=13"),
    (["--max_new_tokens=1"], "max_new_tokens=1 at least 2"),
    (["--passes=2,0"], r"passes=\[0, 2\] at least 1"),
    (["--temperature=-1"], "temperature=-1.0 must be"),
    (["--repeats=0"], "repeats=0 must be at least 1"),
])
def test_mistakes_end_in_one_line(tiny_run, corpus, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        kv_replay.main([tiny_run, f"--data_dir={corpus}", f"--results_dir={tmp_path}/results", *flags])
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("experiment", [kv_replay, likelihood])
def test_both_need_one_checkpoint_that_trained_feedback(experiment, tiny_run, plain_run, corpus, tmp_path):
    flags = [f"--data_dir={corpus}", f"--results_dir={tmp_path}"]
    with pytest.raises(UserError, match="never trained latent feedback"):
        experiment.main([plain_run, *flags])
    for words in ([], [tiny_run, plain_run]):
        with pytest.raises(UserError, match="name one checkpoint"):
            experiment.main([*words, *flags])


# Likelihood

def run_likelihood(run: str, corpus: str, tmp_path, *flags) -> dict:
    assert likelihood.main([run, f"--data_dir={corpus}", f"--results_dir={tmp_path}", "--n_windows=6", "--device=cpu",
                            f"--n_prompt={PROMPT}", f"--passes={','.join(map(str, PASSES))}", *flags]) == 0
    assert (tmp_path / "likelihood.png").stat().st_size > 10_000
    return json.loads((tmp_path / "likelihood.json").read_text())


def naive_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p of each token (B, N) under logits (B, N, V) by the definition, in float64."""
    logits = logits.detach().double()
    rows = [[logits[b, n, token] - logits[b, n].exp().sum().log() for n, token in enumerate(row)]
            for b, row in enumerate(tokens.tolist())]
    return torch.tensor(rows, dtype=torch.float64)


def test_exact_likelihood_is_the_recorded_one_and_a_naive_one(tiny_run, corpus):
    model, _ = load_model(tiny_run)
    prompts = prompts_of(tiny_run, corpus, 6)
    idx, recorded = likelihood.sample_rollouts(model, prompts, NEW, "soft", seed=1)
    assert idx.shape == (6, 17) and recorded.shape == (6, NEW) and torch.equal(idx[:, :PROMPT], prompts)
    _, _, _, logits = recurrence(model, prompts, lambda n, _: idx[:, PROMPT + n])
    naive = naive_log_probs(logits[:, PROMPT - 1:], idx[:, PROMPT:])
    torch.testing.assert_close(recorded, naive, rtol=0, atol=1e-5)
    exact, _ = likelihood.score(model, idx, PROMPT, build(likelihood.Settings, {"passes": (1,)}))
    torch.testing.assert_close(exact, naive, rtol=0, atol=1e-5)
    torch.testing.assert_close(exact.sum(1), recorded.sum(1), rtol=0, atol=1e-4)


def test_rollouts_are_drawn_at_temperature_1(tiny_run, corpus):
    model, _ = load_model(tiny_run)
    prompt = prompts_of(tiny_run, corpus, 1)
    idx, again, other = (likelihood.sample_rollouts(model, prompt.expand(20_000, -1), 1, "soft", seed)[0]
                         for seed in (1, 1, 2))
    assert torch.equal(idx, again) and not torch.equal(idx, other)
    share = torch.bincount(idx[:, PROMPT], minlength=model.config.vocab_size) / 20_000
    with torch.no_grad():
        expected = model.head(model.stack(model.embedding(prompt)))[0, -1].softmax(-1)
    torch.testing.assert_close(share, expected, rtol=0, atol=0.01)  # four standard deviations and more


def test_k_passes_equal_naive_passes_and_become_exact(tiny_run, corpus, tmp_path, capsys):
    result = run_likelihood(tiny_run, corpus, tmp_path, "--seed=5", "--tolerance=0.2")["results"]["its own"]
    model, _ = load_model(tiny_run)
    idx, recorded = likelihood.sample_rollouts(model, prompts_of(tiny_run, corpus, 6), NEW, "soft", seed=5)
    response = idx[:, PROMPT:]
    assert result["recorded"] == pytest.approx(recorded.mean().item(), abs=1e-6)
    assert result["exact"] == pytest.approx(recorded.mean().item(), abs=1e-5) and result["largest_difference"] < 1e-5
    for k in (1, 2, 3):
        _, h = jacobi(model, idx[:, :-1], k)
        error = (naive_log_probs(model.head(h[:, PROMPT - 1:]), response) - recorded).tolist()
        row = result["passes"][str(k)]
        sums = [sum(tokens) for tokens in error]
        token_error = sum(abs(x) for tokens in error for x in tokens) / (6 * NEW)
        assert row["token_error"] == pytest.approx(token_error, rel=1e-2)
        assert row["mean_error"] == pytest.approx(sum(sums) / 6, abs=1e-4)
        weights = [math.exp(x) for x in sums]
        assert row["ess"] == pytest.approx(sum(weights) ** 2 / (6 * sum(w * w for w in weights)), abs=1e-4)
        assert row["within"] == pytest.approx(sum(0.8 <= w <= 1.2 for w in weights) / 6)
        assert row["ratio_median"] == pytest.approx(math.exp((sorted(sums)[2] + sorted(sums)[3]) / 2), rel=1e-4)
        assert row["token_error"] > 1e-3
    assert any(0 < row["within"] < 1 for row in result["passes"].values())  # so that the tolerance matters
    exact = result["passes"]["20"]
    assert exact["token_error"] < 1e-5 and exact["within"] == 1 and exact["ess"] == pytest.approx(1, abs=1e-6)
    assert [exact[name] for name in ("ratio_5", "ratio_median", "ratio_95")] == pytest.approx([1, 1, 1], abs=1e-4)
    assert result["trustworthy"] == min(k for k in PASSES if result["passes"][str(k)]["within"] >= 0.95)
    assert f"k = {result['trustworthy']} is the smallest" in capsys.readouterr().out


def test_no_trustworthy_k_is_said_so(tiny_run, corpus, tmp_path, capsys):
    result = run_likelihood(tiny_run, corpus, tmp_path, "--passes=1,2", "--tolerance=1e-6", "--max_new_tokens=8")
    assert result["n_new"] == 8 and result["results"]["its own"]["trustworthy"] is None
    assert "none of k = 1, 2" in capsys.readouterr().out


def test_statistics_by_hand():
    ess = likelihood.effective_sample_size
    assert ess(torch.tensor([1.0, 1.0, 2.0]).double().log()) == pytest.approx(16 / (3 * 6))
    assert ess(torch.full((5,), 2000.0).double()) == pytest.approx(1)  # exp(2000) is no float
    assert ess(torch.tensor([900.0, 0.0, 0.0, -900.0]).double()) == pytest.approx(1 / 4)
    exact = torch.full((21, 2), -3.0).double()
    error = torch.arange(21).double()[:, None] / 10 - 1  # -1, -0.9, ..., 1 on the first token, all else is right
    numbers = likelihood.statistics(exact + torch.cat([error, torch.zeros(21, 1)], dim=1), exact, tolerance=0.103)
    assert numbers["token_error"] == pytest.approx(11 / 42)  # (0.1 + ... + 1) * 2 over 42 tokens
    assert numbers["mean_error"] == pytest.approx(0, abs=1e-12)
    assert numbers["error_std"] == pytest.approx(math.sqrt(7.7 / 21))  # 2 (0.01 + 0.04 + ... + 1) = 7.7
    assert [numbers[f"ratio_{part}"] for part in (5, "median", 95)] == pytest.approx([math.exp(-0.9), 1, math.exp(0.9)])
    assert numbers["within"] == pytest.approx(2 / 21)  # 1 and exp(-0.1) = 0.905, but not exp(0.1) = 1.105
    rows = {k: {"within": share} for k, share in {1: 0.2, 2: 0.95, 4: 0.9, 8: 1.0}.items()}
    assert [likelihood.trustworthy(rows, share) for share in (0.95, 0.96, 1.0)] == [2, 8, 8]
    assert likelihood.trustworthy({1: {"within": 0.9}}, 0.95) is None


def test_off_policy_rollouts_are_the_others_and_scored_under_this_model(tiny_run, other_run, corpus, tmp_path, capsys):
    results = run_likelihood(tiny_run, corpus, tmp_path, f"--sampler={other_run}")["results"]
    own, theirs = results.values()
    this, other = load_model(tiny_run)[0], load_model(other_run)[0]
    prompts = prompts_of(tiny_run, corpus, 6)
    idx, recorded = likelihood.sample_rollouts(other, prompts, NEW, "soft", seed=1)
    logits = [recurrence(model, prompts, lambda n, _: idx[:, PROMPT + n])[3] for model in (this, other)]
    naive = [naive_log_probs(part[:, PROMPT - 1:], idx[:, PROMPT:]) for part in logits]
    torch.testing.assert_close(recorded, naive[1], rtol=0, atol=1e-5)
    assert theirs["recorded"] == pytest.approx(naive[1].mean().item(), abs=1e-5)
    assert theirs["exact"] == pytest.approx(naive[0].mean().item(), abs=1e-5)
    assert abs(theirs["exact"] - theirs["recorded"]) > 1e-3 and theirs["largest_difference"] is None
    assert theirs["passes"]["20"]["token_error"] < 1e-5 < own["passes"]["1"]["token_error"]
    assert "by its sampler" in capsys.readouterr().out


def test_a_sampler_without_feedback_decodes_in_standard(tiny_run, plain_run, corpus, tmp_path):
    with pytest.raises(UserError, match="--sampler_mode=standard"):
        run_likelihood(tiny_run, corpus, tmp_path, f"--sampler={plain_run}")
    results = run_likelihood(tiny_run, corpus, tmp_path, f"--sampler={plain_run}", "--sampler_mode=standard")["results"]
    plain, _ = load_model(plain_run)
    prompts = prompts_of(tiny_run, corpus, 6)
    idx, _ = likelihood.sample_rollouts(plain, prompts, NEW, "standard", seed=1)
    logits = recurrence(plain, prompts, lambda n, _: idx[:, PROMPT + n], soft=False)[3]
    naive = naive_log_probs(logits[:, PROMPT - 1:], idx[:, PROMPT:])
    assert list(results.values())[1]["recorded"] == pytest.approx(naive.mean().item(), abs=1e-5)


def test_a_sampler_must_read_the_same_tokens(tiny_run, corpus, tmp_path):
    checkpoint = load_checkpoint(tiny_run)
    checkpoint["tokenizer"] = checkpoint["tokenizer"] | {"kind": "another"}
    save_checkpoint(tmp_path, checkpoint)
    with pytest.raises(UserError, match=f"--sampler={tmp_path}: its tokenizer is not that of {tiny_run}"):
        run_likelihood(tiny_run, corpus, tmp_path, f"--sampler={tmp_path}")


@pytest.mark.parametrize("flag", ["--tolerance=0", "--share=0", "--share=1.5", "--sampler_mode=fused"])
def test_settings_of_likelihood_are_checked(tiny_run, corpus, flag):
    with pytest.raises(UserError, match=flag.strip("-").split("=")[0]):
        likelihood.main([tiny_run, f"--data_dir={corpus}", flag])
