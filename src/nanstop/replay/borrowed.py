"""What a repeated run writes that it did not make is put back:
averaged teachers, memory banks, private generators.

The script's own run has written it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from nanstop.numerics.graph import leaves_of, nodes_behind
from nanstop.numerics.tensors import bytes_of, is_in_place, tensors
from nanstop.replay.function_modes import FunctionMode
from nanstop.replay.untouched import TensorMemory, address, versions_kept

_SET_DATA = cast("Any", Tensor).data.__set__
_MAX_OPAQUE_BYTES = 2**20


class Borrowed(FunctionMode):
    """On exit, tensors that existed before and were written in place hold what they held, and
    generators their state.

    ``own``: tensors that the run may write for good; ``leaves``: those that it may give a gradient.
    Seen is what Python calls; kernels that write what torch does not say are seen where they are
    called through a function of torch that is itself Python (``batch_norm``), for small operands
    without a gradient. Hooks of a backward are not looked into.
    """

    def __init__(self, own: Iterable[Tensor] = (), leaves: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._leaves = {id(leaf) for leaf in leaves}
        self._made = {address(tensor) for tensor in own} | {0}
        self._generators: set[torch.Generator] = set()
        self._undo = ExitStack()

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        for tensor in _written(func, args, kwargs):
            self._hold(tensor)
        if func in (Tensor.backward, torch.autograd.backward):
            self._hold_gradients(tensors(args[:1]))
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and value not in self._generators:
                self._generators.add(value)
                self._undo.callback(value.set_state, value.get_state())
        result = func(*args, **kwargs)
        operands = {address(tensor) for tensor in tensors((args, kwargs))}
        self._made.update(place for t in tensors(result) if (place := address(t)) not in operands)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()

    def _hold_gradients(self, losses: Iterable[Tensor]) -> None:
        for leaf in leaves_of(nodes_behind(losses)):
            if id(leaf) not in self._leaves:
                self._leaves.add(id(leaf))
                self._undo.callback(setattr, leaf, "grad", leaf.grad)
                leaf.grad = None

    def _hold(self, tensor: Tensor) -> None:
        place = address(tensor)
        if place in self._made or tensor.is_inference():
            return
        self._made.add(place)
        self._undo.enter_context(versions_kept([tensor]))
        self._undo.callback(TensorMemory.of(tensor).put_back)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that a call writes, by torch's rule for names, or may write."""
    in_place = is_in_place(getattr(func, "__name__", ""))
    if in_place or func == _SET_DATA or kwargs.get("inplace"):
        yield from tensors(args[:1] or kwargs)
    elif isinstance(func, FunctionType):
        for tensor in tensors((args, kwargs)):
            if not tensor.requires_grad and bytes_of(tensor) <= _MAX_OPAQUE_BYTES:
                yield tensor
    yield from tensors(kwargs.get("out"))
