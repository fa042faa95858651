"""Random state of Python, NumPy and every torch device, noted and put back."""

from __future__ import annotations

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


def note_rng(python: tuple[Any, ...] = ()) -> RngState:
    """Return the state of every default generator. No device synchronisation. ``python``: an
    earlier state of Python's, which is the one that is held where it is the present one.
    """
    numpy, present = sys.modules.get("numpy"), random.getstate()
    return RngState(
        torch=torch.get_rng_state(),
        python=python if present == python else present,
        numpy=numpy.random.get_state() if numpy is not None else None,
        devices=random_states(),
    )


class RngNotes:
    """Notes of one run's random state, step after step: Python's, 20 KB of numbers that seldom
    change, is shared between them.
    """

    def __init__(self) -> None:
        self._python: tuple[Any, ...] = ()

    def note(self) -> RngState:
        """Return what ``note_rng`` returns. No device synchronisation."""
        noted = note_rng(self._python)
        self._python = noted.python
        return noted


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
