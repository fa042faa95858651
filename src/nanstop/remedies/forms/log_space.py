"""What a line computes of exponentials and probabilities, computed of their logarithms.

A probability that rounds to 0 has a finite logarithm, and an exponential beyond the format has one,
as long as nobody makes the number itself: log(softmax(x)) is log_softmax(x), exp(a) / exp(b) is
exp(a - b), the logarithm of a product a sum. The logarithm of each number that is known to be an
exponential, a probability, or a product, quotient, sum, choice or cast of such, is known without
it. See Blanchard, Higham and Higham, "Accurately computing the log-sum-exp and softmax functions",
IMA J. Numer. Anal. 41 (2021), and Maechler, "Accurately computing log(1 - exp(-|a|))" (2012).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import version
from nanstop.remedies.forms import weighted
from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.shadows import (
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
    tanh_from,
)
from nanstop.remedies.forms.sums import BY_GROUP, log_matmul, running_sum, sum_by_group
from nanstop.replay.path import no_choices

_MOST_LOOKED_AT = 2**20
"""Elements of a tensor whose sign is looked at."""


class LogSpace:
    """Follows the numbers whose logarithms are known, and answers calls from these."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Shadow]] = {}

    def call(self, call: Call, at_line: Callable[[], bool]) -> Any:
        """Return what a call returns, computed in log space where that is meant."""
        name = call.name or call.spelled.removesuffix("_")
        if not call.name and name in BY_GROUP:  # made in place as often as not
            call = replace(call, name=name)
        if call.name not in _FOLLOWED and call.name not in _ANSWERED:
            return call.run()
        shadows = self._of(call)
        if call.name not in _FIRST and not any(shadows):
            return call.run()
        meant = any(shadow.is_meant for shadow in shadows if shadow is not None) or at_line()
        answer = _ANSWERED.get(call.name)
        with no_choices():
            found = answer(call, shadows) if answer is not None and meant else None
            follow = _FIRST.get(call.name) or _FOLLOWED.get(call.name)
            shadow = follow(call, shadows) if follow is not None else None
        result = call.run() if found is None else found
        self._follow(call, shadow, result, is_meant=meant)
        return result

    def _of(self, call: Call) -> list[Shadow | None]:
        second = BY_GROUP.get(call.name, "other")
        places = (1, 2) if call.name == "where" else (0, 3 if call.name in BY_GROUP else 1)
        names = zip(places, ("input", second), strict=True)
        operands = (call.argument(place, name) for place, name in names)
        return [self._shadow(one, call.name) for one in operands if one is not None]

    def _shadow(self, operand: Any, name: str) -> Shadow | None:
        if not isinstance(operand, Tensor):
            return None
        reference, shadow = self._known.get(id(operand), (None, None))
        if reference is None or shadow is None or reference() is not operand:
            return None
        is_usable = name in _SIGNED if shadow.square is not None else True
        is_usable = is_usable and (shadow.factor is None or name in weighted.WEIGHTED)
        return shadow if is_usable and shadow.version == version(operand) else None

    def _follow(self, call: Call, shadow: Shadow | None, result: Any, *, is_meant: bool) -> None:
        is_number = isinstance(result, Tensor) and result.is_floating_point()
        if shadow is None or not is_number:
            return
        key, has_graph, dtype = id(result), result.requires_grad, result.dtype
        of_rest, of_more, factor = (
            None if log is None else _once(partial(_as, log, dtype, has_graph))
            for log in (shadow.of_rest, shadow.of_more, shadow.factor)
        )
        known = Shadow(
            _once(partial(_as, shadow.log, dtype, has_graph)),
            of_rest,
            of_more,
            factor=factor,
            square=shadow.square,
            version=version(result),
            is_meant=is_meant,
        )
        forget = partial(self._known.pop, key, None)
        self._known[key] = weakref.ref(result, lambda _: forget()), known
        if is_meant and call.name in _PRODUCTS:
            with no_choices():
                known.log()  # rounds of a scaling would be computed one within the other at its end


def _as(log: Log, dtype: torch.dtype, has_graph: bool) -> Tensor:
    """Return a logarithm in the format of its number, and with a graph if that has one."""
    found = log().to(dtype)
    return found if has_graph else found.detach()


def _once(log: Log) -> Log:
    kept: list[Tensor] = []

    def computed() -> Tensor:
        if not kept:
            kept.append(log())
        return kept[0]

    return computed


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
    read, other = call.read, call.argument(1, _PRODUCTS[call.name])
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


def _log_add(left: Any, right: Any) -> Tensor:
    tensors = [side for side in (left, right) if isinstance(side, Tensor)]
    like = tensors[0]
    return torch.logaddexp(
        *(s if isinstance(s, Tensor) else torch.full_like(like, s) for s in (left, right))
    )


def _more(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return the shadow of a sum, with what may be negative only that of 1 + p."""
    signed = [one for one in shadows if one is not None and one.square is not None]
    if not signed:
        return _joined(_log_add)(call, shadows)
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


def _logarithm(base: float) -> Callable[..., Tensor | None]:
    def answer(_: Call, shadows: list[Shadow | None]) -> Tensor | None:
        return None if shadows[0] is None else shadows[0].log() / base

    return answer


def _log1p(_: Call, shadows: list[Shadow | None]) -> Tensor | None:
    return None if shadows[0] is None else _log_add(0.0, shadows[0].log())


def _quotient(call: Call, shadows: list[Shadow | None]) -> Tensor | None:
    """Return a quotient or product of exponentials, and a positive number over such a one."""
    shadow, mean = _FOLLOWED[call.name](call, shadows), weighted.quotient(shadows)
    if mean is not None and call.name == "div" and not call.kwargs.get("rounding_mode"):
        return mean
    is_share = call.name == "div" and shadows[0] is None
    needed = shadows[1:] if is_share else shadows
    return None if shadow is None or None in needed else weighted.number(shadow)


def _cross_entropy(call: Call, shadows: list[Shadow | None]) -> Tensor | None:
    """Return the binary cross-entropy of a probability, as of its logits."""
    p, target = shadows[0], call.argument(1, "target")
    if p is None or p.of_rest is None or not isinstance(target, Tensor):
        return None
    weight, reduction = call.argument(2, "weight"), call.kwargs.get("reduction", "mean")
    if call.kwargs.get("reduce") is not None or call.kwargs.get("size_average") is not None:
        return None
    loss = -(target * p.log() + (1 - target) * p.of_rest())
    loss = loss if weight is None else loss * weight
    return {"mean": loss.mean, "sum": loss.sum}.get(reduction, lambda: loss)()


_FIRST: Mapping[str, Callable[..., Shadow | None]] = {
    "softmax": softmax_from,
    "sigmoid": sigmoid_from,
    "exp": exp_from,
    "tanh": tanh_from,
    "cosh": cosh_from,
    "expm1": expm1_from,
    "erf": erf_from,
    "erfc": erfc_from,
    "ndtr": ndtr_from,
    "i0": i0_from,
}
_SIGNED = ("square", "pow", "add", "sub")
"""Calls that make a positive number of one that may be negative."""
_MOVES = (
    *("getitem", "gather", "index_select", "select", "narrow", "take_along_dim", "masked_select"),
    *("squeeze", "unsqueeze", "view", "reshape", "flatten", "unflatten", "expand", "contiguous"),
    *("transpose", "permute", "movedim", "t", "T", "mT", "diagonal", "flip", "clone", "detach"),
    *("float", "double", "half", "bfloat16", "to", "type_as"),
)
_PRODUCT = _joined(lambda left, right: left + right)
_PRODUCTS = {"matmul": "other", "mm": "mat2", "mv": "vec", "bmm": "mat2", "dot": "tensor"}
"""Products of matrices and vectors, and what their second operand is called."""
_FOLLOWED: Mapping[str, Callable[..., Shadow | None]] = {
    **_FIRST,
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
    **dict.fromkeys(_PRODUCTS, _matmul),
    "diag": _diagonal,
    "where": _where,
    **dict.fromkeys(("sqrt", "square", "reciprocal", "rsqrt", "pow"), _raised),
}
_ANSWERED: Mapping[str, Callable[..., Tensor | None]] = {
    "log": _logarithm(1.0),
    "log2": _logarithm(math.log(2.0)),
    "log10": _logarithm(math.log(10.0)),
    "log1p": _log1p,
    "div": _quotient,
    "mul": _quotient,
    "reciprocal": _quotient,
    **dict.fromkeys(_PRODUCTS, _quotient),
    "binary_cross_entropy": _cross_entropy,
}
