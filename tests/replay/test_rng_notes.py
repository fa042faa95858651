"""Notes of random state that take over what has not moved."""

import random

import numpy as np
import pytest
import torch

from nanstop.replay import rng
from nanstop.replay.rng import RngNotes, restore_rng

MOVES = (
    lambda: None,
    np.random.rand,
    np.random.randn,
    lambda: np.random.seed(3),
    lambda: np.random.permutation(5),
    random.random,
    lambda: random.gauss(0.0, 1.0),
    lambda: random.seed(3),
    lambda: random.setstate(SAVED[0]),
    lambda: (np.random.set_bit_generator(np.random.MT19937()), np.random.set_state(SAVED[1])),
    lambda: np.random.set_bit_generator(np.random.MT19937(5)),
    lambda: np.random.set_bit_generator(np.random.PCG64(5)),
)
SAVED = random.getstate(), np.random.get_state()


@pytest.fixture(autouse=True)
def _numpys_own_generator():
    bits = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(bits)


def same(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return np.array_equal(first, second)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_note_is_the_state_whatever_was_drawn_before(hidden, monkeypatch):
    if hidden:  # another Python, another NumPy
        monkeypatch.setattr(rng, "_words_of", lambda _: None)
        monkeypatch.setattr(rng, "_words_in", lambda _: None)
    draw, notes = random.Random(0), RngNotes()
    for _ in range(600):
        draw.choice(MOVES)()
        noted, now = notes.note(), np.random.get_state(legacy=False)
        assert noted.python == random.getstate()
        assert same(noted.numpy, now)


def test_what_was_drawn_after_a_note_is_drawn_again():
    notes = RngNotes()
    for _ in range(40):
        noted = notes.note()
        draws = [(random.gauss(0, 1), np.random.randn(), float(torch.rand(()))) for _ in range(3)]
        restore_rng(noted)
        assert draws == [
            (random.gauss(0, 1), np.random.randn(), float(torch.rand(()))) for _ in range(3)
        ]
        if random.random() < 0.5:
            np.random.randn()


def test_what_has_not_moved_is_one_object_in_both_notes():
    np.random.seed(0)
    notes = RngNotes()
    first, second = notes.note(), notes.note()
    assert first.python is second.python
    assert first.numpy is second.numpy


def test_no_numbers_are_made_of_what_has_not_moved(monkeypatch):
    notes = RngNotes()
    np.random.seed(0)
    notes.note()

    def refused(*_):
        raise AssertionError("read")

    monkeypatch.setattr(random, "getstate", refused)
    monkeypatch.setattr(np.random, "get_state", refused)
    notes.note()
