"""experiments/state_tracking.py against loops and hand numbers written here, and models that know the game."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import prepare
from harness.checkpoint import load_checkpoint, load_model, save_checkpoint
from harness.configurator import UserError
from corpora.cups import text
from experiments import state_tracking
from experiments.state_tracking import Settings, decoded, draw, longest_gap, make_games, read, scores, wilson

SYMBOLS = "12345rs"
T = 16  # block_size of the fixtures' runs


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """The data_dir of a short shell game named `cups`."""
    folder = tmp_path_factory.mktemp("cups")
    (folder / "cups.txt").write_text(text(6000))
    prepare.main([f"--input={folder}/cups.txt", f"--data_dir={folder}"])
    return str(folder)


@pytest.fixture(scope="module")
def runs(data, make_run) -> dict[str, str]:
    """A plain run and one with feedback, both of the shell game; large embeddings make their guesses differ."""
    shared = {"data_dir": data, "dataset": "cups", "max_iters": 2, "eval_iters": 0}
    folders = {"plain": make_run(fusion="none", pass_mix=(1.0,), **shared), "full": make_run(**shared)}
    for folder in folders.values():
        checkpoint = load_checkpoint(folder)
        weight = checkpoint["model"]["embedding.weight"]
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        save_checkpoint(Path(folder), checkpoint)
    return folders


def after(cup: int, move: str) -> int:
    """The ball's cup 0..4 after a move."""
    return (cup + 1) % 5 if move == "r" else {0: 1, 1: 0}.get(cup, cup)


class Player:
    """Stands in for a model: its state is the ball's cup, which it loses after `memory` moves."""

    def __init__(self, memory: float = float("inf")):
        self.memory, self.config = memory, SimpleNamespace(block_size=T)
        self.embedding = SimpleNamespace(weight=torch.zeros(1))

    def prefill(self, idx, mode):
        self.mode, self.age = mode, 0
        return "cache", idx[:, -1:, None].float()  # (B, 1, 1): a look's token is its cup

    def decode_step(self, token, h, cache, mode):
        assert (cache, mode, token.shape) == ("cache", self.mode, (len(h), 1))
        self.age += 1
        moved = [[[after(int(cup), SYMBOLS[int(move)])]] for cup, move in zip(h.flatten(), token.flatten())]
        return torch.tensor(moved).float() if self.age <= self.memory else torch.full_like(h, 5)

    def head(self, h):
        logits = torch.full((*h.shape[:-1], 7), -1.0)
        logits[..., 5] = 9.0  # a move is likelier than any look
        for place, cup in np.ndenumerate(h[..., 0].numpy()):
            if cup < 5:
                logits[(*place, int(cup))] = 0.0
        return logits  # a lost ball: all looks are equal, the first is taken


def test_games_are_tokens_and_the_cups_after_each_move():
    games, cups = make_games(Settings(n_windows=30, n_moves=9, n_prompt=4))
    assert games.shape == (30, 13) and cups.shape == (30, 9)
    for row, wanted in zip(games.tolist(), cups.tolist()):
        cup = row[3]
        assert cup < 5 and min(row[4:]) >= 5
        for token, truth in zip(row[4:], wanted, strict=True):
            cup = after(cup, SYMBOLS[token])
            assert cup == truth
    again, other = (make_games(Settings(n_windows=30, n_moves=9, n_prompt=4, seed=seed))[0] for seed in (1, 2))
    assert torch.equal(games, again) and not torch.equal(games, other)
    assert len({tuple(row) for row in games.tolist()}) == 30


@pytest.mark.parametrize("n_prompt", [1, 5])
def test_who_knows_the_game_is_right_at_every_gap_and_who_forgets_until_then(n_prompt):
    games, cups = make_games(Settings(n_windows=300, n_moves=12, n_prompt=n_prompt))
    perfect = scores(decoded(Player(), games, n_prompt, "soft"), cups)
    assert perfect["accuracy"] == [1.0] * 12 and perfect["reach"] == 12
    forgetful = scores(decoded(Player(memory=5), games, n_prompt, "standard"), cups)
    assert forgetful["accuracy"][:5] == [1.0] * 5 and forgetful["reach"] == 5
    under_first = [float(np.mean([row[move] == 0 for row in cups.tolist()])) for move in range(5, 12)]
    assert forgetful["accuracy"][5:] == pytest.approx(under_first)


def test_scores_of_hand_made_guesses():
    cups = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 1, 1], [2, 2, 2]])
    result = scores(torch.tensor([[0, 1], [3, 0], [1, 0], [2, 2]]), cups)  # fewer gaps than the games have
    assert result["accuracy"] == [1.0, 0.5] and result["reach"] == 1
    assert scores(cups + 1, cups)["reach"] == 0
    ten = torch.zeros(10, 3, dtype=torch.long)
    guesses = ten.clone()
    guesses[:1, 0], guesses[:2, 1] = 1, 1
    assert scores(guesses, ten)["reach"] == 1  # 0.9 is enough, 0.8 is not, and what comes after does not count


def test_wilson_intervals():  # hand numbers: Newcombe (1998), table of method 3, and 1.96**2 / (n + 1.96**2)
    assert wilson(np.array([0.5, 0.0, 1.0]), 10) == pytest.approx(
        np.array([[0.2366, 0.7634], [0, 0.2775], [0.7225, 1]]), abs=1e-4)
    assert wilson(np.array([81 / 263]), 263) == pytest.approx(np.array([[0.2553, 0.3662]]), abs=1e-4)


@pytest.mark.parametrize("played, longest", [("ss1rrrr2s", 4), ("sssss1r2r", 5), ("s1r2rrr", 3), ("rrs", 3)])
def test_the_longest_gap_of_a_text(played, longest):
    assert longest_gap(np.array([SYMBOLS.index(char) for char in played], dtype=np.uint16)) == longest


def naive(model, row: list[int], n_prompt: int, feedback: bool) -> list[int]:
    """The guesses after each move of one game, by running the stack anew over all inputs so far; from the weights."""
    E = model.embedding.weight
    inputs, guesses = [E[token] for token in row[:n_prompt]], []
    for token in row[n_prompt:]:
        h = model.stack(torch.stack(inputs)[None])[0, -1]
        e = E[token]
        if feedback:
            normed = e / (e.pow(2).mean() + 1e-6).sqrt() * model.input_norm.weight
            inputs.append((model.fusion.W_H.weight @ h) * torch.sigmoid(model.fusion.W_G.weight @ normed))
        else:
            inputs.append(e)
        logits = E @ model.stack(torch.stack(inputs)[None])[0, -1]
        guesses.append(int(logits[:5].argmax()))
    return guesses


@torch.no_grad()
@pytest.mark.parametrize("n_prompt", [1, 4])
def test_decoding_and_reading_equal_a_naive_loop(runs, n_prompt):
    model, _ = load_model(runs["full"])
    games, _ = make_games(Settings(n_windows=20, n_moves=T - n_prompt, n_prompt=n_prompt))
    standard, soft = ([naive(model, row, n_prompt, feedback) for row in games.tolist()] for feedback in (False, True))
    assert decoded(model, games, n_prompt, "standard").tolist() == standard
    assert decoded(model, games, n_prompt, "soft").tolist() == soft != standard
    assert read(model, games, n_prompt, 1).tolist() == standard  # one pass is an ordinary prefill
    exact = [naive(model, row, 1, True)[n_prompt - 1:] for row in games.tolist()]
    assert read(model, games, n_prompt, T).tolist() == exact  # as many passes as positions: the recurrence
    assert decoded(model, games, n_prompt, "fused", prefill_passes=n_prompt).tolist() == exact
    longer, _ = make_games(Settings(n_windows=20, n_moves=T + 20, n_prompt=n_prompt))
    assert read(model, longer, n_prompt, 2).shape == (20, T - n_prompt)
    assert decoded(model, longer, n_prompt, "soft").shape == (20, T + 20)


def measure(data, tmp_path, *words) -> dict:
    assert state_tracking.main([*words, f"--data_dir={data}", f"--results_dir={tmp_path}/new/results"]) == 0
    assert (tmp_path / "new/results/state_tracking.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((tmp_path / "new/results/state_tracking.json").read_text())


def test_the_experiment(runs, data, tmp_path, capsys, monkeypatch):
    figures, savefig = [], Figure.savefig

    def keep(figure, *args, **kwargs):
        figures.append(figure)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    result = measure(data, tmp_path, runs["plain"], runs["full"], "--n_windows=40", "--n_moves=20", "--passes=2,4")
    assert result["chance"] == 0.2 and result["games"] == 40 and result["settings"]["n_moves"] == 20
    plain, full = result["checkpoints"].values()
    assert list(plain["modes"]) == ["standard"]
    assert list(full["modes"]) == ["standard", "soft", "2 passes", "4 passes"]
    assert [len(scored["accuracy"]) for scored in full["modes"].values()] == [20, 20, T - 1, T - 1]
    trained_on = text(6000)[:5400]
    gaps = "".join("|" if char.isdigit() else char for char in trained_on).split("|")
    assert full["longest_gap"] == plain["longest_gap"] == max(map(len, gaps)) and full["block_size"] == T
    games, cups = make_games(Settings(n_windows=40, n_moves=20))
    model, _ = load_model(runs["full"])
    with torch.no_grad():
        right = [[guess == cup for guess, cup in zip(naive(model, row[:T], 1, True), truth)]
                 for row, truth in zip(games.tolist(), cups.tolist())]
    assert full["modes"]["soft"]["accuracy"][:T - 1] == pytest.approx(np.mean(right, axis=0).tolist())
    low, high = full["modes"]["soft"]["interval"][3]
    assert low < full["modes"]["soft"]["accuracy"][3] < high

    printed = capsys.readouterr().out.splitlines()
    header, _, first, soft, *_ = printed[:1] + printed[1:3] + printed[4:]
    assert [cell.strip() for cell in header.split("|")[1:-1]] == [
        "run", "mode", "gap 1", "gap 2", "gap 4", "gap 8", "gap 16", "gap 20", "reach"]
    cells = [cell.strip() for cell in soft.split("|")[1:-1]]
    accuracy = full["modes"]["soft"]["accuracy"]
    assert cells[1:] == ["soft", *(f"{accuracy[gap - 1]:.3f}" for gap in (1, 2, 4, 8, 16, 20)),
                         str(full["modes"]["soft"]["reach"])]
    assert first.split("|")[2].strip() == "standard"

    left, right_panel = figures[0].axes
    curves = {line.get_label().split(", ")[-1]: line for line in left.lines if ", " in str(line.get_label())}
    assert list(curves["Soft"].get_xdata()) == list(range(1, 21)) and list(curves["Soft"].get_ydata()) == accuracy
    straight = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in left.lines}
    assert straight["chance"][1] == [0.2, 0.2] and straight["block_size"][0] == [T, T]
    assert straight["longest gap trained on"][0] == [full["longest_gap"]] * 2 and left.get_xscale() == "log"
    passes = {line.get_label(): list(line.get_ydata()) for line in right_panel.lines}
    assert passes["4 passes"] == full["modes"]["4 passes"]["accuracy"]
    assert passes["1 pass, plain"] == full["modes"]["standard"]["accuracy"][:T - 1]


def test_fused_differs_from_soft_after_a_longer_prompt(runs, data, tmp_path):
    words = ("--n_windows=30", "--n_moves=6", "--n_prompt=8", "--passes=2")
    (once,) = measure(data, tmp_path, runs["full"], *words)["checkpoints"].values()
    (often,) = measure(data, tmp_path, runs["full"], *words, "--prefill_passes=8")["checkpoints"].values()
    assert list(once["modes"]) == ["standard", "soft", "fused", "2 passes"]
    games, cups = make_games(Settings(n_windows=30, n_moves=6, n_prompt=8))
    model, _ = load_model(runs["full"])
    with torch.no_grad():
        exact = np.array([naive(model, row, 1, True)[7:] for row in games.tolist()])
    assert often["modes"]["fused"]["accuracy"] == pytest.approx((exact == cups.numpy()).mean(0).tolist())
    assert once["modes"]["fused"]["accuracy"] != often["modes"]["fused"]["accuracy"]  # eight passes are exact, two not


def test_plain_runs_alone_need_one_panel(runs, data, tmp_path):
    result = measure(data, tmp_path, runs["plain"], "--n_windows=5", "--n_moves=3", "--n_prompt=2")
    figure = Figure()
    draw(figure, result["checkpoints"])
    assert len(figure.axes) == 1


def refused(*words) -> str:
    with pytest.raises(UserError) as error:
        state_tracking.main(list(words))
    return str(error.value)


def test_mistakes_are_named(runs, data, corpus, tiny_run, tmp_path):
    place = (f"--data_dir={data}", f"--results_dir={tmp_path}/none")
    assert "name at least one checkpoint" in refused(*place)
    other = refused(tiny_run, f"--data_dir={corpus}", place[1])
    assert other.startswith(f"{tiny_run} was not trained on the shell game") and "prepare.py cups" in other
    assert f"--n_prompt={T}" in refused(runs["full"], f"--n_prompt={T}", *place)
    assert f"at most {T - 1}" in refused(runs["full"], f"--n_prompt={T}", *place)
    for word, named in {"n_moves=0": "n_moves=0", "n_prompt=0": "n_prompt=0", "prefill_passes=0": "prefill_passes=0",
                        "passes=1,2": "passes=[1, 2]", "n_windows=0": "n_windows=0", "seed=-1": "seed=-1"}.items():
        assert named in refused(runs["full"], f"--{word}", *place)
    assert not Path(tmp_path, "none").exists()
