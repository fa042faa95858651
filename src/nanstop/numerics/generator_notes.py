"""Whether a generator of random numbers has moved, told without copying its state.

Asking Python for the state of its default generator takes 7 us, asking NumPy 24 us, and most steps
draw of neither. Where a generator keeps its whole state in its own object, the bytes of that object
change with each draw. Whether it does is not taken from how the library lays it out: it is tried
with a generator of the same class.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from ctypes import string_at
from functools import cache
from typing import Any

_HEADER = object.__basicsize__
"""Bytes at the start of an object that count references to it."""
_WORDS = 624
"""After so many words of 32 bits a Mersenne Twister is at the same place in another table."""


class GeneratorNotes:
    """The last note of a default generator, and how its memory looked then."""

    def __init__(self) -> None:
        self._memory: tuple[Any, ...] | None = None
        self._state: Any = None

    def note(self, get_state: Callable[[], Any]) -> Any:
        """Return what ``get_state``, a method of the generator's, returns: the very object of the
        last note where the generator has not moved.
        """
        memory = memory_of(getattr(get_state, "__self__", None))
        if memory is None or memory != self._memory:
            self._memory, self._state = memory, get_state()
        return self._state


def memory_of(generator: Any) -> tuple[Any, ...] | None:
    """Return what differs as soon as a generator's state does; None where that is not known."""
    kind = type(generator)
    if kind is random.Random:
        return (_bytes(generator), generator.gauss_next) if _tells_of_python() else None
    numpy = sys.modules.get("numpy.random")
    if numpy is None or kind is not numpy.RandomState:
        return None
    bits = generator._bit_generator
    return (_bytes(generator), _bytes(bits)) if _tells_of_numpy(kind, type(bits)) else None


def _bytes(one: Any) -> bytes:
    return string_at(id(one) + _HEADER, type(one).__basicsize__ - _HEADER)


@cache
def _tells_of_python() -> bool:
    one = random.Random(0)
    draws = (one.random, lambda: one.getrandbits(32 * _WORDS), one.random)
    return _is_told(lambda: _bytes(one), draws)


@cache
def _tells_of_numpy(kind: Any, bits: Any) -> bool:
    one = kind(bits(0))
    draws = (one.normal, one.normal, one.random, lambda: one.bytes(4 * _WORDS))
    return _is_told(lambda: (_bytes(one), _bytes(one._bit_generator)), draws)


def _is_told(memory: Callable[[], Any], draws: tuple[Callable[[], Any], ...]) -> bool:
    """Return whether memory stays the same between draws and is another after each of them. Other
    implementations of Python have objects elsewhere than at their id.
    """
    if sys.implementation.name != "cpython":
        return False
    for draw in draws:
        before = memory()
        if memory() != before:
            return False
        draw()
        if memory() == before:
            return False
    return True
