"""The remedies that a window was redone under, and is run again under from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

from nanstop.records import Atom
from nanstop.replay.step import Batch, ModelView


class WindowRemedies:
    """Remedies by micro-batch. Without any, nothing is imported."""

    def __init__(self) -> None:
        self._atoms: dict[int, tuple[Atom, ...]] = {}

    def add(self, atoms: Mapping[int, tuple[Atom, ...]]) -> tuple[Atom, ...]:
        """Add remedies, each once.

        Return those that are to be on until the update in place of being added.
        """
        if not any(atoms.values()):
            return ()
        from nanstop.remedies.apply import until_update

        standing = until_update(chain.from_iterable(atoms[micro] for micro in sorted(atoms)))
        for micro, new in atoms.items():
            every = dict.fromkeys((*self._atoms.get(micro, ()), *new))
            self._atoms[micro] = tuple(atom for atom in every if atom not in standing)
        return standing

    @property
    def left_out(self) -> frozenset[int]:
        """Micro-batches of the window that a remedy leaves out."""
        if not any(self._atoms.values()):
            return frozenset()
        from nanstop.remedies.data import dropped_micros

        return dropped_micros(tuple(chain.from_iterable(self._atoms.values())))

    def under(self, view: ModelView, micro: int) -> AbstractContextManager[Any]:
        """Return a context in which the remedies of a micro-batch are applied."""
        return under(view, self._atoms.get(micro, ()))

    def rebatched(self, batch: Batch, micro: int) -> Batch | None:
        """Return a batch without the samples that are left out, None where none is."""
        atoms = self._atoms.get(micro, ())
        if not any(atom.remedy == "drop_sample" for atom in atoms):
            return None
        from nanstop.remedies.data import rebatch

        return rebatch(batch, atoms, micro=micro)


def under(view: ModelView, atoms: Sequence[Atom]) -> AbstractContextManager[Any]:
    """Return a context in which remedies are applied; without any, nothing is imported."""
    if not atoms:
        return nullcontext()
    from nanstop.remedies.apply import applied

    return applied(view, atoms)
