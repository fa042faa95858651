"""What a call of the step has made that no replay makes again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from nanstop.numerics.tensors import by_torch_alone, tensors


class Unrepeated:
    """Results of models that were not recorded, of draws, and whatever is made of these.

    A replay takes them as they are, like data; but they are none. ``made``: empty in most scripts.
    """

    def __init__(self) -> None:
        self.made: dict[int, weakref.ref[Tensor]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        known = self.made.get(id(tensor))
        return known is not None and known() is tensor

    def note(self, result: Any) -> None:
        """Note what such a call has returned."""
        for tensor in (result,) if isinstance(result, Tensor) else tensors(result):
            self.made[id(tensor)] = weakref.ref(tensor)

    def follow(
        self, given: Iterable[Any], result: Any, *, known: Callable[[Tensor], object] | None
    ) -> None:
        """Note what an op that was not recorded has returned, where it was given parameters or
        what is noted, or, of one that draws, what is ``known``.
        """
        if not self.made and known is None and not any(isinstance(x, nn.Parameter) for x in given):
            return
        with by_torch_alone():
            read = tensors(list(given))
            drawn = known is not None and any(known(tensor) is not None for tensor in read)
            if drawn or any(isinstance(x, nn.Parameter) or x in self for x in read):
                self.note(result)
