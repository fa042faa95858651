"""A call of ``torch.autograd.grad``: gradients that a script asks for, and makes updates of by
itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanstop.hosts.tape.tape_calls import Cuts
from nanstop.numerics.tensors import by_torch_alone

_NAMES = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
_BATCHED = "is_grads_batched"

Given = list[tuple[Tensor, Tensor]]
"""Gradients, each with a leaf that can hold it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """``inputs``: () of what are no tensors. ``keeps``: whether the graph is there afterwards, so
    that a loss may go on from it. ``arguments``: as they were given, but that nothing among them is
    used up by the call.
    """

    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    keeps: bool
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asked | None:
        """Return what a call asks for, None of what is no gradient of tensors and is as it was."""
        given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        outputs = _several(given.get("outputs"))
        if len(args) > len(_NAMES) or given.get(_BATCHED) or "inputs" not in given or not outputs:
            return None
        if not isinstance(given["inputs"], (Tensor, Mapping, tuple, list)):
            given["inputs"] = tuple(given["inputs"])
        retains = given.get("retain_graph")
        keeps = bool(given.get("create_graph")) if retains is None else bool(retains)
        return cls(outputs, _several(given["inputs"]), keeps, given)

    def given(self, result: Any, cuts: Cuts | None) -> Given:
        """Return each gradient that there is, with a leaf that can hold it: what it is of, or what
        stands for that.
        """
        cuts = cuts or Cuts()
        gradients = result.values() if isinstance(result, Mapping) else result
        with by_torch_alone():
            pairs = zip(self.inputs, gradients, strict=True)
            return [(cuts.leaf(one), gradient) for one, gradient in pairs if gradient is not None]


class KeptAsks:
    """Leaves of which gradients were asked for by a call that keeps the graph: whether an update
    was made of them is seen later. ``num_calls``: how many were recorded up to it.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[weakref.ref[Tensor], int, int]] = []
        self.num_calls = 0

    def note(self, leaves: Sequence[Tensor], calls: Sized) -> None:
        """Note such a call, the last of those that were recorded. No device work."""
        self.num_calls = len(calls)
        with by_torch_alone():
            self._marks = [(weakref.ref(one), one._version, one.data_ptr()) for one in leaves]

    def are_used(self) -> bool:
        """Return whether the leaves of the last one were written to since then; once."""
        marks, self._marks = self._marks, []
        with by_torch_alone():
            kept = [(one(), *mark) for one, *mark in marks]
            return any(
                leaf is not None and (leaf._version, leaf.data_ptr()) != (number, place)
                for leaf, number, place in kept
            )


def _several(value: Any) -> tuple[Tensor, ...]:
    """Return tensors that were given alone or together, () where anything else is among them."""
    entries = value.values() if isinstance(value, Mapping) else value
    entries = (entries,) if isinstance(entries, Tensor) else tuple(entries or ())
    return entries if all(isinstance(entry, Tensor) for entry in entries) else ()


@contextmanager
def lent(pairs: Given) -> Iterator[None]:
    """Have leaves hold gradients inside that the script was given, for whoever reads them there."""
    with by_torch_alone():
        own = [(leaf, leaf.grad) for leaf, _ in pairs]
    try:
        with by_torch_alone():
            for leaf, gradient in pairs:
                leaf.grad = gradient.detach()
        yield
    finally:
        with by_torch_alone():
            for leaf, gradient in own:
                leaf.grad = gradient
