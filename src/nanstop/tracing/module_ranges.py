"""Ranges of what a model's modules read and put out, taken in a forward of the run itself.

Hooks on all modules are on for one forward and only read: a minimum and a maximum of each value,
which stay on the device until they are asked for. They are global ones, so nothing is on the model
when it is saved or copied. What a module computes inside, and never gives to another module, is not
seen (attention scores under a fused kernel).
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from nanstop.frozen import frozen
from nanstop.numerics.graph import nodes_behind
from nanstop.numerics.tensors import (
    as_numbers,
    by_torch_alone,
    format_limit,
    format_name,
    is_measurable,
)
from nanstop.replay.conditions import eager, inside_transform
from nanstop.replay.step import Step

WHOLE = "the model"
"""The name of the root, which has none."""

MAX_NODES = 50_000
"""Of the graph that is walked: some ten thousand are a model of hundred layers."""

_CASTING = (nn.Linear, nn.modules.conv._ConvNd)
"""Modules whose input autocast converts to the format of their output."""


@frozen
class ModuleEnd:
    """``end``: "input" or "output" of the module;
    ``dtype``: the narrowest format that the value has there.
    """

    module: str
    end: str
    dtype: str


class ModuleRanges:
    """Measures one forward of ``root`` that has gradients on, and is off when it ends.

    ``only``: names of the modules that are measured, all by default. ``formats``: of all that the
    forward computed with a gradient, inside modules too, if that is asked for with ``inside``: a
    hook sees only what modules read and put out. ``seconds``: what measuring took on the host, by
    the ``clock``. Nothing is synchronised before ``read``.
    """

    def __init__(
        self,
        root: nn.Module,
        only: Collection[str] = (),
        *,
        inside: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds = 0.0
        self._clock = clock
        self.partial = bool(only)
        self.formats: frozenset[str] = frozenset()
        self._looks_inside = inside
        self._root = root
        named = ((name or WHOLE, part) for name, part in root.named_modules())
        self._names = {id(part): name for name, part in named if not only or name in only}
        self._handles: list[Any] = []
        self._inside = False
        self._measured: dict[int, weakref.ref[Tensor]] = {}
        self._spots: list[ModuleEnd] = []
        self._values: list[Tensor] = []

    def attach(self) -> None:
        """Measure the next forward."""
        self._handles = [
            hooks.register_module_forward_pre_hook(self._entered),
            hooks.register_module_forward_hook(self._left, always_call=True),
        ]

    def detach(self) -> None:
        """Measure no more; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._measured = {}

    def read(self) -> dict[ModuleEnd, float]:
        """Return the largest size seen at each place, inf where a value was not finite.
        Synchronises the device.
        """
        found: dict[ModuleEnd, float] = {}
        for spot, size in zip(self._spots, as_numbers(self._values), strict=True):
            finite = size if math.isfinite(size) else math.inf
            found[spot] = max(finite, found.get(spot, 0.0))
        return found

    def _entered(self, module: nn.Module, _args: Any) -> None:
        if module is self._root:
            self._inside = torch.is_grad_enabled()

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._is_tracing() or inside_transform():
            return  # a graph is to have none of this, and of a transform nothing is left outside
        name = self._names.get(id(module))
        wanted = self._inside or torch.is_grad_enabled()
        if name is not None and wanted:
            began = self._clock()
            try:
                with torch.no_grad(), by_torch_alone():
                    self._look(name, module, args, output)
                    if module is self._root and self._looks_inside:
                        self.formats = formats_behind(_tensors(output))
            except Exception:  # a value of a kind not foreseen must not end the run
                self.detach()
            self.seconds += self._clock() - began
        if wanted and module is self._root:
            self.detach()

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        given = list(_tensors(output))
        for tensor in given:
            self._measure(ModuleEnd(name, "output", format_name(tensor.dtype)), tensor)
        if next(module.children(), None) is not None:
            return
        for tensor in _tensors(args):
            emits = given[0].dtype if given and isinstance(module, _CASTING) else tensor.dtype
            narrow = min(tensor.dtype, emits, key=format_limit)
            known = self._measured.get(id(tensor))
            if narrow is not tensor.dtype or known is None or known() is not tensor:
                self._measure(ModuleEnd(name, "input", format_name(narrow)), tensor)

    def _measure(self, spot: ModuleEnd, tensor: Tensor) -> None:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a graph would measure at each of its replays
        low, high = torch.aminmax(tensor.detach())
        self._spots.append(spot)
        self._values.append(torch.maximum(high, low.neg()))
        self._measured[id(tensor)] = weakref.ref(tensor)


def module_ranges(step: Step) -> dict[str, float]:
    """Return the largest magnitude of each module's outputs in a step's first micro-batch, by its
    name, in the order in which modules end.

    Infinite where a value was not finite; the largest of all calls of a module in the forward.
    Undone bitwise. Synchronises the device once. Raises what the step raises.
    """
    tap = ModuleRanges(step.view.root)
    with step.isolated(), eager():
        tap.attach()
        try:
            step.run(0)
        finally:
            tap.detach()
    found: dict[str, float] = {}
    for spot, size in tap.read().items():
        if spot.end == "output":
            found[spot.module] = max(size, found.get(spot.module, 0.0))
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the real tensors that can be measured among a module's arguments, or in what it
    returned.
    """
    items = (value,)
    if isinstance(value, Mapping):
        items = tuple(value.values())
    elif isinstance(value, tuple | list):
        items = value
    for item in items:
        if not isinstance(item, Tensor) or not is_measurable(item):
            continue
        if item.is_floating_point() and item.dtype.itemsize > 1:  # 8-bit floats have no reductions
            yield item


def formats_behind(outputs: Iterable[Tensor]) -> frozenset[str]:
    """Return the formats of the floating numbers on the way to ``outputs``, as autograd's graph has
    noted them.

    No device work. What was computed without gradients, or again under reentrant checkpointing, is
    not on this way.
    """
    nodes = islice(nodes_behind(outputs), MAX_NODES)
    inputs = (one for node in nodes for one in getattr(node, "_input_metadata", ()))
    formats = {one.dtype for one in inputs if one.dtype}
    return frozenset(format_name(one) for one in formats if one.is_floating_point)
