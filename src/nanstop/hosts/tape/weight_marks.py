"""Whether weights or their gradients were changed, told without looking at them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from nanstop.numerics.tensors import by_torch_alone

_MOST = 64
_MOST_GRADIENTS = 8


class WeightMarks:
    """Marks of a module's trainable weights, or of their gradients, which differ once they were
    written or replaced.

    Versions and addresses.

    Of many weights a part is looked at, evenly spread:
    what changes them in this way changes all or most of them.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, list[ref[Tensor]]] = WeakKeyDictionary()

    def of(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Return the marks of now. No device work."""
        with by_torch_alone():
            weights = [one() for module in modules for one in self._weights(module)]
            return [None if one is None else (one._version, one.data_ptr()) for one in weights]

    def of_gradients(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Return the marks of their gradients as they are now. No device work."""
        marks: list[Any] = []
        with by_torch_alone():
            for module in modules:
                weights = self._weights(module)
                for one in weights[:: 1 + len(weights) // _MOST_GRADIENTS]:
                    weight = one()
                    gradient = weight.grad if weight is not None else None
                    marks.append(None if gradient is None else (id(gradient), gradient._version))
        return marks

    def _weights(self, module: nn.Module) -> list[ref[Tensor]]:
        if module not in self._known:
            plain = [p for p in module.parameters() if p.requires_grad and type(p) is nn.Parameter]
            self._known[module] = [ref(p) for p in plain[:: 1 + len(plain) // _MOST]]
        return self._known[module]
