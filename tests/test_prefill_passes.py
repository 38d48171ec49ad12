"""experiments/prefill_passes.py against loops over passes and positions."""

import weakref

import numpy as np
import pytest
import torch
from by_hand import (
    T,
    lines_of,
    naive_passes,
    negative_log,
    refused,
    run_experiment,
    saved_figures,
    table_rows,
    validation,
    window_rows,
)

from experiments import prefill_passes
from harness.checkpoint import load_model
from model import GPT

N = 20  # windows, more than a batch of the experiment


def test_losses_and_changes_equal_a_naive_recomputation(
    corpus, learned, tmp_path, monkeypatch, capsys
):
    figures = saved_figures(monkeypatch)
    model, _ = load_model(learned)
    losses, changes = naive_passes(model, window_rows(validation(corpus), N), 8)
    numbers = run_experiment(prefill_passes, corpus, tmp_path, learned, f"--n_windows={N}")
    result = numbers["checkpoints"]["run"]
    assert numbers["feedback_passes"] == 8
    assert result["n_windows"] == N and result["checkpoint"] == learned
    assert result["losses"] == pytest.approx(losses.mean(1), abs=2e-5)
    assert result["changes"] == pytest.approx(changes.mean(1), abs=2e-5)
    assert np.ptp(losses.mean(1)) > 1e-3 and changes.mean(1).min() > 1e-4  # not all the same
    (axes,) = figures[0].axes
    assert lines_of(axes)["run"] == (list(range(9)), result["losses"])
    header, *rows = table_rows(capsys.readouterr().out)
    assert header == ["feedback passes", "run: loss"]
    shown = [[str(n), f"{result['losses'][n]:.4g}"] for n in (0, 1, 2, 3, 4, 8)]
    assert rows == shown


def test_beyond_is_what_construction_has_not_made_exact(
    corpus, learned, tmp_path, monkeypatch, capsys
):
    figures = saved_figures(monkeypatch)
    model, _ = load_model(learned)
    losses, changes = naive_passes(model, window_rows(validation(corpus), 6), T + 1)
    words = (learned, "--n_windows=6", "--long", f"--feedback_passes={T + 1}")
    result = run_experiment(prefill_passes, corpus, tmp_path, *words)["checkpoints"]["run"]
    # After n feedback passes, n + 1 passes in all, positions 1..n+1 are exact; T-1 leave none.
    assert len(result["losses_beyond"]) == T - 1 and len(result["changes_beyond"]) == T - 2
    for n in range(T - 1):
        rest = slice(n + 1, None)
        assert result["losses_beyond"][n] == pytest.approx(losses[n, rest].mean(), abs=2e-5)
        assert result["plain_beyond"][n] == pytest.approx(losses[0, rest].mean(), abs=2e-5)
        if n:
            change = changes[n - 1, rest].mean()
            assert result["changes_beyond"][n - 1] == pytest.approx(change, abs=2e-5)
    # The rows that construction made exact do not change any more, which is why they are left out.
    exact, _ = naive_passes(model, window_rows(validation(corpus), 6), T)
    assert losses[3, :4] == pytest.approx(exact[T, :4], abs=2e-5)
    gains = np.subtract(result["losses_beyond"], result["plain_beyond"])
    middle = list(figures[0].axes[1].lines[0].get_ydata())
    assert middle == pytest.approx(gains) and gains[0] == 0
    header, *rows = table_rows(capsys.readouterr().out)
    assert header[3] == "run: beyond, loss minus plain pass"
    assert rows[1][3] == f"{gains[1]:.4g}" and rows[-1][3] == ""


def test_zero_feedback_passes_are_plain_prefill_and_a_plain_model_a_level(
    corpus, learned, plain_run, tmp_path, monkeypatch, capsys
):
    figures = saved_figures(monkeypatch)
    words = (plain_run, learned, f"--n_windows={N}", "--long", "--feedback_passes=3")
    results = run_experiment(prefill_passes, corpus, tmp_path, *words)["checkpoints"]
    rows = window_rows(validation(corpus), N)
    for path in (plain_run, learned):  # both folders are named `run`
        model, _ = load_model(path)
        with torch.no_grad():
            h = model.stack(model.embedding.weight[rows[:, :-1]])
            by_t = [negative_log(model, h[:, t], rows[:, t + 1]).numpy() for t in range(T)]
        assert results[path]["losses"][0] == pytest.approx(np.mean(by_t), abs=1e-5)
    assert len(results[plain_run]["losses"]) == 1 and not results[plain_run]["changes"]
    losses, gains, changes = figures[0].axes
    x, y = lines_of(losses)[f"{plain_run} (no feedback)"]
    assert x == [0, 1] and y == results[plain_run]["losses"] * 2  # axhline, from edge to edge
    assert [len(line.get_xdata()) for line in changes.lines if line.get_linestyle() == "-"] == [3]
    printed = capsys.readouterr().out
    assert f"{plain_run} never trained latent feedback" in printed and "--init_from" in printed
    alone = [plain_run, "--long", f"--data_dir={corpus}", f"--results_dir={tmp_path}"]
    assert prefill_passes.main(alone) == 0


def test_a_fusion_without_feedback_steps_is_a_level_too(corpus, make_run, tmp_path):
    untrained = make_run(pass_mix=(1.0,), max_iters=2)
    result = run_experiment(prefill_passes, corpus, tmp_path, untrained)["checkpoints"]["run"]
    assert len(result["losses"]) == 1 and result["changes"] == []


def test_long_is_exact_beyond_the_window_and_keeps_no_states(
    corpus, learned, tmp_path, monkeypatch
):
    figures = saved_figures(monkeypatch)
    alive = []
    most_alive = []
    next_pass = GPT.next_pass

    def watched(self, *args, **kwargs):
        h = next_pass(self, *args, **kwargs)
        alive.append(weakref.ref(h))
        most_alive.append(sum(reference() is not None for reference in alive))
        return h

    monkeypatch.setattr(GPT, "next_pass", watched)
    words = (learned, "--n_windows=5", "--long")
    result = run_experiment(prefill_passes, corpus, tmp_path, *words)["checkpoints"]["run"]
    model, _ = load_model(learned)
    losses, changes = naive_passes(model, window_rows(validation(corpus), 5), T + 4)
    assert len(result["losses"]) == 1001 and len(result["changes"]) == 1000
    assert result["losses"][: T + 5] == pytest.approx(losses.mean(1), abs=2e-5)
    assert result["changes"][: T + 4] == pytest.approx(changes.mean(1), abs=2e-5)
    # Position T is exact after T - 1 feedback passes.
    assert set(result["losses"][T - 1 :]) == {result["losses"][T - 1]}
    assert set(result["changes"][T - 1 :]) == {0.0} and 0 < result["changes"][T - 2]
    assert max(most_alive) <= 3
    assert len(most_alive) == T  # the pass that changes nothing is the last one run
    panels = figures[0].axes
    assert panels[0].get_xscale() == "symlog" and panels[2].get_yscale() == "log"
    dotted = set()
    for panel in panels:
        for line in panel.lines:
            if line.get_linestyle() == ":":
                dotted.add(tuple(line.get_xdata()))
    assert dotted == {(T - 1, T - 1)}


def test_mistakes_are_named(corpus, tiny_run, tmp_path):
    assert "at least one checkpoint" in refused(prefill_passes)
    negative = refused(prefill_passes, tiny_run, "--feedback_passes=-1")
    assert "--feedback_passes=-1" in negative
    assert "--n_windows=0" in refused(prefill_passes, tiny_run, "--n_windows=0")
    assert str(tmp_path) in refused(prefill_passes, str(tmp_path), f"--data_dir={corpus}")
