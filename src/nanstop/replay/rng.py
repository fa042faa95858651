"""Random state of Python, NumPy and every torch device, noted and put back."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nanstop.frozen import frozen
from nanstop.numerics.accelerator import random_states, set_random_states


@frozen
class RngState:
    """``torch``: uint8 CPU tensor;
    ``devices``: one tensor for each device of the accelerator in use.
    """

    torch: Tensor
    python: tuple[Any, ...]
    numpy: Any
    devices: tuple[Tensor, ...]


def note_rng() -> RngState:
    """Return the state of every default generator. No device synchronisation."""
    numpy = sys.modules.get("numpy")
    return RngState(
        torch=torch.get_rng_state(),
        python=random.getstate(),
        numpy=numpy.random.get_state(legacy=False) if numpy is not None else None,
        devices=random_states(),
    )


def drawn() -> list[bytes]:
    """Return what differs once a number was drawn from one of torch's default generators. No device
    synchronisation.
    """
    states = (torch.get_rng_state(), *random_states())
    return [state.numpy().tobytes() for state in states]


class RngNotes:
    """Notes of one run's random state, step after step: those of Python and NumPy, 20 KB of numbers
    that seldom change, are read and held once for all notes between which they have not moved.
    """

    def __init__(self) -> None:
        self._python, self._numpy = _PythonNotes(), _NumpyNotes()

    def note(self) -> RngState:
        """Return what ``note_rng`` returns. No device synchronisation."""
        return RngState(
            torch=torch.get_rng_state(),
            python=self._python.state(),
            numpy=self._numpy.state(),
            devices=random_states(),
        )


class _PythonNotes:
    """States of Python's generator.

    Its words are compared as memory: numbers of them take 20 us to make. CPython has them behind
    the head of the object; where they are not there, the numbers are made each time.
    """

    def __init__(self) -> None:
        self._own: Any = getattr(random, "_inst", None)
        self._words = _words_of(self._own)
        self._seen = b""
        self._state: tuple[Any, ...] = ()

    def state(self) -> tuple[Any, ...]:
        words = bytes(self._words) if self._words is not None else b""
        is_same = bool(words) and words == self._seen
        if not (is_same and self._state[-1] == self._own.gauss_next):
            present = random.getstate()
            self._state = self._state if present == self._state else present
            self._seen = words
        return self._state


class _NumpyNotes:
    """States of NumPy's generator.

    Its words are compared as memory, at the address that it gives for compiled code. A half of a
    pair of normal numbers may wait beside them, which nothing tells: then the state is read.
    """

    def __init__(self) -> None:
        self._seen: tuple[Any, bytes] | None = None
        self._state: Any = None

    def state(self) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        seen = _words_in(numpy)
        if seen is None or seen != self._seen or self._state["has_gauss"]:
            self._seen, self._state = seen, numpy.random.get_state(legacy=False)
        return self._state


_WORDS = 625
"""32-bit words of a Mersenne twister (Matsumoto and Nishimura 1998): 624, and the place in them."""


def _words_of(generator: Any) -> Any:
    """Return the memory of the words of Python's generator; None where it is not where CPython has
    it.
    """
    head = object.__basicsize__
    if type(generator).__basicsize__ < head + 4 * _WORDS:
        return None
    words = (ctypes.c_uint32 * _WORDS).from_address(id(generator) + head)
    place, *numbers = words
    return words if (*numbers, place) == generator.getstate()[1] else None


def _words_in(numpy: Any) -> tuple[Any, bytes] | None:
    """Return the generator behind NumPy's own functions and its words; None where it is no Mersenne
    twister, or NumPy (before 1.24) does not say which it is.
    """
    given = getattr(numpy.random, "get_bit_generator", None)
    bits: Any = given() if given is not None else None
    if not isinstance(bits, numpy.random.MT19937):
        return None
    return bits, ctypes.string_at(bits.ctypes.state_address, 4 * _WORDS)


@contextmanager
def rng_kept() -> Iterator[RngState]:
    """Have the state of every default generator on exit as it is now, which is yielded."""
    state = note_rng()
    try:
        yield state
    finally:
        restore_rng(state)


def is_generator(one: Any) -> bool:
    """Return whether an object is a random generator of Python's or NumPy's own."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.RandomState, numpy.random.Generator)
    return isinstance(one, (random.Random, *of_numpy))


@contextmanager
def generators_kept(generators: Iterable[Any]) -> Iterator[None]:
    """Have the state of generators of Python's and NumPy's own classes on exit as it is now."""
    noted = [(one, _state(one)) for one in generators]
    try:
        yield
    finally:
        for one, state in noted:
            _set_state(one, state)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return generator.get_state() if bits is None else bits.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def restore_rng(state: RngState) -> None:
    """Put back what ``note_rng`` returned: Python's state, NumPy's, torch's, the devices'."""
    torch.set_rng_state(state.torch)
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
    set_random_states(state.devices)
