"""Optimizers that make their updates of the same gradients, as Muon and AdamW of one model."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor
from torch.optim import Optimizer

from nanstop.numerics.trained import held_by


class JointUpdates:
    """Which optimizers have done so. ``are_any``: whether some have."""

    def __init__(self) -> None:
        self.are_any = False
        self._of: WeakKeyDictionary[Optimizer, list[ReferenceType[Optimizer]]] = WeakKeyDictionary()

    def note(self, made_by: Sequence[Optimizer]) -> bool:
        """Note those that have made updates of one window; return whether that is new of some."""
        known = set(map(id, self.of(made_by[0])))
        if known.issuperset(map(id, made_by)):
            return False
        together = {id(one): one for other in made_by for one in self.of(other)}
        for one in together.values():
            self._of[one] = list(map(ref, together.values()))
        self.are_any = True
        return True

    def of(self, optimizer: Optimizer) -> list[Optimizer]:
        """Return an optimizer and those that were seen to make updates together with it."""
        found = (one() for one in self._of.get(optimizer, ()))
        return [one for one in found if one is not None] or [optimizer]

    def held_beside(self, optimizer: Optimizer) -> list[Tensor]:
        """Return what the others of them hold."""
        return [p for one in self.of(optimizer) if one is not optimizer for p in held_by(one)]
