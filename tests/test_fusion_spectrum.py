"""fusion_spectrum in miniature, for every kind of fusion, against computations written here."""

import json
import math
from typing import get_args

import naive
import numpy as np
import pytest
import torch
from by_hand import validation, window_rows
from torch import nn

from experiments import fusion_spectrum
from harness.checkpoint import load_checkpoint, load_model
from harness.configurator import UserError
from model import GPT, FusionKind, GPTConfig

T = 16  # block_size of the fixtures' runs
KINDS = [kind for kind in get_args(FusionKind) if kind != "none"]


def run_spectrum(results, *argv: str) -> dict:
    """What it wrote about each checkpoint."""
    assert fusion_spectrum.main([*argv, f"--results_dir={results}", "--device=cpu"]) == 0
    assert (results / "fusion_spectrum.png").stat().st_size > 10_000
    return json.loads((results / "fusion_spectrum.json").read_text())["checkpoints"]


def entropy_rank(values) -> float:
    shares = [float(value) / float(sum(values)) for value in values]
    return math.exp(-sum(share * math.log(share) for share in shares if share > 0))


def states_fed_back(model: GPT, idx: torch.Tensor, k: int) -> torch.Tensor:
    """The states of pass k that a next pass would read, (N (T-1), D)."""
    return naive.jacobi(model, idx, k, n_plain=0)[1][:, :-1].flatten(0, 1)


@pytest.fixture(scope="module")
def gated(tiny_run, corpus, tmp_path_factory) -> dict:
    results = tmp_path_factory.mktemp("results")
    flags = [f"--data_dir={corpus}", "--passes=3", "--n_windows=7"]
    return run_spectrum(results, tiny_run, *flags)["run"]


def test_matrices_and_states_of_a_gated_fusion(gated, tiny_run, corpus):
    found = gated["trained"]
    model, checkpoint = load_model(tiny_run)
    assert list(found["matrices"]) == ["W_H", "W_G"]
    for name, of in found["matrices"].items():
        weight = checkpoint["model"][f"fusion.{name}.weight"].numpy().astype(np.float64)
        values = np.linalg.svd(weight)[1]
        np.testing.assert_allclose(of["values"], values, rtol=1e-9)
        assert of["rank"] == sum(values > 32 * 2.0**-23 * values[0])
        assert of["effective_rank"] == pytest.approx(entropy_rank(values), rel=1e-9)
    idx = window_rows(validation(corpus), 7)[:, :-1]
    h = states_fed_back(model, idx, 3)
    images = {"h": h, "W_H h": h @ model.fusion.W_H.weight.detach().T}
    assert list(found["states"]) == list(images)
    for name, x in images.items():
        x = x.double().numpy()
        eigenvalues = np.linalg.svd(x - sum(x) / len(x))[1] ** 2
        shares = eigenvalues / eigenvalues.sum()
        of = found["states"][name]
        np.testing.assert_allclose(of["shares"], shares, atol=1e-6)
        assert of["effective_rank"] == pytest.approx(entropy_rank(shares), rel=1e-4)
    centred = (h - h.mean(0)).double().numpy()
    directions = np.linalg.svd(centred)[2]  # (D, D), the strongest first
    weak = centred @ directions[16:].T @ directions[16:]  # what h has in its weaker half
    for name, weight in (("h", np.eye(32)), ("W_H h", model.fusion.W_H.weight.detach().numpy())):
        share = np.square(weak @ weight.T).sum() / np.square(centred @ weight.T).sum()
        assert found["states"][name]["weaker_half"] == pytest.approx(share, abs=1e-6)
    assert found["terms"]["share_h"] == 1 and found["terms"]["norm_e"] == 0


def test_the_gate_over_held_out_tokens(gated, tiny_run, corpus):
    gate = gated["trained"]["gate"]  # of each symbol with its frequency; here of each occurrence
    model, _ = load_model(tiny_run)
    idx = window_rows(validation(corpus), 7)[:, :-1]
    norm_e = model.input_norm(model.embed(idx[:, 1:].flatten())).detach()
    gates = torch.sigmoid(norm_e @ model.fusion.W_G.weight.detach().T).double().numpy()
    counts = np.histogram(gates, 40, (0, 1))[0]
    np.testing.assert_allclose(gate["histogram"], counts / gates.size, atol=1e-9)
    assert gate["mean"] == pytest.approx(gates.mean(), rel=1e-6)
    assert gate["std"] == pytest.approx(gates.std(), rel=1e-6)
    assert gate["below_0.1"] == pytest.approx((gates < 0.1).mean())
    assert gate["above_0.9"] == pytest.approx((gates > 0.9).mean())
    of_dimension = gates.mean(0, keepdims=True)
    of_token = gates.mean(1, keepdims=True)
    rest = gates - of_dimension - of_token + gates.mean()
    variance = gates.var()
    assert gate["share_dimensions"] == pytest.approx(of_dimension.var() / variance, rel=1e-6)
    assert gate["share_tokens"] == pytest.approx(of_token.var() / variance, rel=1e-6)
    assert gate["share_tokens_by_dimension"] == pytest.approx((rest**2).mean() / variance, rel=1e-6)


def test_the_untrained_twin_is_where_the_run_began(gated, make_run):
    began = load_checkpoint(make_run(max_iters=0))["model"]
    values = np.linalg.svd(began["fusion.W_H.weight"].numpy().astype(np.float64))[1]
    twin = gated["untrained"]["matrices"]
    np.testing.assert_allclose(twin["W_H"]["values"], values, rtol=1e-9)
    assert twin != gated["trained"]["matrices"]


def small_model(kind: str) -> GPT:
    """A random one whose matrices are all different from zero."""
    torch.manual_seed(5)
    config = GPTConfig(vocab_size=9, block_size=T, n_layer=1, n_head=2, n_embd=8, fusion=kind)
    model = GPT(config).eval()
    nn.init.normal_(model.embedding.weight)
    nn.init.uniform_(model.input_norm.weight, 0.5, 1.5)
    for weight in model.fusion.parameters():
        nn.init.normal_(weight)
    return model.requires_grad_(False)


def terms_by_hand(kind: str, weights: dict, h: np.ndarray, e: np.ndarray, norm_e: np.ndarray):
    """The state's and the token's part of u at one position, (D,) each."""
    rms_e = math.sqrt((e**2).mean())
    if kind == "concat":
        return weights["W_R"][:, :8] @ h, weights["W_R"][:, 8:] @ norm_e
    of_h = weights["W_H"] @ h
    if kind == "add":
        return of_h, weights["W_G"] @ norm_e
    if kind == "residual":
        return rms_e * of_h, e
    gate = 1 / (1 + np.exp(-(weights["W_G"] @ norm_e)))
    if kind == "gated":
        return of_h * gate, 0 * e
    assert kind == "gated_residual"
    return rms_e * of_h * gate, e


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fusion(kind):
    model = small_model(kind)
    idx = torch.randint(9, (3, T), generator=torch.Generator().manual_seed(2))
    found = fusion_spectrum.fusion_numbers(model, idx, 2)
    weights = {}
    for name, weight in model.fusion.named_parameters():
        weights[name.removesuffix(".weight")] = weight.double().numpy()
    square = dict(weights)
    if kind == "concat":
        square = {"W_R[h]": weights["W_R"][:, :8], "W_R[e]": weights["W_R"][:, 8:]}
    assert list(found["matrices"]) == list(square)
    for name, weight in square.items():
        values = np.linalg.svd(weight)[1]
        np.testing.assert_allclose(found["matrices"][name]["values"], values, rtol=1e-9)
    reads_h = next(iter(square))
    h = states_fed_back(model, idx, 2).double().numpy()
    shares = np.linalg.svd((h - h.mean(0)) @ square[reads_h].T)[1] ** 2
    assert list(found["states"]) == ["h", f"{reads_h} h"]
    wanted = shares / shares.sum()
    np.testing.assert_allclose(found["states"][f"{reads_h} h"]["shares"], wanted, atol=1e-6)
    assert ("gate" in found) == (kind in ("gated", "gated_residual"))

    sizes = []
    for state, token in zip(h, idx[:, 1:].flatten(), strict=True):
        e = model.embedding.weight[token].double().numpy()
        norm_e = e / math.sqrt((e**2).mean() + 1e-6) * model.input_norm.weight.double().numpy()
        of_h, of_e = terms_by_hand(kind, weights, state, e, norm_e)
        sizes.append([np.linalg.norm(of_h), np.linalg.norm(of_e)])
    size_h, size_e = np.array(sizes).T
    terms = found["terms"]
    assert terms["norm_h"] == pytest.approx(size_h.mean(), rel=1e-4)
    assert terms["norm_e"] == pytest.approx(size_e.mean(), rel=1e-4)
    assert terms["share_h"] == pytest.approx((size_h / (size_h + size_e)).mean(), rel=1e-4)
    assert sum(terms["histogram"]) == pytest.approx(1)


class Mixed(nn.Module):
    """A kind that somebody adds: other names, a matrix of another shape, and a gain."""

    kind = "mixed"

    def __init__(self, n_embd: int):
        super().__init__()
        self.A = nn.Parameter(torch.randn(n_embd, n_embd))
        self.W_H = nn.Linear(n_embd, n_embd, bias=False)
        self.low = nn.Linear(n_embd, 2, bias=False)
        self.gain = nn.Parameter(torch.ones(n_embd))

    def forward(self, h_prev, e, norm_e):
        return self.W_H(h_prev) * self.gain + norm_e @ self.A


def test_a_kind_that_somebody_adds():
    model = small_model("gated")
    torch.manual_seed(1)
    model.fusion = Mixed(8)
    idx = torch.randint(9, (3, T), generator=torch.Generator().manual_seed(2))
    found = fusion_spectrum.fusion_numbers(model, idx, 2)
    assert sorted(found["matrices"]) == ["A", "W_H"]
    values = np.linalg.svd(model.fusion.A.detach().double().numpy())[1]
    np.testing.assert_allclose(found["matrices"]["A"]["values"], values, rtol=1e-9)
    assert list(found["states"]) == ["h", "W_H h"] and "gate" not in found
    assert 0 < found["terms"]["share_h"] < 1
    assert fusion_spectrum.table_column(found)["A: rank"] == "8 of 8"


def test_a_matrix_that_starts_at_zero(make_run, corpus, tmp_path, capsys):
    path = make_run(max_iters=2, fusion="residual")
    flags = [f"--data_dir={corpus}", "--n_windows=2"]
    found = run_spectrum(tmp_path, path, *flags)["run"]
    before = found["untrained"]
    assert before["matrices"]["W_H"] == {"values": [0.0] * 32, "rank": 0, "effective_rank": 0.0}
    assert before["states"]["W_H h"] == {
        "shares": [0.0] * 32,
        "effective_rank": 0.0,
        "weaker_half": 0.0,
    }
    assert before["terms"]["share_h"] == 0 < found["trained"]["terms"]["share_h"] < 1
    assert found["trained"]["matrices"]["W_H"]["rank"] > 0
    out = capsys.readouterr().out
    assert "fusion=residual: its gate, if any, is not known here" in out and "| W_H: rank " in out
    assert "nan" not in out.lower() and "NaN" not in (tmp_path / "fusion_spectrum.json").read_text()


def test_gates_of_tiny_weights_by_hand():
    model = GPT(GPTConfig(vocab_size=3, block_size=4, n_layer=1, n_head=1, n_embd=2)).eval()
    embeddings = torch.tensor([[3.0, 4.0], [1.0, -1.0], [9.0, 9.0]])  # RMS sqrt(12.5), 1, 9
    with torch.no_grad():
        model.embedding.weight.copy_(embeddings)
        model.fusion.W_G.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    # The first token of a row is plain, so that symbol 0 counts three times, 1 once, and 2 never.
    idx = torch.tensor([[2, 0, 1], [2, 0, 0]])
    gate = fusion_spectrum.fusion_numbers(model, idx, 1)["gate"]
    a = 3 / math.sqrt(12.5)
    b = 2 * 4 / math.sqrt(12.5)
    of_0 = [1 / (1 + math.exp(-a)), 1 / (1 + math.exp(-b))]  # 0.7003, 0.9057
    of_1 = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))]  # 0.7311, 0.1192
    mean = (3 * sum(of_0) + sum(of_1)) / 8
    assert mean == pytest.approx(0.70856, abs=1e-4)
    assert gate["mean"] == pytest.approx(mean, abs=1e-5)
    variance = (3 * sum((g - mean) ** 2 for g in of_0) + sum((g - mean) ** 2 for g in of_1)) / 8
    assert gate["std"] == pytest.approx(math.sqrt(variance), abs=1e-5)
    assert gate["above_0.9"] == pytest.approx(3 / 8) and gate["below_0.1"] == 0
    counts = {28: 3 / 8, 36: 3 / 8, 29: 1 / 8, 4: 1 / 8}
    for place, count in counts.items():
        assert gate["histogram"][place] == pytest.approx(count)


@pytest.mark.parametrize(
    "gates, expected",
    [
        ([[0.2, 0.8], [0.2, 0.8]], (1, 0, 0)),
        ([[0.2, 0.2], [0.8, 0.8]], (0, 1, 0)),
        ([[0.2, 0.8], [0.8, 0.2]], (0, 0, 1)),
    ],
)
def test_shares_of_the_gate_variance_by_hand(gates, expected):
    equal = torch.tensor([0.5, 0.5], dtype=torch.double)
    found = fusion_spectrum.gate_numbers(torch.tensor(gates, dtype=torch.double), equal)
    names = ("share_dimensions", "share_tokens", "share_tokens_by_dimension")
    assert [found[name] for name in names] == pytest.approx(expected)
    assert found["std"] == pytest.approx(0.3)


def test_ranks_by_hand():
    rank = fusion_spectrum.effective_rank
    assert rank(torch.full((5,), 0.3)) == pytest.approx(5)
    assert rank(torch.tensor([4.0, 0.0, 0.0])) == pytest.approx(1)
    assert rank(torch.tensor([3.0, 1.0])) == pytest.approx(math.exp(0.5623351), rel=1e-5)
    assert rank(torch.zeros(4)) == 0
    # float32: eps 1.19e-7; with three rows values above 3 eps times the largest, 7.2e-7, count
    for smallest, expected in ((6e-7, 2), (8e-7, 3)):
        matrix = torch.diag(torch.tensor([2.0, 1.0, smallest]))
        assert fusion_spectrum.singular(matrix)["rank"] == expected


def test_mistakes_end_in_one_line(plain_run, make_run, corpus, tmp_path):
    flags = [f"--data_dir={corpus}", f"--results_dir={tmp_path}/results"]
    with pytest.raises(UserError, match="at least one checkpoint"):
        fusion_spectrum.main(flags)
    with pytest.raises(UserError, match="never trained latent feedback.*--fusion=residual"):
        fusion_spectrum.main([plain_run, *flags])
    without = make_run(pass_mix=(1.0,), max_iters=1)
    with pytest.raises(UserError, match="never trained latent feedback.*--pass_mix=0,0,1$"):
        fusion_spectrum.main([without, *flags])
    with pytest.raises(UserError, match="--passes=0 must be at least 1"):
        fusion_spectrum.main([plain_run, "--passes=0"])
    assert not (tmp_path / "results").exists()
