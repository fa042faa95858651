"""Notes of random state that take over what has not moved."""

import random

import numpy as np

from nanstop.replay.rng import RngNotes

MOVES = (
    lambda: None,
    np.random.rand,
    np.random.randn,
    lambda: np.random.seed(3),
    lambda: np.random.permutation(5),
)


def test_a_note_of_numpy_is_its_state_whatever_was_drawn_before():
    draw, notes = random.Random(0), RngNotes()
    for _ in range(300):
        draw.choice(MOVES)()
        noted, now = notes.note().numpy, np.random.get_state()
        assert noted[0] == now[0]
        assert (noted[1] == now[1]).all()
        assert noted[2:] == now[2:]


def test_what_has_not_moved_is_one_object_in_both_notes():
    np.random.seed(0)
    notes = RngNotes()
    first, second = notes.note(), notes.note()
    assert first.python is second.python
