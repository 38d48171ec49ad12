"""experiments/state_tracking.py against loops, hand numbers, and models that know the game."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import lines_of, refused, run_experiment, saved_figures, table_rows
from matplotlib.figure import Figure
from shell_game import SYMBOLS, T, after, naive, prepared, two_runs

from corpora.cups import text
from experiments import state_tracking
from experiments.state_tracking import (
    decoded,
    draw,
    in_parallel,
    longest_gap,
    make_games,
    scores,
    wilson,
)
from harness.checkpoint import load_model


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return prepared(tmp_path_factory.mktemp("cups"))


@pytest.fixture(scope="module")
def runs(data, make_run) -> dict[str, str]:
    return two_runs(data, make_run)


class Player:
    """Stands in for a model: its state is the ball's cup, which it loses after `memory` moves."""

    def __init__(self, memory: float = float("inf")):
        self.memory = memory
        self.config = SimpleNamespace(block_size=T)
        self.embedding = SimpleNamespace(weight=torch.zeros(1))

    def prefill(self, idx, mode):
        self.mode = mode
        self.age = 0
        return "cache", idx[:, -1:, None].float()  # (B, 1, 1): a look's token is its cup

    def decode_step(self, token, h, cache, mode):
        assert (cache, mode, token.shape) == ("cache", self.mode, (len(h), 1))
        self.age += 1
        if self.age > self.memory:
            return torch.full_like(h, 5)
        moved = []
        for cup, move in zip(h.flatten(), token.flatten(), strict=True):
            moved.append([[after(int(cup), SYMBOLS[int(move)])]])
        return torch.tensor(moved).float()

    def head(self, h):
        logits = torch.full((*h.shape[:-1], 7), -1.0)
        logits[..., 5] = 9.0  # a move is likelier than any look
        for place, cup in np.ndenumerate(h[..., 0].numpy()):
            if cup < 5:
                logits[(*place, int(cup))] = 0.0
        return logits  # a lost ball: all looks are equal, the first is taken


def test_games_are_tokens_and_the_cups_after_each_move():
    games, cups = make_games(30, n_moves=9, n_prompt=4, seed=1)
    assert games.shape == (30, 13) and cups.shape == (30, 9)
    for row, wanted in zip(games.tolist(), cups.tolist(), strict=True):
        cup = row[3]
        assert cup < 5 and min(row[4:]) >= 5
        for token, truth in zip(row[4:], wanted, strict=True):
            cup = after(cup, SYMBOLS[token])
            assert cup == truth
    again, _ = make_games(30, n_moves=9, n_prompt=4, seed=1)
    other, _ = make_games(30, n_moves=9, n_prompt=4, seed=2)
    fewer, _ = make_games(7, n_moves=9, n_prompt=4, seed=1)
    assert torch.equal(games, again) and not torch.equal(games, other)
    assert torch.equal(games[:7], fewer)
    assert len({tuple(row) for row in games.tolist()}) == 30


@pytest.mark.parametrize("n_prompt", [1, 5])
def test_who_knows_the_game_is_right_at_every_gap_and_who_forgets_until_then(n_prompt):
    games, cups = make_games(300, n_moves=12, n_prompt=n_prompt, seed=1)
    perfect = scores(decoded(Player(), games, n_prompt, "soft"), cups)
    assert perfect["accuracy"] == [1.0] * 12 and perfect["reach"] == 12
    forgetful = scores(decoded(Player(memory=5), games, n_prompt, "standard"), cups)
    assert forgetful["accuracy"][:5] == [1.0] * 5 and forgetful["reach"] == 5
    under_first = [float(np.mean([row[n] == 0 for row in cups.tolist()])) for n in range(5, 12)]
    assert forgetful["accuracy"][5:] == pytest.approx(under_first)


def test_scores_of_hand_made_guesses():
    cups = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 1, 1], [2, 2, 2]])
    fewer = torch.tensor([[0, 1], [3, 0], [1, 0], [2, 2]])  # than the games have gaps
    result = scores(fewer, cups)
    assert result["accuracy"] == [1.0, 0.5] and result["reach"] == 1
    assert scores(cups + 1, cups)["reach"] == 0
    ten = torch.zeros(10, 3, dtype=torch.long)
    guesses = ten.clone()
    guesses[:1, 0] = 1
    guesses[:2, 1] = 1
    # 0.9 is enough, 0.8 is not, and what comes after does not count.
    assert scores(guesses, ten)["reach"] == 1


def test_wilson_intervals():
    # Hand numbers: Newcombe (1998), table of method 3, and 1.96**2 / (n + 1.96**2).
    expected = np.array([[0.2366, 0.7634], [0, 0.2775], [0.7225, 1]])
    assert wilson(np.array([0.5, 0.0, 1.0]), 10) == pytest.approx(expected, abs=1e-4)
    expected = np.array([[0.2553, 0.3662]])
    assert wilson(np.array([81 / 263]), 263) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "played, longest", [("ss1rrrr2s", 4), ("sssss1r2r", 5), ("s1r2rrr", 3), ("rrs", 3)]
)
def test_the_longest_gap_of_a_text(played, longest):
    tokens = np.array([SYMBOLS.index(char) for char in played], dtype=np.uint16)
    assert longest_gap(tokens) == longest


@pytest.mark.parametrize("n_prompt", [1, 4])
def test_decoding_and_reading_equal_a_naive_loop(runs, n_prompt):
    model, _ = load_model(runs["full"])
    games, _ = make_games(20, n_moves=T - n_prompt, n_prompt=n_prompt, seed=1)
    standard = naive(model, games, n_prompt, False)
    soft = naive(model, games, n_prompt, True)
    assert decoded(model, games, n_prompt, "standard").tolist() == standard
    assert decoded(model, games, n_prompt, "soft").tolist() == soft != standard
    # One pass is an ordinary prefill; as many as positions are the recurrence.
    assert in_parallel(model, games, n_prompt, 1).tolist() == standard
    exact = [row[n_prompt - 1 :] for row in naive(model, games, 1, True)]
    assert in_parallel(model, games, n_prompt, T).tolist() == exact
    fused = decoded(model, games, n_prompt, "fused", prefill_passes=n_prompt)
    assert fused.tolist() == exact
    longer, _ = make_games(20, n_moves=T + 20, n_prompt=n_prompt, seed=1)
    assert in_parallel(model, longer, n_prompt, 2).shape == (20, T - n_prompt)
    assert decoded(model, longer, n_prompt, "soft").shape == (20, T + 20)


def test_the_experiment(runs, data, tmp_path, capsys, monkeypatch):
    figures = saved_figures(monkeypatch)
    words = (runs["plain"], runs["full"], "--n_windows=40", "--n_moves=20", "--passes=2,4")
    result = run_experiment(state_tracking, data, tmp_path, *words)
    assert result["chance"] == 0.2 and result["games"] == 40
    assert result["settings"]["n_moves"] == 20
    plain, full = result["checkpoints"].values()
    assert list(plain["modes"]) == ["standard"]
    assert list(full["modes"]) == ["standard", "soft", "2 passes", "4 passes"]
    lengths = [len(scored["accuracy"]) for scored in full["modes"].values()]
    assert lengths == [20, 20, T - 1, T - 1]
    trained_on = text(6000)[:5400]
    gaps = "".join("|" if char.isdigit() else char for char in trained_on).split("|")
    assert full["longest_gap"] == plain["longest_gap"] == max(map(len, gaps))
    assert full["block_size"] == T
    games, cups = make_games(40, n_moves=20, n_prompt=1, seed=1)
    model, _ = load_model(runs["full"])
    guesses = np.array(naive(model, games[:, :T], 1, True))
    right = (guesses == cups[:, : T - 1].numpy()).mean(axis=0)
    soft = full["modes"]["soft"]
    assert soft["accuracy"][: T - 1] == pytest.approx(right.tolist())
    assert soft["games"] == 40

    header, *rows = table_rows(capsys.readouterr().out)
    gap_columns = [f"gap {gap}" for gap in (1, 2, 4, 8, 16, 20)]
    assert header == ["run", "mode", *gap_columns, "reach"]
    assert [row[1] for row in rows] == ["standard", *full["modes"]]
    shown = [f"{soft['accuracy'][gap - 1]:.3f}" for gap in (1, 2, 4, 8, 16, 20)]
    assert rows[2][2:] == [*shown, str(soft["reach"])]

    above, below = figures[0].axes
    straight = lines_of(above)
    curves = {name.split(", ")[-1]: xy for name, xy in straight.items() if ", " in str(name)}
    assert curves["Soft"] == (list(range(1, 21)), soft["accuracy"])
    assert straight["chance"][1] == [0.2, 0.2] and straight["block_size"][0] == [T, T]
    assert straight["longest gap trained on"][0] == [full["longest_gap"]] * 2
    assert above.get_xscale() == "log"
    passes = lines_of(below)
    assert passes["4 passes"][1] == full["modes"]["4 passes"]["accuracy"]
    assert passes["1 pass (plain)"][1] == full["modes"]["standard"]["accuracy"][: T - 1]


def scored_run(accuracy: list[float]) -> dict:
    """A plain run's result with these accuracies of ten games."""
    scored = {"accuracy": accuracy, "games": 10}
    return {"modes": {"standard": scored}, "block_size": 8, "longest_gap": 5, "n_prompt": 1}


def test_several_trainings_are_one_curve_in_a_band_from_lowest_to_highest():
    one = scored_run([0.5, 0.25])
    other = scored_run([1.0, 0.75])
    mean, low, high = state_tracking.band([one], "standard")
    assert list(mean) == [0.5, 0.25]
    assert [low[0], high[0]] == pytest.approx([0.2366, 0.7634], abs=1e-4)  # of ten: Newcombe
    mean, low, high = state_tracking.band([one, other], "standard")
    assert [list(mean), list(low), list(high)] == [[0.75, 0.5], [0.5, 0.25], [1.0, 0.75]]
    figure = Figure()
    draw(figure, {"plain": [one, other]})
    (axes,) = figure.axes  # plain runs alone need one panel
    assert lines_of(axes)["plain, Standard"] == ([1, 2], [0.75, 0.5])


def test_fused_differs_from_soft_after_a_longer_prompt(runs, data, tmp_path):
    words = (runs["full"], "--n_windows=30", "--n_moves=6", "--n_prompt=8", "--passes=2")
    once = run_experiment(state_tracking, data, tmp_path, *words)
    often = run_experiment(state_tracking, data, tmp_path, *words, "--prefill_passes=8")
    (once,) = once["checkpoints"].values()
    (often,) = often["checkpoints"].values()
    assert list(once["modes"]) == ["standard", "soft", "fused", "2 passes"]
    games, cups = make_games(30, n_moves=6, n_prompt=8, seed=1)
    model, _ = load_model(runs["full"])
    exact = np.array(naive(model, games, 1, True))[:, 7:]
    right = (exact == cups.numpy()).mean(axis=0)
    # Eight passes are exact, two are not.
    assert often["modes"]["fused"]["accuracy"] == pytest.approx(right.tolist())
    assert once["modes"]["fused"]["accuracy"] != often["modes"]["fused"]["accuracy"]


def test_mistakes_are_named(runs, data, corpus, tiny_run, tmp_path):
    place = (f"--data_dir={data}", f"--results_dir={tmp_path}/none")

    def complaint(*words):
        return refused(state_tracking, runs["full"], *words, *place)

    assert "name at least one checkpoint" in refused(state_tracking, *place)
    other = refused(state_tracking, tiny_run, f"--data_dir={corpus}", place[1])
    assert other.startswith(f"{tiny_run} was not trained on the shell game")
    assert "prepare.py cups" in other
    too_long = complaint(f"--n_prompt={T}")
    assert f"--n_prompt={T}" in too_long and f"at most {T - 1}" in too_long
    for word in ("--n_moves=0", "--n_prompt=0", "--prefill_passes=0", "--n_windows=0", "--seed=-1"):
        assert word in complaint(word)
    assert "--passes=(1, 2)" in complaint("--passes=1,2")
    assert "--prefill_passes=3 must be left out" in complaint("--prefill_passes=3")
    assert not Path(tmp_path, "none").exists()
