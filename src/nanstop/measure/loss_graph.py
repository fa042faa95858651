"""What the graph of a loss says of it ahead of its backward: no device work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any
from weakref import ref

from torch import Tensor

from nanstop.numerics.graph import leaves_of, nodes_behind

_MOST_NODES = 4096
"""Nodes of a graph that are looked at for the tensors that it ends in."""
_OF_ONE_NUMBER = ("MulBackward0", "DivBackward0", "NegBackward0")
_KEY = "nanstop"


class LossMark:
    """A mark on the loss of the last backward that dies with its graph."""

    def __init__(self) -> None:
        self._mark: Callable[[], Any] = lambda: None

    def move(self, losses: Sequence[Tensor]) -> bool:
        """Mark the first of ``losses``; return whether it bore the mark already, but for numbers
        that it was multiplied or divided by since.
        """
        node = _core(losses[0].grad_fn) if losses else None
        if node is None:
            self._mark = lambda: None
            return False
        known = self._mark()
        if known is not None and node.metadata.get(_KEY) is known:
            return True
        mark = _Mark()
        node.metadata[_KEY], self._mark = mark, ref(mark)
        return False


def loss_factor(losses: Sequence[Tensor]) -> float | None:
    """Return the number that a mean was multiplied by to be the loss, None where that is not known:
    what is below is no mean, or the number is a tensor of a device.
    """
    node = losses[0].grad_fn if len(losses) == 1 else None
    factor, core = 1.0, _core(node)
    while node is not None and node is not core:
        factor *= _number(node)
        node = next(following for following, _ in node.next_functions if following is not None)
    is_mean = core is not None and (
        core.name().startswith("MeanBackward") or getattr(core, "_saved_reduction", None) == 1
    )
    return factor if is_mean and not math.isnan(factor) else None


def _number(node: Any) -> float:
    """Return what a node multiplies by, NaN where that is on a device."""
    if node.name() == "NegBackward0":
        return -1.0
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.dim() or other.device.type != "cpu":
        return math.nan
    return float(other) if node.name() == "MulBackward0" else 1.0 / (float(other) or math.nan)


class _Mark:
    """What only the graph of one loss holds."""


def _core(node: Any) -> Any:
    """Return the node whose result the loss is a multiple of."""
    while node is not None and node.name() in _OF_ONE_NUMBER:
        above = [following for following, _ in node.next_functions if following is not None]
        if len(above) != 1:
            break
        node = above[0]
    return node


def leaves(losses: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the tensors that a backward of ``losses`` gives gradients to, None where their graph
    is too large to look at.
    """
    nodes = list(islice(nodes_behind(losses), _MOST_NODES))
    return list(leaves_of(nodes)) if len(nodes) < _MOST_NODES else None
