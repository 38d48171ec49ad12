"""cups.py against a table with five cups on it, moved by hand."""

import random
from itertools import pairwise

import pytest

from corpora.cups import LOOKS, MOVES, SYMBOLS, game, text


class Table:
    """Five cups in a row; one of them holds the ball."""

    def __init__(self, look: str):
        self.row = ["ball" if place == int(look) else "" for place in range(1, 6)]

    def move(self, move: str) -> None:
        if move == "s":
            first, second, *rest = self.row
            self.row = [second, first, *rest]
        else:
            assert move == "r"
            self.row = [self.row[-1], *self.row[:-1]]

    def look(self) -> str:
        return str(self.row.index("ball") + 1)


def follow(played: str) -> int:
    """Plays a text from its first look on and compares every later look with the table.

    -> how many looks there were.
    """
    start = next(place for place, char in enumerate(played) if char.isdigit())
    table, looks = Table(played[start]), 1
    for char in played[start + 1 :]:
        if char.isdigit():
            assert char == table.look()
            looks += 1
        else:
            table.move(char)
    return looks


def test_the_looks_of_a_text_are_where_the_ball_is():
    played = text(200_000, seed=3)
    assert len(played) == 200_000
    assert (
        39_500 < follow(played) < 40_500
    )  # a look a mean gap of four moves: a fifth of the characters
    assert not any(a.isdigit() and b.isdigit() for a, b in pairwise(played))
    assert abs(played.count("s") - played.count("r")) < 1500
    gaps = [
        len(gap)
        for gap in "".join("|" if char.isdigit() else char for char in played).split("|")[1:-1]
    ]
    assert abs(sum(gaps) / len(gaps) - 4) < 0.1
    for least in (1, 2, 4, 8):  # geometric: each gap goes on with three chances in four
        longer = [gap for gap in gaps if gap >= least]
        assert abs(sum(gap > least for gap in longer) / len(longer) - 0.75) < 0.025
    assert max(gaps) > 20
    counts = [played.count(look) for look in "12345"]
    assert min(counts) > 0.95 * max(counts)  # without what came before, every cup is as likely


def test_a_text_is_a_function_of_its_seed():
    assert text(60) == "ssrrs3srsrsss5srrsrr3srrs5r1rrsrrsrsr3srsrrsssrrrssssrsrrsrs"
    assert text(60, seed=2) != text(60) == text(60, seed=1) == text(90)[:60]
    random.seed(5)
    assert text(60) == text(60, seed=1)  # not of the global generator


def test_the_moves_make_all_orders_of_five_cups():
    assert sorted(SYMBOLS) == list(SYMBOLS) == ["1", "2", "3", "4", "5", "r", "s"]
    orders, new = set(), {tuple(LOOKS)}
    while new:
        orders |= new
        new = {
            tuple(move[cup] for cup in order) for order in new for move in MOVES.values()
        } - orders
    assert len(orders) == 120
    one_way, other_way = (tuple(MOVES[b][MOVES[a][cup]] for cup in LOOKS) for a, b in ("sr", "rs"))
    assert one_way != other_way


@pytest.mark.parametrize("n_prompt, n_moves", [(1, 1), (1, 40), (2, 7), (16, 64), (300, 5)])
def test_a_game_is_a_prompt_that_ends_in_a_look_and_then_moves_alone(n_prompt, n_moves):
    for seed in range(20):
        played, cups = game(n_prompt, n_moves, f"{seed}")
        assert len(played) == n_prompt + n_moves and len(cups) == n_moves
        prompt, moves = played[:n_prompt], played[n_prompt:]
        assert prompt[-1] in "12345" and set(moves) <= {"s", "r"}
        follow(prompt)
        table = Table(prompt[-1])
        for move, cup in zip(moves, cups, strict=True):
            table.move(move)
            assert table.look() == cup


def test_games_differ_by_seed_and_start_under_every_cup():
    games = [game(1, 30, f"{seed}") for seed in range(200)]
    assert len(set(games)) == 200 and games[:3] == [game(1, 30, f"{seed}") for seed in range(3)]
    first = [played[0] for played, _ in games]
    assert all(20 < first.count(look) < 60 for look in "12345")
    moves = "".join(played[1:] for played, _ in games)
    assert abs(moves.count("s") - moves.count("r")) < 300
    assert len({played for played, _ in (game(12, 0, f"{seed}") for seed in range(50))}) == 50


def test_a_game_without_a_look_is_refused():
    with pytest.raises(ValueError, match="n_prompt=0 must be at least 1"):
        game(0, 5, "x")
