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
from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.logs import weighted
from nanstop.remedies.forms.logs.carried import FIRST, FOLLOWED, PRODUCTS, log_add
from nanstop.remedies.forms.logs.shadows import Log, Shadow
from nanstop.remedies.forms.logs.sums import BY_GROUP
from nanstop.replay.path import no_choices


class LogSpace:
    """Follows the numbers whose logarithms are known, and answers calls from these."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Shadow]] = {}

    def call(self, call: Call, at_line: Callable[[], bool]) -> Any:
        """Return what a call returns, computed in log space where that is meant."""
        name = call.name or call.spelled.removesuffix("_")
        if not call.name and name in BY_GROUP:  # made in place as often as not
            call = replace(call, name=name)
        if call.name not in FOLLOWED and call.name not in _ANSWERED:
            return call.run()
        shadows = self._of(call)
        if call.name not in FIRST and not any(shadows):
            return call.run()
        meant = any(shadow.is_meant for shadow in shadows if shadow is not None) or at_line()
        answer = _ANSWERED.get(call.name)
        with no_choices():
            found = answer(call, shadows) if answer is not None and meant else None
            follow = FIRST.get(call.name) or FOLLOWED.get(call.name)
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
        if is_meant and call.name in PRODUCTS:
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


def _logarithm(base: float) -> Callable[..., Tensor | None]:
    def answer(_: Call, shadows: list[Shadow | None]) -> Tensor | None:
        return None if shadows[0] is None else shadows[0].log() / base

    return answer


def _log1p(_: Call, shadows: list[Shadow | None]) -> Tensor | None:
    return None if shadows[0] is None else log_add(0.0, shadows[0].log())


def _quotient(call: Call, shadows: list[Shadow | None]) -> Tensor | None:
    """Return a quotient or product of exponentials, and a positive number over such a one."""
    shadow, mean = FOLLOWED[call.name](call, shadows), weighted.quotient(shadows)
    if mean is not None and call.name == "div" and not call.kwargs.get("rounding_mode"):
        return mean
    is_share = call.name == "div" and shadows[0] is None
    needed = shadows[1:] if is_share else shadows
    return None if shadow is None or None in needed else weighted.number(shadow)


def _entropy(_: Call, shadows: list[Shadow | None]) -> Tensor | None:
    """Return -p log(p), whose derivative at a p that was rounded to 0 is the logarithm."""
    return None if shadows[0] is None else -_times(shadows[0].log().exp(), shadows[0].log())


def _times_logarithm(call: Call, shadows: list[Shadow | None]) -> Tensor | None:
    p, given = shadows[1] if len(shadows) > 1 else None, call.argument(0, "input")
    return None if p is None else _times(given, p.log())


def _times(given: Any, log: Tensor) -> Tensor:
    """Return a product with a logarithm, 0 by which is 0 where that is -inf, too."""
    return given * log.clamp(min=torch.finfo(log.dtype).min)


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


_SIGNED = ("square", "pow", "add", "sub")
"""Calls that make a positive number of one that may be negative."""
_ANSWERED: Mapping[str, Callable[..., Tensor | None]] = {
    "log": _logarithm(1.0),
    "log2": _logarithm(math.log(2.0)),
    "log10": _logarithm(math.log(10.0)),
    "log1p": _log1p,
    "div": _quotient,
    "mul": _quotient,
    "reciprocal": _quotient,
    **dict.fromkeys(PRODUCTS, _quotient),
    "entr": _entropy,
    "xlogy": _times_logarithm,
    "binary_cross_entropy": _cross_entropy,
}
