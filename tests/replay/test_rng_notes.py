"""Notes of random state, step after step."""

import random

import numpy as np
import pytest
import torch

from nanstop.numerics import generator_notes
from nanstop.replay.rng import RngNotes, note_rng, restore_rng

_DRAWS = (
    lambda: torch.rand(3),
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.getrandbits(32 * 624),
    np.random.rand,
    np.random.randn,
    lambda: np.random.permutation(5),
    lambda: np.random.bytes(4 * 624),
    lambda: (random.seed(3), np.random.seed(3)),
)


def _values():
    pair = (torch.rand(2).tolist(), random.random(), random.gauss(0, 1), random.gauss(0, 1))
    return (*pair, np.random.rand(), np.random.randn(), np.random.randn())


def test_a_note_puts_back_what_the_state_was():
    draw, notes = random.Random(0), RngNotes()
    for _ in range(300):
        if draw.random() < 0.7:
            draw.choice(_DRAWS)()
        noted, present = notes.note(), note_rng()
        first = _values()
        restore_rng(noted)
        assert first == _values()
        restore_rng(present)


def test_what_has_not_moved_is_not_copied_again():
    notes = RngNotes()
    first, second = notes.note(), notes.note()
    assert second.python is first.python
    assert second.numpy is first.numpy
    random.gauss(0, 1)
    np.random.randn()
    third = notes.note()
    assert third.python is not first.python
    assert third.numpy is not first.numpy
    np.random.randn()  # the second of the pair that the first draw has made: no word is drawn
    assert notes.note().numpy is not third.numpy


def test_a_generator_that_cannot_be_told_by_its_memory_is_copied_each_time(monkeypatch):
    monkeypatch.setattr(generator_notes, "memory_of", lambda _: None)
    notes = RngNotes()
    assert notes.note().numpy is not notes.note().numpy


@pytest.mark.parametrize("bits", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_every_draw_of_a_generator_shows_in_its_memory(bits):
    one = np.random.RandomState(getattr(np.random, bits)(1))
    choice = random.Random(2).choice
    for _ in range(2000):
        before, state = generator_notes.memory_of(one), one.get_state(legacy=False)
        draw = choice((one.rand, one.randn, lambda: one.randint(5), lambda: one.bytes(1)))
        draw()
        assert (
            before is None
            or (before != generator_notes.memory_of(one))
            or (str(state) == str(one.get_state(legacy=False)))
        )


def test_another_class_of_generators_is_not_known():
    class Counted(random.Random):
        pass

    assert generator_notes.memory_of(Counted()) is None
    assert generator_notes.memory_of(np.random.default_rng()) is None
    assert generator_notes.memory_of(None) is None
