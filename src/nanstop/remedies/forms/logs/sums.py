"""Sums of positive numbers by their logarithms: running ones, and those of groups that an index
names, as a softmax over the edges of each node has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.logs import weighted
from nanstop.remedies.forms.logs.shadows import Shadow

BY_GROUP = {"index_add": "source", "scatter_add": "src", "scatter_reduce": "src"}
"""Sums into what there is, by an index, and what their numbers are called."""


def running_sum(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    first, dim = shadows[0], call.argument(1, "dim")
    if first is None or not isinstance(dim, int):
        return None
    if first.factor is not None:
        return weighted.running_sum(first, dim)
    return Shadow(lambda: torch.logcumsumexp(first.log(), dim))


def sum_by_group(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return what follows a sum into zeros, or into what is followed, before it is made: it may be
    made in place.
    """
    into, added = [*shadows, None, None][:2]
    base, dim, index = call.read, call.argument(1, "dim"), call.argument(2, "index")
    is_sum = call.argument(4, "reduce", "sum") in ("sum", 1) and call.kwargs.get("alpha", 1) == 1
    is_whole = is_sum and call.argument(5, "include_self", default=True)
    if base is None or added is None or not isinstance(index, Tensor) or not is_whole:
        return None
    if into is None and (base.requires_grad or bool((base < 0).any())):
        return None
    known = None if into is not None else torch.log(base)

    def log() -> Tensor:
        largest = into.log() if into is not None else known
        assert largest is not None
        return _log_by_group(largest, dim, index, added.log())

    return Shadow(log)


def _log_by_group(base: Tensor, dim: Any, index: Tensor, added: Tensor) -> Tensor:
    """Return the logarithm of a sum by groups, each less the largest of its group."""
    if index.dim() < added.dim():  # one index for all that lies beside it
        shape = [-1 if place == dim % added.dim() else 1 for place in range(added.dim())]
        index = index.view(shape).expand_as(added)
    added = added[tuple(slice(size) for size in index.shape)]
    with torch.no_grad():
        largest = base.scatter_reduce(dim, index, added, "amax")
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
    shares = torch.exp(added - largest.gather(dim, index))
    total = torch.exp(base - largest).scatter_add(dim, index, shares)
    empty = total == 0
    return torch.log(total.masked_fill(empty, 1.0)).masked_fill(empty, -torch.inf) + largest


def log_matmul(left: Tensor, right: Tensor) -> Tensor:
    rows = left.unsqueeze(-2) if left.dim() == 1 else left
    columns = right.unsqueeze(-1) if right.dim() == 1 else right
    found = torch.logsumexp(rows.unsqueeze(-1) + columns.unsqueeze(-3), -2)
    found = found.squeeze(-1) if right.dim() == 1 else found
    return found.squeeze(-1 if right.dim() == 1 else -2) if left.dim() == 1 else found
