"""Whether weights or their gradients were changed, told without looking at them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from nanstop.frozen import frozen
from nanstop.numerics.tensors import by_torch_alone
from nanstop.numerics.trained import gradients_held, without_none

_MOST = 64
_MOST_GRADIENTS = 8
_VERSION, _ADDRESS = attrgetter("_version"), methodcaller("data_ptr")


class WeightMarks:
    """Marks of a module's trainable weights, or of their gradients, which differ once they were
    written or replaced.

    Versions and addresses.

    Of many weights a part is looked at, evenly spread:
    what changes them in this way changes all or most of them.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, _Sample] = WeakKeyDictionary()

    def of(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Return the marks of now. No device work."""
        with by_torch_alone():
            refs = chain.from_iterable([self._sample(module).weights for module in modules])
            weights = list(without_none(map(ref.__call__, refs)))
            return [*map(_VERSION, weights), *map(_ADDRESS, weights)]

    def of_gradients(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Return the marks of their gradients as they are now; none where there are none. No device
        work.
        """
        with by_torch_alone():
            refs = chain.from_iterable([self._sample(one).with_gradients for one in modules])
            gradients = gradients_held(without_none(map(ref.__call__, refs)))
            return [*map(id, gradients), *map(_VERSION, gradients)]

    def _sample(self, module: nn.Module) -> _Sample:
        known = self._known.get(module)
        if known is None:
            plain = [p for p in module.parameters() if p.requires_grad and type(p) is nn.Parameter]
            refs: list[ref[Tensor]] = [ref(p) for p in plain[:: 1 + len(plain) // _MOST]]
            fewer = refs[:: 1 + len(refs) // _MOST_GRADIENTS]
            known = self._known[module] = _Sample(refs, fewer)
        return known


@frozen
class _Sample:
    """``with_gradients``: the weights whose gradients are looked at."""

    weights: list[ref[Tensor]]
    with_gradients: list[ref[Tensor]]
