"""experiments/written_looks.py against a naive player that writes, and hand-made series."""

import numpy as np
import pytest
from by_hand import lines_of, refused, run_experiment, saved_figures, table_rows
from shell_game import naive, prepared, two_runs

from experiments import written_looks
from experiments.state_tracking import decoded, make_games
from experiments.written_looks import guesses_writing, n_written
from harness.checkpoint import load_model


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return prepared(tmp_path_factory.mktemp("cups"))


@pytest.fixture(scope="module")
def runs(data, make_run) -> dict[str, str]:
    return two_runs(data, make_run)


@pytest.mark.parametrize("every, n_prompt", [(1, 1), (2, 1), (3, 4), (0, 1)])
def test_guesses_equal_a_naive_player_that_reads_what_it_wrote(runs, every, n_prompt):
    games, _ = make_games(12, n_moves=6, n_prompt=n_prompt, seed=1)  # all within block_size
    silent = []
    for name, mode in (("plain", "standard"), ("full", "standard"), ("full", "soft")):
        model, _ = load_model(runs[name])
        guesses = naive(model, games, n_prompt, mode == "soft", every)
        expected = [row[-1] for row in guesses]
        assert guesses_writing(model, games, n_prompt, mode, every).tolist() == expected
        without = decoded(model, games, n_prompt, mode)[:, -1].tolist()
        silent.append(without == expected)
    assert all(silent) == (every == 0)  # writing makes a difference, never writing none


def test_written_looks_are_counted(runs, monkeypatch):
    model, _ = load_model(runs["full"])
    games, _ = make_games(3, n_moves=40, n_prompt=1, seed=1)
    fed = []
    decode_step = model.decode_step

    def watched(token, *rest):
        fed.append(token)
        return decode_step(token, *rest)

    monkeypatch.setattr(model, "decode_step", watched)
    for every, looks in ((1, 39), (2, 19), (7, 5), (39, 1), (40, 0), (0, 0)):
        fed.clear()
        guesses_writing(model, games, 1, "soft", every)
        assert len(fed) - 40 == looks == n_written(40, every)
        assert sum(bool((token < 5).all()) for token in fed) == looks


def test_the_experiment(runs, data, tmp_path, capsys, monkeypatch):
    figures = saved_figures(monkeypatch)
    words = (runs["plain"], runs["full"], "--n_windows=30", "--n_moves=8", "--every=1,4,0")
    result = run_experiment(written_looks, data, tmp_path, *words)
    assert result["every"] == [1, 4, 0] and result["written"] == [7, 1, 0]
    plain, full = result["checkpoints"].values()
    assert list(plain["modes"]) == ["standard"] and list(full["modes"]) == ["standard", "soft"]
    games, cups = make_games(30, n_moves=8, n_prompt=1, seed=1)
    model, _ = load_model(runs["full"])
    for place, every in enumerate((1, 4, 0)):
        guesses = np.array(naive(model, games, 1, True, every))[:, -1]
        right = np.mean(guesses == cups[:, -1].numpy())
        assert full["modes"]["soft"]["accuracy"][place] == pytest.approx(right)
    header, *rows = table_rows(capsys.readouterr().out)
    assert header[:2] == ["moves per written look", "looks written"] and len(header) == 5
    assert [row[:2] for row in rows] == [["1", "7"], ["4", "1"], ["never", "0"]]
    soft = full["modes"]["soft"]["accuracy"]
    assert [row[-1] for row in rows] == [f"{value:.3f}" for value in soft]
    (axes,) = figures[0].axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "4", "never"]
    # A curve through the numbers of moves, and "never" apart from it, for each of three series.
    drawn = [list(line.get_ydata()) for line in axes.lines if line.get_marker() != "None"]
    drawn = [ys for ys in drawn if len(ys) in (1, 2)]
    assert [soft[0], soft[1]] in drawn and [soft[2]] in drawn
    assert lines_of(axes)["chance"][1] == [0.2, 0.2]


def test_series_are_means_over_trainings_and_their_range():
    def run_of(*accuracy):
        return {"modes": {"soft": {"accuracy": list(accuracy)}}}

    series = written_looks.series_of({"full": [run_of(1.0, 0.25), run_of(0.5, 0.75)]}, 10)
    assert series == {"full, Soft": {"mean": [0.75, 0.5], "low": [0.5, 0.25], "high": [1, 0.75]}}
    (single,) = written_looks.series_of({"full": [run_of(0.5)]}, 10).values()
    # Wilson's interval of 5 in 10, from Newcombe (1998).
    assert single["low"] == pytest.approx([0.2366], abs=1e-4)
    assert single["high"] == pytest.approx([0.7634], abs=1e-4)


def test_mistakes_are_named(runs, data, corpus, tiny_run, tmp_path):
    place = (f"--data_dir={data}", f"--results_dir={tmp_path}/none")
    assert "name checkpoints" in refused(written_looks, *place)
    other = refused(written_looks, tiny_run, f"--data_dir={corpus}", place[1])
    assert other.startswith(f"{tiny_run} was not trained on the shell game")
    for word in ("--n_moves=0", "--n_prompt=0"):
        assert word in refused(written_looks, runs["full"], word, *place)
    assert "--every=(-1, 2)" in refused(written_looks, runs["full"], "--every=-1,2", *place)
