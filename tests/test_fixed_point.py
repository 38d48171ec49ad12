"""fixed_point in miniature, against a recurrence written here."""

import json
import math

import naive
import numpy as np
import pytest
import torch
from by_hand import validation, window_rows

from experiments import fixed_point
from harness.checkpoint import load_model
from harness.configurator import UserError
from model import GPT

T = 16  # block_size of the fixtures' runs


@pytest.fixture
def model(tiny_run) -> GPT:
    return load_model(tiny_run)[0]


def run_fixed_point(results, *argv: str) -> dict:
    """What it wrote about each checkpoint."""
    assert fixed_point.main([*argv, f"--results_dir={results}", "--device=cpu"]) == 0
    assert (results / "fixed_point.png").stat().st_size > 10_000
    return json.loads((results / "fixed_point.json").read_text())["checkpoints"]


@torch.no_grad()
def recurrence(model: GPT, row: torch.Tensor, n_plain: int) -> torch.Tensor:
    """The states (T, D) of the recurrence on tokens (T,), one position after the other."""
    prompt = row[None, : max(n_plain, 1)]
    n_new = T + 1 - prompt.size(1)
    ahead = torch.cat([row, row[:1]])  # one more that is never fed
    n_prompt = prompt.size(1)
    return naive.recurrence(model, prompt, lambda n, _: ahead[None, n_prompt + n], n_new)[2][0]


def loss_by_hand(model: GPT, h: torch.Tensor, targets: torch.Tensor) -> float:
    logits = (h.double() @ model.embedding.weight.double().T).detach().numpy()  # (T, V)
    losses = []
    for row, target in zip(logits, targets.tolist(), strict=True):
        losses.append(np.log(np.exp(row).sum()) - row[target])
    return float(np.mean(losses))


def agreement(model: GPT, h: torch.Tensor, exact: torch.Tensor) -> float:
    same = [
        bool(model.head(a).argmax() == model.head(b).argmax())
        for a, b in zip(h, exact, strict=True)
    ]
    return sum(same) / len(same)


def change_of(h: torch.Tensor, h_before: torch.Tensor) -> float:
    return math.sqrt(((h - h_before) ** 2).sum()) / math.sqrt((h**2).sum())


class Stops:
    """A run of five windows with a plain prompt of n_plain tokens, and what it should have found.

    The states are those of the fused positions. Without a prompt the first one is plain all the
    same.
    """

    def __init__(self, model: GPT, corpus: str, n_plain: int, result: dict):
        self.n_plain = n_plain
        self.result = result
        self.n_passes = 16 if n_plain == 0 else 12  # one for plain positions, one for each other
        rows = window_rows(validation(corpus), 5)
        self.idx = rows[:, :-1]
        first = max(n_plain, 1)
        self.goals = rows[:, 1 + first :]
        self.exact = [recurrence(model, row, n_plain)[first:] for row in self.idx]
        self.passes = []  # k - 1 -> (5, T - first, D)
        for k in range(1, self.n_passes + 1):
            self.passes.append(naive.jacobi(model, self.idx, k, n_plain)[1][:, first:])
        self.best = self.losses(model, self.exact)

    def losses(self, model: GPT, states) -> list[float]:
        pairs = zip(states, self.goals, strict=True)
        return [loss_by_hand(model, h, goal) for h, goal in pairs]

    def stop(self, n: int, tol: float) -> int:
        """The pass at which window n stops."""
        for k in range(2, self.n_passes):
            if tol and change_of(self.passes[k - 1][n], self.passes[k - 2][n]) <= tol:
                return k
        return self.n_passes


@pytest.fixture(scope="module", params=[0, 5])
def stops(request, tiny_run, corpus, tmp_path_factory) -> Stops:
    results = tmp_path_factory.mktemp("results")
    flags = [f"--data_dir={corpus}", "--n_windows=5", "--tols=1e-2,0,0.6,0.2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_point, "BATCH", 2)  # so that five windows make three batches
        result = run_fixed_point(results, tiny_run, *flags, f"--n_plain={request.param}")["run"]
    return Stops(load_model(tiny_run)[0], corpus, request.param, result)


def test_plain_pass_and_fixed_point(stops, model):
    found = stops.result
    assert found["n_passes"] == stops.n_passes and found["n_windows"] == 5
    assert found["fixed_point_loss"] == pytest.approx(np.mean(stops.best), abs=1e-5)
    plain = stops.losses(model, stops.passes[0])
    lost = np.subtract(plain, stops.best)
    assert found["plain"]["loss"] == pytest.approx(np.mean(plain), abs=1e-5)
    assert found["plain"]["loss_given_up"] == pytest.approx(lost.mean(), abs=1e-5)
    assert found["plain"]["loss_given_up_max"] == pytest.approx(lost.max(), abs=1e-5)
    pairs = zip(stops.passes[0], stops.exact, strict=True)
    shares = [agreement(model, h, exact) for h, exact in pairs]
    assert found["plain"]["agreement"] == pytest.approx(np.mean(shares))


def test_passes_and_loss_by_tolerance(stops, model):
    columns = stops.result["by_tol"]
    assert columns["tol"] == [0.6, 0.2, 1e-2, 0]
    for i, tol in enumerate(columns["tol"]):
        passes = [stops.stop(n, tol) for n in range(5)]
        states = [stops.passes[k - 1][n] for n, k in enumerate(passes)]
        for n, k in enumerate(passes):  # what users get
            row = stops.idx[n : n + 1]
            cache, _ = model.reconstruct(row, stops.n_plain, stops.n_passes, tol)
            assert cache.passes == k
        lost = np.subtract(stops.losses(model, states), stops.best)
        pairs = zip(states, stops.exact, strict=True)
        shares = [agreement(model, h, exact) for h, exact in pairs]
        assert columns["passes_mean"][i] == pytest.approx(np.mean(passes))
        assert columns["passes_max"][i] == max(passes)
        assert columns["out_of_reach"][i] == pytest.approx(passes.count(stops.n_passes) / 5)
        assert columns["loss_given_up"][i] == pytest.approx(lost.mean(), abs=1e-5)
        assert columns["loss_given_up_max"][i] == pytest.approx(lost.max(), abs=1e-5)
        assert columns["agreement"][i] == pytest.approx(np.mean(shares))
    # So that the tolerances tell something:
    assert columns["passes_mean"][0] < columns["passes_mean"][1] <= stops.n_passes
    last = {name: column[-1] for name, column in columns.items()}
    assert (last["passes_mean"], last["passes_max"]) == (stops.n_passes, stops.n_passes)
    assert (last["loss_given_up"], last["agreement"]) == (0, 1)


def test_still_states_end_the_passes(model, monkeypatch):
    with torch.no_grad():
        model.fusion.W_H.weight.zero_()  # u is 0 whatever the state: pass 3 repeats pass 2
    idx = torch.randint(model.config.vocab_size, (3, T), generator=torch.Generator().manual_seed(1))
    calls = []
    next_pass = GPT.next_pass

    def counted(*args):
        calls.append(1)
        return next_pass(*args)

    monkeypatch.setattr(GPT, "next_pass", counted)
    found = fixed_point.stopping_points(model, idx, idx, (0.9, 1e-6))
    assert found["passes"][1].tolist() == [3, 3, 3] and found["passes"][2].tolist() == [T, T, T]
    assert len(calls) == 2  # passes 2 and 3; the others would change no bit
    assert torch.equal(found["losses"][1], found["losses"][2])
    assert bool((found["agree"][1] == 1).all())


def test_rows_stop_each_by_itself_relative_to_the_newer_states(model, monkeypatch):
    grows = torch.tensor([1.0, 0.0])[:, None, None]  # row 0 goes 1, 2, 3, ..., row 1 stays
    monkeypatch.setattr(GPT, "stack", lambda self, u: torch.ones_like(u))
    monkeypatch.setattr(GPT, "next_pass", lambda self, h, e, plain: h + grows)
    idx = torch.zeros(2, T, dtype=torch.long)
    # The changes of row 0 are 1/2, 1/3, 1/4, ...
    found = fixed_point.stopping_points(model, idx, idx, (0.5, 0.4, 0.26))
    assert found["passes"].tolist() == [[2, 2], [3, 2], [4, 2], [T, T]]


def test_several_checkpoints_in_one_figure(tiny_run, make_run, corpus, tmp_path, capsys):
    other = make_run(max_iters=1, fusion="residual")
    flags = [f"--data_dir={corpus}", "--n_windows=2"]
    found = run_fixed_point(tmp_path, tiny_run, other, *flags)
    assert list(found) == [tiny_run, other]  # two folders named `run`: their paths differ
    out = capsys.readouterr().out
    assert f"{tiny_run}: loss" in out and "out of reach" in out and "| plain " in out
    assert len(found[other]["by_tol"]["tol"]) == 10


def test_mistakes_end_in_one_line(plain_run, tiny_run, corpus, tmp_path):
    flags = [f"--data_dir={corpus}", f"--results_dir={tmp_path}/results"]
    with pytest.raises(UserError, match="at least one checkpoint"):
        fixed_point.main(flags)
    with pytest.raises(UserError, match="never trained latent feedback.*--fusion=residual"):
        fixed_point.main([plain_run, *flags])
    with pytest.raises(UserError, match="give at most --n_plain=15"):
        fixed_point.main([tiny_run, *flags, "--n_plain=16"])
    for flag in ("--tols=0.1,-1e-3", "--tols=1.5", "--tols=0", "--n_plain=-1"):
        with pytest.raises(UserError, match=flag.split("=")[0]):
            fixed_point.main([tiny_run, flag])
    assert not (tmp_path / "results").exists()
