"""What the logarithm of a number becomes where the number is moved, chosen, joined with another one
or summed: the logarithm of each function's result, without the result itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.logs import weighted
from nanstop.remedies.forms.logs.shadows import (
    Log,
    Shadow,
    cosh_from,
    erf_from,
    erfc_from,
    exp_from,
    expm1_from,
    i0_from,
    ndtr_from,
    sigmoid_from,
    softmax_from,
    softplus_from,
    tanh_from,
)
from nanstop.remedies.forms.logs.sums import BY_GROUP, log_matmul, running_sum, sum_by_group

_MOST_LOOKED_AT = 2**20
"""Elements of a tensor whose sign is looked at."""


def _where(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return the shadow of one of two numbers, as a condition says."""
    first, second = [*shadows, None, None][:2]
    if call.function is not torch.where or first is None or second is None:
        return None
    condition, rests = call.argument(0, "condition"), (first.of_rest, second.of_rest)

    def of(one: Log, other: Log) -> Log:
        return lambda: torch.where(condition, one(), other())

    rest = of(*rests) if rests[0] is not None and rests[1] is not None else None
    return Shadow(of(first.log, second.log), rest)


def _chosen(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return the shadow of elements that are moved, chosen, copied or cast."""
    first = shadows[0] if shadows else None
    if first is None:
        return None

    def moved(log: Log) -> Tensor:
        return call.of_another(log())

    rest = first.of_rest
    return Shadow(partial(moved, first.log), None if rest is None else partial(moved, rest))


def _bounded(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    low, high = call.argument(1, "min"), call.argument(2, "max")
    first = shadows[0]
    bounds = [bound for bound in (low, high) if bound is not None]
    if first is None or any(not isinstance(b, int | float) or b <= 0 for b in bounds):
        return None
    logs = [None if bound is None else math.log(bound) for bound in (low, high)]
    return Shadow(lambda: torch.clamp(first.log(), *logs))


def _operand(call: Call, place: int, shadows: list[Shadow | None]) -> Log | float | None:
    """Return the logarithm of an operand: one that is followed, or a positive constant."""
    shadow = shadows[place] if place < len(shadows) else None
    if shadow is not None:
        return shadow.log
    value = call.argument(place, "other")
    if isinstance(value, Tensor) and any(shadows) and _is_positive(value):
        return lambda: torch.log(value)
    is_constant = isinstance(value, int | float) and not isinstance(value, bool)
    return math.log(value) if is_constant and value > 0 else None


def _is_positive(value: Tensor) -> bool:
    """Return whether a tensor has a logarithm throughout: of what no gradient is asked of, 0 has.
    Synchronises the device.
    """
    has_sign = value.is_floating_point() or value.dtype is torch.bool
    if not has_sign or value.numel() > _MOST_LOOKED_AT:
        return False
    return bool((value > 0 if value.requires_grad else value >= 0).all())


def _matmul(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return what follows a product of matrices or vectors: each element is a sum of products."""
    read, other = call.read, call.argument(1, PRODUCTS[call.name])
    if read is None or not isinstance(other, Tensor) or not read.dim() or not other.dim():
        return None
    if any(s is None and t.requires_grad for s, t in zip(shadows, (read, other), strict=True)):
        # Of what is trained nobody knows the sign; looking would ask the device.
        return weighted.matrix_product(call, shadows, other)
    rows, columns = (t.shape[d] if t.dim() > 1 else 1 for t, d in ((read, -2), (other, -1)))
    num_terms = max(read.numel() * columns, other.numel() * rows)
    left, right = (_operand(call, place, shadows) for place in (0, 1))
    if left is None or right is None or num_terms > _MOST_LOOKED_AT:
        return weighted.matrix_product(call, shadows, other)
    return Shadow(lambda: log_matmul(_value(left), _value(right)))


def _diagonal(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return what follows a vector that is made a diagonal, the rest of which is 0, and what a
    matrix has on its own.
    """
    read, first = call.read, shadows[0]
    if read is not None and read.dim() == 2:
        return _chosen(call, shadows)
    if read is None or first is None or read.dim() != 1 or call.argument(1, "diagonal", 0):
        return None

    def log() -> Tensor:
        own = torch.eye(read.numel(), dtype=torch.bool, device=read.device)
        return torch.where(own, first.log()[:, None], -torch.inf)

    return Shadow(log)


def _value(log: Log | float) -> Any:
    return log() if callable(log) else log


def _joined(join: Callable[[Any, Any], Tensor]) -> Callable[..., Shadow | None]:
    """Return what follows a product, quotient or sum of two numbers."""

    def follow(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
        if any(one is not None and one.factor is not None for one in shadows):
            return None
        logs = [_operand(call, place, shadows) for place in (0, 1)]
        if None in logs or call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("rounding_mode"):
            return None
        return Shadow(lambda: join(*(_value(log) for log in logs if log is not None)))

    return follow


def log_add(left: Any, right: Any) -> Tensor:
    tensors = [side for side in (left, right) if isinstance(side, Tensor)]
    like = tensors[0]
    return torch.logaddexp(
        *(s if isinstance(s, Tensor) else torch.full_like(like, s) for s in (left, right))
    )


def _more(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return the shadow of a sum, with what may be negative only that of 1 + p."""
    signed = [one for one in shadows if one is not None and one.square is not None]
    if not signed:
        return _joined(log_add)(call, shadows)
    others = [call.argument(place, name) for place, name in ((0, "input"), (1, "other"))]
    is_of_one = any(not isinstance(one, Tensor) and one == 1 for one in others)
    of_more = signed[0].of_more
    if of_more is None or not is_of_one or call.kwargs.get("alpha", 1) != 1:
        return None
    return Shadow(of_more)


def _less(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return the shadow of 1 - p."""
    p = shadows[1] if len(shadows) > 1 else None
    whole = call.argument(0, "input")
    if p is None or p.of_rest is None or isinstance(whole, Tensor) or whole != 1:
        return None
    if call.kwargs.get("alpha", 1) != 1:
        return None
    return Shadow(p.of_rest, None if p.square is not None else p.log)


def _reduced(reduce: Callable[..., Tensor]) -> Callable[..., Shadow | None]:
    """Return what follows a sum, mean or product of one number's elements."""

    def follow(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
        first, dim = shadows[0], call.argument(1, "dim")
        keep = bool(call.argument(2, "keepdim", default=False))
        if first is None or (dim is None and keep):
            return None
        if first.factor is not None:
            return weighted.weighted_sum(first, dim, keep=keep)
        return Shadow(lambda: reduce(first.log(), dim, keep))

    return follow


def _log_sum(log: Tensor, dim: Any, keep: bool) -> Tensor:
    return torch.logsumexp(log, tuple(range(log.dim())) if dim is None else dim, keep)


def _log_mean(log: Tensor, dim: Any, keep: bool) -> Tensor:
    total = _log_sum(log, dim, keep)
    return total - math.log(max(1, log.numel() // max(1, total.numel())))


def _sum(log: Tensor, dim: Any, keep: bool) -> Tensor:
    return log.sum() if dim is None else log.sum(dim, keep)


def _raised(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    first = shadows[0]
    power = {"sqrt": 0.5, "square": 2.0, "reciprocal": -1.0, "rsqrt": -0.5}.get(
        call.name, call.argument(1, "exponent")
    )
    if first is None or not isinstance(power, int | float):
        return None
    if first.square is not None:
        return first.square if power == 2 else None
    return Shadow(lambda: power * first.log())


FIRST: Mapping[str, Callable[..., Shadow | None]] = {
    "softmax": softmax_from,
    "sigmoid": sigmoid_from,
    "exp": exp_from,
    "tanh": tanh_from,
    "softplus": softplus_from,
    "cosh": cosh_from,
    "expm1": expm1_from,
    "erf": erf_from,
    "erfc": erfc_from,
    "ndtr": ndtr_from,
    "i0": i0_from,
}
_MOVES = (
    *("getitem", "gather", "index_select", "select", "narrow", "take_along_dim", "masked_select"),
    *("squeeze", "unsqueeze", "view", "reshape", "flatten", "unflatten", "expand", "contiguous"),
    *("transpose", "permute", "movedim", "t", "T", "mT", "diagonal", "flip", "clone", "detach"),
    *("float", "double", "half", "bfloat16", "to", "type_as"),
)
_PRODUCT = _joined(lambda left, right: left + right)
PRODUCTS = {"matmul": "other", "mm": "mat2", "mv": "vec", "bmm": "mat2", "dot": "tensor"}
"""Products of matrices and vectors, and what their second operand is called."""
FOLLOWED: Mapping[str, Callable[..., Shadow | None]] = {
    **FIRST,
    **dict.fromkeys(_MOVES, _chosen),
    "clamp": _bounded,
    "clamp_min": _bounded,
    "mul": lambda call, shadows: _PRODUCT(call, shadows) or weighted.product(call, shadows),
    "div": _joined(lambda left, right: left - right),
    "add": _more,
    "sub": _less,
    "sum": _reduced(_log_sum),
    "mean": _reduced(_log_mean),
    "prod": _reduced(_sum),
    "cumsum": running_sum,
    **dict.fromkeys(BY_GROUP, sum_by_group),
    **dict.fromkeys(PRODUCTS, _matmul),
    "diag": _diagonal,
    "where": _where,
    **dict.fromkeys(("sqrt", "square", "reciprocal", "rsqrt", "pow"), _raised),
}
