"""Remedies of computation: the same mathematics by other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nanstop.errors import NanstopError
from nanstop.records import Atom
from nanstop.replay import conditions
from nanstop.replay.step import ModelView


@contextmanager
def attention(view: ModelView, atom: Atom) -> Iterator[None]:
    """Have every layer compute attention with the kernel that the value names inside.

    Errors: ``NanstopError`` where the model has no such switch, or not this kernel.
    """
    before = view.attention()
    if before is None:
        raise NanstopError(f"{atom}: this model has no switch for its attention kernel")
    if atom.value not in (before, *view.attention_choices()):
        raise NanstopError(
            f"{atom}: no such attention kernel here",
            hint=f"one of: {', '.join(view.attention_choices())}",
        )
    view.set_attention(atom.value)
    try:
        yield
    finally:
        view.set_attention(before)


@contextmanager
def eager(_view: ModelView, _atom: Atom) -> Iterator[None]:
    """Have compiled code of this process run as it was written inside: the model's, and every
    other's.
    """
    with conditions.eager():
        yield
