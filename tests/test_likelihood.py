"""likelihood in miniature, against a recurrence and passes without any cache."""

import contextlib
import io
import json
import math

import naive
import pytest
import torch
from by_hand import validation, window_rows

from experiments import likelihood
from harness.checkpoint import load_checkpoint, load_model, save_checkpoint
from harness.configurator import UserError, build
from model import GPT

PROMPT = 4
NEW = 13  # of block_size 16: the last token is sampled and never fed
PASSES = (1, 2, 3, 20)


@pytest.fixture(scope="module")
def model(tiny_run) -> GPT:
    return load_model(tiny_run)[0]


@pytest.fixture(scope="module")
def other_run(make_run) -> str:
    return make_run(seed=2)


@pytest.fixture(scope="module")
def prompts(corpus) -> torch.Tensor:
    return window_rows(validation(corpus), 6)[:, :PROMPT]


def run_likelihood(run: str, corpus: str, results, *flags) -> dict:
    words = [f"--data_dir={corpus}", f"--results_dir={results}", "--n_windows=6", "--device=cpu"]
    words += [f"--n_prompt={PROMPT}"]
    if not any(flag.startswith("--passes=") for flag in flags):
        words += [f"--passes={','.join(map(str, PASSES))}"]
    assert likelihood.main([run, *words, *flags]) == 0
    assert (results / "likelihood.png").stat().st_size > 10_000
    return json.loads((results / "likelihood.json").read_text())


def likelihood_by_hand(
    model: GPT, idx: torch.Tensor, n_new: int = NEW, soft: bool = True
) -> torch.Tensor:
    """Log-probabilities (B, n_new) of a response by the recurrence."""
    n_prompt = idx.size(1) - n_new
    prompt = idx[:, :n_prompt]
    found = naive.recurrence(model, prompt, lambda n, _: idx[:, n_prompt + n], n_new, soft)
    return naive.log_probs(found[3][:, n_prompt - 1 :], idx[:, n_prompt:])


def test_exact_likelihood_is_the_recorded_one_and_a_naive_one(model, prompts):
    idx, recorded = likelihood.sample_rollouts(model, prompts, NEW, "soft", seed=1)
    assert idx.shape == (6, 17) and recorded.shape == (6, NEW)
    assert torch.equal(idx[:, :PROMPT], prompts)
    expected = likelihood_by_hand(model, idx)
    torch.testing.assert_close(recorded, expected, rtol=0, atol=1e-5)
    settings = build(likelihood.Settings, {"passes": (1,)})
    exact, _ = likelihood.score(model, idx, PROMPT, settings)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(exact.sum(1), recorded.sum(1), rtol=0, atol=1e-4)


def test_rollouts_are_drawn_at_temperature_1(model, prompts):
    def drawn(n: int, seed: int) -> torch.Tensor:
        many = prompts[:1].expand(n, -1)
        return likelihood.sample_rollouts(model, many, 1, "soft", seed)[0][:, PROMPT]

    assert torch.equal(drawn(50, seed=1), drawn(50, seed=1))
    assert not torch.equal(drawn(50, seed=1), drawn(50, seed=2))
    counts = torch.bincount(drawn(6000, seed=1), minlength=model.config.vocab_size)
    with torch.no_grad():
        logits = model.head(model.stack(model.embedding(prompts[:1])))
    expected = logits[0, -1].softmax(-1)
    # Four standard deviations of a share of one in ten, and more for rarer ones.
    torch.testing.assert_close(counts / 6000, expected, rtol=0, atol=0.016)


@pytest.fixture(scope="module")
def scored(tiny_run, other_run, corpus, tmp_path_factory) -> tuple[dict, str]:
    """The JSON's results and what was printed, of this model's rollouts and another's."""
    results = tmp_path_factory.mktemp("results")
    flags = ["--seed=5", "--tolerance=0.2", "--clip=0.05", f"--sampler={other_run}"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = run_likelihood(tiny_run, corpus, results, *flags)
    return found["results"], printed.getvalue()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_passes_equal_naive_passes(k, scored, model, prompts):
    row = scored[0]["its own"]["passes"][str(k)]
    idx, recorded = likelihood.sample_rollouts(model, prompts, NEW, "soft", seed=5)
    _, h = naive.jacobi(model, idx[:, :-1], k, PROMPT)
    ours = naive.log_probs(model.head(h[:, PROMPT - 1 :]), idx[:, PROMPT:])
    errors = (ours - recorded).tolist()
    each = [error for errors_of_row in errors for error in errors_of_row]
    sums = [sum(errors_of_row) for errors_of_row in errors]
    assert row["token_error"] == pytest.approx(sum(map(abs, each)) / (6 * NEW), rel=1e-2)
    assert row["token_error"] > 1e-3
    outside = sum(not 0.95 <= math.exp(error) <= 1.05 for error in each)
    assert row["tokens_outside"] == pytest.approx(outside / (6 * NEW))
    assert row["mean_error"] == pytest.approx(sum(sums) / 6, abs=1e-4)
    weights = [math.exp(x) for x in sums]
    squares = sum(w * w for w in weights)
    assert row["ess"] == pytest.approx(sum(weights) ** 2 / (6 * squares), abs=1e-4)
    assert row["within"] == pytest.approx(sum(0.8 <= w <= 1.2 for w in weights) / 6)
    median = (sorted(sums)[2] + sorted(sums)[3]) / 2
    assert row["ratio_median"] == pytest.approx(math.exp(median), rel=1e-4)


def test_passes_become_exact_and_the_smallest_k_is_named(scored, model, prompts):
    result = scored[0]["its own"]
    _, recorded = likelihood.sample_rollouts(model, prompts, NEW, "soft", seed=5)
    assert result["recorded"] == pytest.approx(recorded.mean().item(), abs=1e-6)
    assert result["exact"] == pytest.approx(recorded.mean().item(), abs=1e-5)
    assert result["largest_difference"] < 1e-5
    rows = {k: result["passes"][str(k)] for k in PASSES}
    # So that the tolerance and the clip range matter:
    assert any(0 < row["within"] < 1 for row in rows.values())
    assert any(0 < row["tokens_outside"] < 1 for row in rows.values())
    exact = rows[20]
    assert exact["token_error"] < 1e-5 and exact["within"] == 1 and exact["tokens_outside"] == 0
    assert exact["ess"] == pytest.approx(1, abs=1e-6)
    quantiles = [exact[name] for name in ("ratio_5", "ratio_median", "ratio_95")]
    assert quantiles == pytest.approx([1, 1, 1], abs=1e-4)
    trusted = min(k for k in PASSES if rows[k]["within"] >= 0.95)
    kept = min(k for k in PASSES if rows[k]["tokens_outside"] == 0)
    assert result["trustworthy"] == trusted and result["unclipped"] == kept
    assert f"outside 0.95 to 1.05: k = {kept} is the smallest" in scored[1]
    assert f"for 95% of the rollouts: k = {trusted} is the smallest" in scored[1]


def test_off_policy_rollouts_are_the_others_and_scored_under_this_model(
    scored, model, other_run, prompts
):
    own, theirs = scored[0].values()
    other, _ = load_model(other_run)
    idx, recorded = likelihood.sample_rollouts(other, prompts, NEW, "soft", seed=5)
    under_this = likelihood_by_hand(model, idx)
    under_other = likelihood_by_hand(other, idx)
    torch.testing.assert_close(recorded, under_other, rtol=0, atol=1e-5)
    assert theirs["recorded"] == pytest.approx(under_other.mean().item(), abs=1e-5)
    assert theirs["exact"] == pytest.approx(under_this.mean().item(), abs=1e-5)
    assert (under_this - under_other).abs().mean() > 1e-3
    assert abs(theirs["exact"] - theirs["recorded"]) > 1e-4  # ten times the tolerance above
    assert theirs["largest_difference"] is None
    assert theirs["passes"]["20"]["token_error"] < 1e-5 < own["passes"]["1"]["token_error"]
    assert "by its sampler" in scored[1]


def test_a_sampler_without_feedback_decodes_in_standard(
    tiny_run, plain_run, prompts, corpus, tmp_path, capsys
):
    with pytest.raises(UserError, match="--sampler_mode=standard"):
        run_likelihood(tiny_run, corpus, tmp_path, f"--sampler={plain_run}")
    flags = [f"--sampler={plain_run}", "--sampler_mode=standard", "--passes=1,2"]
    flags += ["--max_new_tokens=8", "--tolerance=1e-6", "--clip=1e-6"]
    found = run_likelihood(tiny_run, corpus, tmp_path, *flags)
    assert found["n_new"] == 8
    own, theirs = found["results"].values()
    plain, _ = load_model(plain_run)
    idx, _ = likelihood.sample_rollouts(plain, prompts, 8, "standard", seed=1)
    expected = likelihood_by_hand(plain, idx, 8, soft=False)
    assert theirs["recorded"] == pytest.approx(expected.mean().item(), abs=1e-5)
    # No k is enough for such a tolerance, and that is said.
    assert own["trustworthy"] is None and own["unclipped"] is None
    assert capsys.readouterr().out.count("none of k = 1, 2 is enough") == 4


def test_ratio_statistics_by_hand():
    exact = torch.full((21, 2), -3.0).double()
    # -1, -0.9, ..., 1 on the first token; the second one is right.
    error = torch.arange(21).double()[:, None] / 10 - 1
    approximate = exact + torch.cat([error, torch.zeros(21, 1)], dim=1)
    numbers = likelihood.ratio_statistics(approximate, exact, tolerance=0.103, clip=0.2)
    assert numbers["token_error"] == pytest.approx(11 / 42)  # 2 (0.1 + ... + 1) over 42 tokens
    # exp(0.1), exp(-0.1), exp(-0.2) = 0.819 and the 22 ones are inside; exp(0.2) = 1.221 is not.
    assert numbers["tokens_outside"] == pytest.approx(17 / 42)
    assert numbers["mean_error"] == pytest.approx(0, abs=1e-12)
    assert numbers["error_std"] == pytest.approx(math.sqrt(7.7 / 21))  # 2 (0.01 + ... + 1) = 7.7
    found = [numbers[f"ratio_{part}"] for part in (5, "median", 95)]
    assert found == pytest.approx([math.exp(-0.9), 1, math.exp(0.9)])
    assert numbers["within"] == pytest.approx(2 / 21)  # 1 and exp(-0.1) = 0.905, not exp(0.1)


def test_effective_sample_size_by_hand():
    ess = likelihood.effective_sample_size
    assert ess(torch.tensor([1.0, 1.0, 2.0]).double().log()) == pytest.approx(16 / (3 * 6))
    assert ess(torch.full((5,), 2000.0).double()) == pytest.approx(1)  # exp(2000) overflows
    assert ess(torch.tensor([900.0, 0.0, 0.0, -900.0]).double()) == pytest.approx(1 / 4)


def test_the_smallest_k_by_hand():
    shares = {1: 0.2, 2: 0.95, 4: 0.9, 8: 1.0}
    rows = {k: {"within": share, "tokens_outside": 1 - share} for k, share in shares.items()}
    found = [likelihood.trustworthy(rows, share) for share in (0.95, 0.96, 1.0)]
    assert found == [8, 8, 8] and likelihood.unclipped(rows) == 8  # k = 2 is, and k = 4 is not
    assert likelihood.trustworthy(rows, 0.9) == 2
    assert likelihood.trustworthy({1: {"within": 0.9}}, 0.95) is None
    assert likelihood.unclipped({1: {"tokens_outside": 0.1}}) is None


def test_a_sampler_must_read_the_same_tokens(tiny_run, corpus, tmp_path):
    checkpoint = load_checkpoint(tiny_run)
    checkpoint["tokenizer"] = checkpoint["tokenizer"] | {"kind": "another"}
    save_checkpoint(tmp_path, checkpoint)
    with pytest.raises(UserError, match=f"--sampler={tmp_path}: its tokenizer is not that of"):
        run_likelihood(tiny_run, corpus, tmp_path, f"--sampler={tmp_path}")


@pytest.mark.parametrize(
    "flag",
    [
        "--tolerance=0",
        "--clip=0",
        "--share=0",
        "--share=1.5",
        "--sampler_mode=fused",
        "--sampler_mode=standard",  # of no sampler
    ],
)
def test_settings_of_likelihood_are_checked(tiny_run, corpus, flag):
    with pytest.raises(UserError, match=flag.split("=")[0]):
        likelihood.main([tiny_run, f"--data_dir={corpus}", flag])
