"""fusion_spectrum and fixed_point in miniature, against computations written here."""

import json
import math

import numpy as np
import pytest
import torch

from harness.checkpoint import load_checkpoint, load_model
from harness.configurator import UserError
from experiments import fixed_point, fusion_spectrum
from model import GPT, GPTConfig

T = 16  # block_size of the fixtures' runs


def windows_by_hand(path: str, corpus: str, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n evenly spaced windows of the validation split: tokens and next tokens (n, T)."""
    tokens = np.fromfile(f"{corpus}/tiny/val.bin", dtype="<u2").astype(np.int64)
    starts = [int(i * (len(tokens) - T - 1) / (n - 1)) for i in range(n)]
    return tuple(torch.tensor(np.array([tokens[s + ahead:s + ahead + T] for s in starts])) for ahead in (0, 1))


def results_of(experiment, tmp_path, *argv: str) -> dict:
    """What it wrote about each checkpoint."""
    name = experiment.__name__.removeprefix("experiments.")
    assert experiment.main([*argv, f"--results_dir={tmp_path}", "--device=cpu"]) == 0
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    return json.loads((tmp_path / f"{name}.json").read_text())["checkpoints"]


def entropy_rank(values) -> float:
    shares = [float(value) / float(sum(values)) for value in values]
    return math.exp(-sum(share * math.log(share) for share in shares if share > 0))


@torch.no_grad()
def passes_by_hand(model: GPT, row: torch.Tensor, n_passes: int) -> list[torch.Tensor]:
    """h^(1), ..., h^(n_passes), each (T, D), of one window (T,)."""
    e = model.embed(row[None])
    states = [model.stack(e)[0]]
    while len(states) < n_passes:
        fused = [model.fusion(states[-1][t - 1], model.input_norm(e[0, t])) for t in range(1, T)]
        states.append(model.stack(torch.stack([e[0, 0], *fused])[None])[0])
    return states


# fusion_spectrum

def test_spectrum_of_a_gated_fusion(tiny_run, corpus, tmp_path, capsys):
    found = results_of(fusion_spectrum, tmp_path, tiny_run, f"--data_dir={corpus}", "--passes=3",
                       "--n_windows=7")["run"]["trained"]
    model, checkpoint = load_model(tiny_run)
    for name in ("W_H", "W_G"):
        values = np.linalg.svd(checkpoint["model"][f"fusion.{name}.weight"].numpy().astype(np.float64))[1]
        np.testing.assert_allclose(found["matrices"][name]["values"], values, rtol=1e-9)
        assert found["matrices"][name]["rank"] == sum(values > 32 * 2.0 ** -23 * values[0])
        assert found["matrices"][name]["effective_rank"] == pytest.approx(entropy_rank(values), rel=1e-9)

    idx, _ = windows_by_hand(tiny_run, corpus, 7)
    h = torch.cat([passes_by_hand(model, row, 3)[-1][:-1] for row in idx])  # (N (T-1), D), the states that are fed back
    for name, x in (("h", h), ("W_H h", h @ model.fusion.W_H.weight.detach().T)):
        x = x.double().numpy()
        centred = x - sum(x) / len(x)
        eigenvalues = np.linalg.svd(centred)[1] ** 2
        shares = eigenvalues / eigenvalues.sum()
        np.testing.assert_allclose(found["states"][name]["shares"], shares, atol=1e-6)
        assert found["states"][name]["effective_rank"] == pytest.approx(entropy_rank(shares), rel=1e-4)
        assert found["states"][name]["weaker_half"] == pytest.approx(sum(shares[16:]), abs=1e-6)

    normed = model.input_norm(model.embed(idx[:, 1:].flatten())).detach()
    gates = torch.sigmoid(normed @ model.fusion.W_G.weight.detach().T).double().numpy()
    gate = found["gate"]  # here each occurrence by itself, there each symbol with its frequency
    np.testing.assert_allclose(gate["histogram"], np.histogram(gates, 40, (0, 1))[0] / gates.size, atol=1e-9)
    assert gate["mean"] == pytest.approx(gates.mean(), rel=1e-6) and gate["std"] == pytest.approx(gates.std(), rel=1e-6)
    assert gate["below_0.1"] == pytest.approx((gates < 0.1).mean())
    assert gate["above_0.9"] == pytest.approx((gates > 0.9).mean())
    of_dimension, of_token = gates.mean(0, keepdims=True), gates.mean(1, keepdims=True)
    assert gate["share_dimensions"] == pytest.approx(of_dimension.var() / gates.var(), rel=1e-6)
    assert gate["share_tokens"] == pytest.approx(of_token.var() / gates.var(), rel=1e-6)
    rest = gates - of_dimension - of_token + gates.mean()
    assert gate["share_tokens_by_dimension"] == pytest.approx((rest ** 2).mean() / gates.var(), rel=1e-6)
    out = capsys.readouterr().out
    assert "| W_H: rank " in out and "gate: mean" in out and "no gate" not in out


def test_the_untrained_twin_is_where_the_run_began(tiny_run, make_run, corpus, tmp_path):
    found = results_of(fusion_spectrum, tmp_path, tiny_run, f"--data_dir={corpus}", "--n_windows=2")
    began = load_checkpoint(make_run(max_iters=0))["model"]
    values = np.linalg.svd(began["fusion.W_H.weight"].numpy().astype(np.float64))[1]
    np.testing.assert_allclose(found["run"]["untrained"]["matrices"]["W_H"]["values"], values, rtol=1e-9)
    assert found["run"]["untrained"]["matrices"] != found["run"]["trained"]["matrices"]


@pytest.mark.parametrize("kind", ["add", "concat"])
def test_spectrum_without_a_gate(kind, make_run, corpus, tmp_path, capsys):
    path = make_run(fusion=kind, max_iters=3)
    found = results_of(fusion_spectrum, tmp_path, path, f"--data_dir={corpus}", "--n_windows=5",
                       "--passes=2")["run"]["trained"]
    assert f"fusion={kind} has no gate" in capsys.readouterr().out and "gate" not in found
    model, _ = load_model(path)
    weights = {name: weight.detach().numpy() for name, weight in model.fusion.named_parameters()}
    if kind == "concat":
        weights = {"W_R[h]": weights["W_R.weight"][:, :32], "W_R[e]": weights["W_R.weight"][:, 32:]}
    else:
        weights = {"W_H": weights["W_H.weight"], "W_G": weights["W_G.weight"]}
    for name, weight in weights.items():
        np.testing.assert_allclose(found["matrices"][name]["values"], np.linalg.svd(weight)[1], rtol=1e-4, atol=1e-6)
    idx, _ = windows_by_hand(path, corpus, 5)
    h = [passes_by_hand(model, row, 2)[-1].numpy() for row in idx]
    of_h, of_e = weights.values()
    sizes = []
    for n in range(5):
        for t in range(1, T):
            e = model.embedding.weight[idx[n, t]].detach().numpy()
            normed = e / math.sqrt((e ** 2).mean() + 1e-6) * model.input_norm.weight.detach().numpy()
            sizes.append((np.linalg.norm(of_h @ h[n][t - 1]), np.linalg.norm(of_e @ normed)))
    sizes = np.array(sizes)
    shares = sizes[:, 0] / sizes.sum(1)
    assert found["terms"]["norm_h"] == pytest.approx(sizes[:, 0].mean(), rel=1e-4)
    assert found["terms"]["norm_e"] == pytest.approx(sizes[:, 1].mean(), rel=1e-4)
    assert found["terms"]["share_h"] == pytest.approx(shares.mean(), rel=1e-4)
    assert sum(found["terms"]["histogram"]) == pytest.approx(1)


def test_gates_of_tiny_weights_by_hand():
    model = GPT(GPTConfig(vocab_size=3, block_size=4, n_layer=1, n_head=1, n_embd=2)).eval()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.tensor([[3.0, 4.0], [1.0, -1.0], [9.0, 9.0]]))  # RMS sqrt(12.5), 1, 9
        model.fusion.W_G.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    # The first token of a row is plain, so that symbol 0 counts three times, 1 once, and 2 never.
    gate = fusion_spectrum.measure(model, torch.tensor([[2, 0, 1], [2, 0, 0]]), 1)["gate"]
    a, b = 3 / math.sqrt(12.5), 2 * 4 / math.sqrt(12.5)
    of_0 = [1 / (1 + math.exp(-a)), 1 / (1 + math.exp(-b))]  # 0.7003, 0.9057
    of_1 = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))]  # 0.7311, 0.1192
    mean = (3 * sum(of_0) + sum(of_1)) / 8
    assert gate["mean"] == pytest.approx(mean, abs=1e-5) and mean == pytest.approx(0.70856, abs=1e-4)
    variance = (3 * sum((g - mean) ** 2 for g in of_0) + sum((g - mean) ** 2 for g in of_1)) / 8
    assert gate["std"] == pytest.approx(math.sqrt(variance), abs=1e-5)
    assert gate["above_0.9"] == pytest.approx(3 / 8) and gate["below_0.1"] == 0
    assert gate["histogram"][28] == pytest.approx(3 / 8) and gate["histogram"][36] == pytest.approx(3 / 8)
    assert gate["histogram"][29] == pytest.approx(1 / 8) and gate["histogram"][4] == pytest.approx(1 / 8)


def test_shares_of_the_gate_variance_by_hand():
    equal = torch.tensor([0.5, 0.5], dtype=torch.double)
    for gates, expected in (([[0.2, 0.8], [0.2, 0.8]], (1, 0, 0)), ([[0.2, 0.2], [0.8, 0.8]], (0, 1, 0)),
                            ([[0.2, 0.8], [0.8, 0.2]], (0, 0, 1))):
        found = fusion_spectrum.gate_numbers(torch.tensor(gates, dtype=torch.double), equal)
        names = ("share_dimensions", "share_tokens", "share_tokens_by_dimension")
        assert [found[name] for name in names] == pytest.approx(expected)
        assert found["std"] == pytest.approx(0.3)


def test_ranks_by_hand():
    assert fusion_spectrum.effective_rank(torch.full((5,), 0.3)) == pytest.approx(5)
    assert fusion_spectrum.effective_rank(torch.tensor([4.0, 0.0, 0.0])) == pytest.approx(1)
    assert fusion_spectrum.effective_rank(torch.tensor([3.0, 1.0])) == pytest.approx(math.exp(0.5623351), rel=1e-5)
    # float32: eps 1.19e-7; with three rows values above 3 eps times the largest, 7.2e-7, count
    for smallest, rank in ((6e-7, 2), (8e-7, 3)):
        assert fusion_spectrum.singular(torch.diag(torch.tensor([2.0, 1.0, smallest])))["rank"] == rank


@pytest.mark.parametrize("experiment", [fusion_spectrum, fixed_point])
def test_experiments_refuse_what_they_cannot_read(experiment, plain_run, make_run, corpus, tmp_path):
    flags = [f"--data_dir={corpus}", f"--results_dir={tmp_path}/results"]
    with pytest.raises(UserError, match="at least one checkpoint"):
        experiment.main(flags)
    with pytest.raises(UserError, match="never trained latent feedback.*--pass_mix=0,0,1 --fusion=gated"):
        experiment.main([plain_run, *flags])
    with pytest.raises(UserError, match="never trained latent feedback.*--pass_mix=0,0,1$"):
        experiment.main([make_run(pass_mix=(1.0,), max_iters=1), *flags])
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("main, flag", [(fusion_spectrum.main, "--passes=0"), (fixed_point.main, "--tols=0.1,-1e-3"),
                                        (fixed_point.main, "--tols=1.5"), (fixed_point.main, "--tols=0")])
def test_experiments_name_the_bad_setting(main, flag):
    with pytest.raises(UserError, match=flag.split("=")[0].strip("-")):
        main(["out/demo", flag])


# fixed_point

@torch.no_grad()
def recurrence(model: GPT, row: torch.Tensor) -> torch.Tensor:
    """The states (T, D) of the fully fused recurrence on tokens (T,), one position after the other, without cache."""
    u = model.embed(row[None, :1])
    for t in range(1, T):
        h = model.stack(u)
        u = torch.cat([u, model.fusion(h[:, -1:], model.input_norm(model.embed(row[None, t:t + 1])))], dim=1)
    return model.stack(u)[0]


def loss_by_hand(model: GPT, h: torch.Tensor, targets: torch.Tensor) -> float:
    logits = (h.double() @ model.embedding.weight.double().T).detach().numpy()  # (T, V)
    return float(np.mean([np.log(np.exp(row).sum()) - row[target] for row, target in zip(logits, targets.tolist())]))


def test_passes_and_loss_by_tolerance(tiny_run, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fixed_point, "BATCH", 2)  # so that five windows make three batches
    found = results_of(fixed_point, tmp_path, tiny_run, f"--data_dir={corpus}", "--n_windows=5",
                       "--tols=1e-2,0,0.6,0.2")["run"]
    columns = found["by_tol"]
    assert columns["tol"] == [0.6, 0.2, 1e-2, 0] and found["block_size"] == T and found["n_windows"] == 5
    model, _ = load_model(tiny_run)
    idx, targets = windows_by_hand(tiny_run, corpus, 5)
    exact = [recurrence(model, row) for row in idx]
    best = [loss_by_hand(model, h, goal) for h, goal in zip(exact, targets)]
    assert found["fixed_point_loss"] == pytest.approx(np.mean(best), abs=1e-5)
    plain = [loss_by_hand(model, model.stack(model.embed(row[None]))[0], goal) for row, goal in zip(idx, targets)]
    assert found["plain_loss"] == pytest.approx(np.mean(plain), abs=1e-5)
    states = [passes_by_hand(model, row, T) for row in idx]
    for i, tol in enumerate(columns["tol"]):
        passes, losses, agree = [], [], []
        for row, goal, h, h_exact, loss in zip(idx, targets, states, exact, best):
            k = 1
            while k < T:
                k += 1
                change = math.sqrt(((h[k - 1] - h[k - 2]) ** 2).sum()) / math.sqrt((h[k - 1] ** 2).sum())
                if tol and change <= tol:
                    break
            passes.append(k)
            losses.append(loss_by_hand(model, h[k - 1], goal) - loss)
            agree.append(np.mean([model.head(a).argmax() == model.head(b).argmax() for a, b in zip(h[k - 1], h_exact)]))
            assert model.reconstruct(row[None], 0, T, tol)[0].passes == k  # what users get
        assert columns["passes_mean"][i] == pytest.approx(np.mean(passes)) and columns["passes_max"][i] == max(passes)
        assert columns["out_of_reach"][i] == pytest.approx(np.mean([k == T for k in passes]))
        assert columns["loss_given_up"][i] == pytest.approx(np.mean(losses), abs=1e-5)
        assert columns["loss_given_up_max"][i] == pytest.approx(max(losses), abs=1e-5)
        assert columns["agreement"][i] == pytest.approx(np.mean(agree))
    assert columns["passes_mean"][0] < columns["passes_mean"][1] < T  # so that the tolerances above tell something
    assert [columns[name][-1] for name in ("passes_mean", "passes_max", "loss_given_up", "agreement")] == [T, T, 0, 1]
    assert "out of reach" in capsys.readouterr().out


def test_rows_stop_each_by_itself_and_still_states_end_the_passes(tiny_run, monkeypatch):
    model, _ = load_model(tiny_run)
    with torch.no_grad():
        model.fusion.W_H.weight.zero_()  # fused inputs are 0 whatever the state: pass 3 repeats pass 2
    idx = torch.randint(model.config.vocab_size, (3, T), generator=torch.Generator().manual_seed(1))
    calls, next_pass = [], GPT.next_pass
    monkeypatch.setattr(GPT, "next_pass", lambda *args: calls.append(1) or next_pass(*args))
    found = fixed_point.measure(model, idx, idx, (0.9, 1e-6))
    assert found["passes"][1].tolist() == [3, 3, 3] and found["passes"][2].tolist() == [T, T, T]
    assert len(calls) == 2  # passes 2 and 3; the others would change no bit
    assert torch.equal(found["losses"][1], found["losses"][2]) and bool((found["agree"][1] == 1).all())


def test_the_change_is_relative_to_the_newer_states(tiny_run, monkeypatch):
    model, _ = load_model(tiny_run)
    grows = torch.tensor([1.0, 0.0])[:, None, None]  # row 0 goes 1, 2, 3, ..., row 1 stays
    monkeypatch.setattr(GPT, "stack", lambda self, u: torch.ones_like(u))
    monkeypatch.setattr(GPT, "next_pass", lambda self, h, e: h + grows)
    idx = torch.zeros(2, T, dtype=torch.long)
    found = fixed_point.measure(model, idx, idx, (0.5, 0.4, 0.26))  # changes of row 0: 1/2, 1/3, 1/4, ...
    assert found["passes"].tolist() == [[2, 2], [3, 2], [4, 2], [T, T]]


def test_several_checkpoints_in_one_figure(tiny_run, make_run, corpus, tmp_path, capsys):
    other = make_run(max_iters=2, fusion="add")
    found = results_of(fixed_point, tmp_path, tiny_run, other, f"--data_dir={corpus}", "--n_windows=2")
    assert list(found) == [tiny_run, other]  # two folders named `run`: their paths tell them apart
    assert f"{tiny_run}: loss" in capsys.readouterr().out
    assert len(found[other]["by_tol"]["tol"]) == 10
    pair = results_of(fusion_spectrum, tmp_path, tiny_run, other, f"--data_dir={corpus}",
                      "--n_windows=2")
    assert "gate" in pair[tiny_run]["trained"] and "terms" in pair[other]["trained"]
