"""What the graph of a loss says of it ahead of its backward: no device work."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from nanstop.frozen import frozen
from nanstop.numerics.graph import leaves_of, nodes_behind

_MOST_NODES = 4096
"""Nodes of a graph that are looked at for the tensors that it ends in."""
_OF_ONE_NUMBER = ("MulBackward0", "DivBackward0", "NegBackward0")
_VIEW = "ViewBackward0"
_KEY = "nanstop"
LEAST_SCALE = 8.0
"""Factor from which a loss is scaled, not weighted."""
SURELY_SCALE = 1024.0
"""Factor that no temperature of a distillation makes: 16 squared is 256."""
_WHOLE = 1.001
"""Summands over what their sum was divided by: from here on it is no mean."""


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


@frozen
class LossFactor:
    """By what a mean was multiplied to be a loss. ``value``: a scalar on its device where that is
    known there alone, NaN where it turns out to be no mean. ``most``: the largest of the numbers
    that are known on the host. ``is_of_torch``: whether a loss function of torch gave what the mean
    is of, so that nothing was divided below it. ``is_scale``: whether a loss scale is as
    large, and no count.
    """

    value: float | Tensor
    most: float
    is_of_torch: bool = False
    is_scale: bool = False


def loss_factor(losses: Sequence[Tensor]) -> LossFactor | None:
    """Return the number that a mean was multiplied by to be the loss, None where what is below is
    no mean.

    A sum is one where it was divided by as many as it counts, or by more: those of a window.
    """
    node = losses[0].grad_fn if len(losses) == 1 else None
    core, factors = _core(node), list[float | Tensor]()
    while node is not None and node is not core:
        factors.append(_number(node))
        node = next(following for following, _ in node.next_functions if following is not None)
    if core is None:
        return None
    known = [one for one in factors if isinstance(one, float)]
    is_mean = core.name().startswith("MeanBackward") or _reduction(core) == "mean"
    counted = 1.0 if is_mean else _counted(core)
    if counted is None:
        return None
    value = counted
    for one in factors:
        value = value * one
    if not is_mean:
        value = _where_divided(value, [counted * abs(one) for one in factors])
    if isinstance(value, float) and math.isnan(value):
        return None
    most = max([1.0, *map(abs, known)])
    is_scale = isinstance(value, float) and is_mean and _is_scale(value, core)
    return LossFactor(value, most, _is_of_torch(core), is_scale)


def is_scaled_apart(loss: Tensor, held: Iterable[Any], factor: float) -> bool:
    """Return whether among the values ``held`` by the script is what a loss is ``factor`` times of,
    and not the loss: nobody reads the multiple but its backward. Numbers from ``SURELY_SCALE`` on
    are no weight even where the script holds both.
    """
    core, below = _core(loss.grad_fn), set[Any]()
    node = loss.grad_fn
    while node is not None and node is not core:
        node = next(following for following, _ in node.next_functions if following is not None)
        below.add(node)
    nodes = [one.grad_fn for one in held if isinstance(one, Tensor) and one.grad_fn is not None]
    is_alone = factor >= SURELY_SCALE or loss.grad_fn not in nodes
    return is_alone and any(node in below for node in nodes)


def _is_scale(factor: float, core: Any) -> bool:
    """Return whether a number is one by which losses are scaled, a power of 2, and no count of what
    their mean is of: as many rows make a sum of it.
    """
    num = _num_averaged(core)
    is_power = factor >= LEAST_SCALE and math.frexp(factor)[0] == 0.5
    return is_power and num > 0 and num % int(factor) != 0


def _num_averaged(core: Any) -> int:
    """Return how many numbers a mean is of, 0 where its node does not say."""
    sizes = getattr(core, "_saved_self_sym_sizes", None)
    if core.name() == "MeanBackward0" and sizes is not None:
        return math.prod(sizes)
    for name in ("_saved_target", "_saved_self"):
        value = getattr(core, name, None)
        if isinstance(value, Tensor):
            return value.numel()
    return 0


def _is_of_torch(core: Any) -> bool:
    """Return whether a mean is of what a loss function of torch has made of each element."""
    product, mask = _under_mask(core)
    below = _behind(product if mask is not None else core)
    while len(below) == 1 and below[0].name() == _VIEW:
        below = _behind(below[0])
    return bool(_reduction(core)) or any(hasattr(one, "_saved_reduction") for one in below)


def _behind(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def _under_mask(core: Any) -> tuple[Any, Tensor | None]:
    """Return the product that a node sums up of numbers and of a tensor without a gradient, and
    that tensor; None where it sums up something else.
    """
    below = _behind(core)
    if core.name() != "SumBackward0" or not below or below[0].name() != "MulBackward0":
        return None, None
    saved = (getattr(below[0], name, None) for name in ("_saved_self", "_saved_other"))
    given = [one for one in saved if isinstance(one, Tensor) and not one.requires_grad]
    is_one = len(given) == len(_behind(below[0])) == 1
    is_whole = is_one and given[0].shape == tuple(core._saved_self_sym_sizes)
    return (below[0], given[0]) if is_whole else (None, None)


def _kept(mask: Tensor) -> float | Tensor:
    """Return how many numbers a mask of 0 and 1 keeps, of another tensor how many it has."""
    is_mask = ((mask == 0) | (mask == 1)).all()
    kept = mask.sum(dtype=torch.float32).where(is_mask, mask.numel())
    return float(kept) if kept.device.type == "cpu" else kept


def _where_divided(value: float | Tensor, shares: Sequence[float | Tensor]) -> float | Tensor:
    """Return ``value`` where one of ``shares``, a number of summands over a divisor, is 1 or less,
    else NaN.
    """
    if any(isinstance(share, float) and share <= _WHOLE for share in shares):
        return value
    unknown = [share <= _WHOLE for share in shares if isinstance(share, Tensor)]
    if not unknown or not isinstance(value, Tensor):
        return math.nan
    return value.where(torch.stack(unknown).any(), math.nan)


def _counted(core: Any) -> float | Tensor | None:
    """Return how many numbers a node sums up, None where it is no such sum."""
    weight = getattr(core, "_saved_total_weight", None)  # labels that are not ignored
    if _reduction(core) == "sum" and isinstance(weight, Tensor):
        return float(weight) if weight.device.type == "cpu" else weight
    if _reduction(core) == "sum" and isinstance(getattr(core, "_saved_self", None), Tensor):
        return float(core._saved_self.numel())
    _, mask = _under_mask(core)
    if mask is not None:
        return _kept(mask)
    sizes = getattr(core, "_saved_self_sym_sizes", None)
    return float(math.prod(sizes)) if core.name() == "SumBackward0" and sizes else None


def _reduction(core: Any) -> str:
    """Return what a loss of torch makes of its elements."""
    return {1: "mean", 2: "sum"}.get(getattr(core, "_saved_reduction", 0), "")


def _number(node: Any) -> float | Tensor:
    """Return what a node multiplies by: a scalar where that is on a device."""
    if node.name() == "NegBackward0":
        return -1.0
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.dim():
        return math.nan
    known = float(other) if other.device.type == "cpu" else other.detach()
    if node.name() == "MulBackward0":
        return known
    return known.reciprocal() if isinstance(known, Tensor) else 1.0 / (known or math.nan)


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


def left_at_the_end(losses: Sequence[Tensor], held: Collection[int]) -> list[Tensor]:
    """Return the tensors of the last layer of a model, where all that comes before it is held, by
    id, and they are not: one matrix, and a vector at most, that a backward of ``losses`` gives
    gradients to and that are used after everything that is held. Empty else.
    """
    nodes = list(islice(nodes_behind(losses), _MOST_NODES))
    if len(nodes) >= _MOST_NODES:
        return []
    used = dict[int, list[int]]()
    found: dict[int, Tensor] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if isinstance(leaf, Tensor):
                found[id(leaf)] = leaf
                used.setdefault(id(leaf), []).append(node._sequence_nr())
    last = max((max(used[key]) for key in found if key in held), default=None)
    left = [leaf for key, leaf in found.items() if key not in held]
    if last is None or not all(min(used[id(leaf)]) > last for leaf in left):
        return []
    is_layer = sorted(leaf.dim() > 1 for leaf in left) in ([True], [False, True])
    return left if is_layer else []
