"""The shell game as text: a ball under one of five cups, moves of the cups, now and then a look.

    ssrrs3srsrsss5srrsrr3srrs5r1rrsrrsrsr3...

`s` swaps cups 1 and 2; `r` moves every cup one place on and the last one to the front; a digit is a
look: the cup that hides the ball just then. Between looks only the moves tell where the ball is.
The two moves generate all 120 orders of five cups, a group (S5) that is not solvable: a decoder of
fixed depth that may not write is not expected to follow it at any length (Barrington's theorem,
NC1 against TC0), while somebody who remembers the ball's cup, or writes it down, needs one small
step per move.
The gap, the number of moves since the last look, is what makes a look hard to predict.
"""

import random
from collections.abc import Iterator
from itertools import islice

LOOKS = "12345"
MOVES = {  # the ball's cup before -> after
    "s": dict(zip(LOOKS, "21345", strict=True)),
    "r": dict(zip(LOOKS, "23451", strict=True)),
}
SYMBOLS = "".join(sorted([*LOOKS, *MOVES]))
MEAN_GAP = 4  # moves from look to look, on average; geometrically distributed


def play(rng: random.Random, cup: str, mean_gap: int = MEAN_GAP) -> Iterator[str]:
    """Moves and looks without end, of a ball that starts under `cup`."""
    while True:
        move = rng.choice([*MOVES])
        cup = MOVES[move][cup]
        yield move
        if rng.random() < 1 / mean_gap:
            yield cup


def text(n_chars: int = 1_000_000, seed: int = 1, mean_gap: int = MEAN_GAP) -> str:
    """One long game of n_chars characters, to train on; the same for the same arguments."""
    return "".join(islice(play(random.Random(seed), "1", mean_gap), n_chars))


def game(n_prompt: int, n_moves: int, seed: str) -> tuple[str, str]:
    """A game to test with.

    -> its n_prompt + n_moves characters, and the ball's cup after each of the n_moves moves.
    The prompt is cut from a game as in `text` and ends in a look; only moves follow.
    ValueError unless n_prompt >= 1.
    """
    if n_prompt < 1:
        raise ValueError(f"n_prompt={n_prompt} must be at least 1: the prompt ends in a look")
    rng = random.Random(seed)  # a string, and so never a seed of `text`, which are numbers
    stream = play(rng, rng.choice(LOOKS))
    played = []
    while len(played) < n_prompt or played[-1] not in LOOKS:
        played.append(next(stream))
    cup = played[-1]
    cups = []
    moves = rng.choices([*MOVES], k=n_moves)
    for move in moves:
        cup = MOVES[move][cup]
        cups.append(cup)
    return "".join(played[-n_prompt:] + moves), "".join(cups)
