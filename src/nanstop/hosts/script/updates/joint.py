"""Optimizers of one model: those that make updates of the same gradients, as Muon and AdamW do, and
those that take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.numerics.tensors import version
from nanstop.numerics.trained import held_by

_Mark = tuple[int, int] | None


def _mark(parameter: Tensor) -> _Mark:
    """Return what differs once the gradient of a parameter is another one, or was written to."""
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), version(gradient))


class JointUpdates:
    """Which optimizers make updates of the same gradients, as far as was seen. ``known``: all that
    there are. ``are_any``: whether some have.
    """

    def __init__(self, known: WeakKeyDictionary[Optimizer, int]) -> None:
        self.are_any = False
        self._known = known
        self._of: WeakKeyDictionary[Optimizer, list[ReferenceType[Optimizer]]] = WeakKeyDictionary()
        self._left: WeakKeyDictionary[Optimizer, list[_Mark]] = WeakKeyDictionary()

    def note(self, made_by: Sequence[Optimizer]) -> None:
        """Note those that have made updates of one window."""
        known = set(map(id, self.of(made_by[0])))
        if known.issuperset(map(id, made_by)):
            return
        together = {id(one): one for other in made_by for one in self.of(other)}
        for one in together.values():
            self._of[one] = list(map(ref, together.values()))
        self.are_any = True

    def of(self, optimizer: Optimizer) -> list[Optimizer]:
        """Return an optimizer and those that were seen to make updates together with it."""
        found = (one() for one in self._of.get(optimizer, ()))
        return [one for one in found if one is not None] or [optimizer]

    def left_out(self, optimizer: Optimizer) -> None:
        """Note that an update was left out: the gradients that it was to take are none of the next
        window's, as long as nobody writes to them.
        """
        self._left[optimizer] = list(map(_mark, held_by(optimizer)))

    def held_beside(self, optimizer: Optimizer) -> list[Tensor]:
        """Return what the others of them hold, but what has the gradient of an update that was left
        out.
        """
        others = [one for one in self.of(optimizer) if one is not optimizer]
        return [p for one in others for p in self._with_new_gradients(one)]

    def _with_new_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        held, left = held_by(optimizer), self._left.get(optimizer)
        if left is None or len(left) != len(held):
            return held
        return [p for p, mark in zip(held, left, strict=True) if mark is None or _mark(p) != mark]

    def others(self, root: nn.Module, optimizer: Optimizer) -> tuple[Optimizer, ...]:
        """Return the other optimizers that train weights of a model, and none of those that this
        one does: what is replaced by it may live on.
        """
        mine, own = set(map(id, held_by(optimizer))), set(map(id, root.parameters()))
        beside = (one for one in list(self._known) if one is not optimizer)
        held = ((one, set(map(id, held_by(one)))) for one in beside)
        return tuple(one for one, its in held if its & own and not its & mine)
