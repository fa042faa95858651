"""Operations of one line with a value where they have none: a quotient by 0, the root of 0 and its
derivative, the mean of nothing, the softmax of a row that hides everything.

Elements that have a value and a derivative keep both: an operation reads a harmless number in place
of what it is not defined for, and what comes out there is chosen afterwards, so that no infinite
derivative is multiplied by 0 (the inner ``where``, https://github.com/tensorflow/probability,
"What You Should Know About Gradients With where").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanstop.records.line_forms import BETWEEN_POLES
from nanstop.remedies.forms.bounds import far_below_0, has_values
from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.guarded_layers import layer_norm
from nanstop.remedies.forms.guarded_losses import LOSSES
from nanstop.replay.conditions import inside_transform
from nanstop.replay.path import no_choices


def answer(call: Call, at_line: Callable[[], bool]) -> Any:
    """Return what a call returns, with a value for what has none where the line is meant."""
    guard = _GUARDS.get(call.name)
    if guard is None or not at_line():
        return call.run()
    with no_choices():
        found = guard(call)
    return call.run() if found is None else found


def kept(call: Call, at_line: Callable[[], bool], *, is_far: bool = False) -> Any:
    """Return what a call returns where that is infinite, with the derivative of ``answer``, which
    is 0 there; what ``answer`` does elsewhere.
    ``is_far``: with a number that is far off for what is infinite.
    """
    found = answer(call, at_line)
    if not isinstance(found, Tensor) or not is_guarded(call) or not at_line():
        return found
    with no_choices():
        own = call.run().detach()
        far = math.sqrt(torch.finfo(own.dtype).max)
        return torch.where(own.isinf(), own.clamp(-far, far) if is_far else own, found)


def otherwise(call: Call, at_line: Callable[[], bool]) -> Any:
    """Return what ``answer`` does, but another number for what is infinite, or has no value; for
    the logarithm of what is 0, if that is data alone: that of a weight has a slope, which 0 has
    not.
    """
    guard = _OTHERWISE.get(call.name)
    if guard is None or not at_line():
        return answer(call, at_line)
    is_trained = any(isinstance(one, Tensor) and one.requires_grad for one in call.args)
    if is_trained and guard not in (_large, _mirrored):
        with no_choices():
            return _of_magnitude(call, answer(call, at_line))
    with no_choices():
        found = guard(call)
    return call.run() if found is None else found


def _large(call: Call) -> Any:
    """Return what its guard does, but as much as the largest of its values where the call is
    infinite: 0 is no nearer to that. 0 / 0, a mean of nothing, stays 0.
    """
    found = _GUARDS[call.name](call)
    if not isinstance(found, Tensor) or not found.numel():
        return found
    own, known = call.run().detach(), found.detach()
    largest = known.nan_to_num(0.0, 0.0, 0.0).abs().amax().clamp(min=1.0)
    made_up = own.isinf() & known.isfinite()
    return torch.where(made_up, torch.copysign(largest.to(own.dtype), own), found)


def _mirrored(call: Call) -> Any:
    """Return what ``_large`` does, but for a negative number the root of its magnitude."""
    return _of_magnitude(call, _large(call))


def _of_magnitude(call: Call, found: Any) -> Any:
    """Return what was found, but for a number far below 0 that has no value the one of its
    magnitude.
    """
    read = call.read
    if not isinstance(found, Tensor) or read is None or not read.is_floating_point():
        return found
    other = call.of_another(read.detach().abs()).detach()
    made_up = call.run().detach().isnan() & far_below_0(read) & other.isfinite()
    return torch.where(made_up, other.to(found.dtype), found)


def is_guarded(call: Call) -> bool:
    """Return whether there is a guard for a call."""
    return call.name in _GUARDS


def _replaced(call: Call, bad: Tensor, harmless: float, value: float) -> Tensor | None:
    """Return what a call makes of ``harmless`` in place of bad elements, and ``value`` there."""
    read = call.read
    if read is None or not has_values(read):
        return None
    result = call.of_another(torch.where(bad, torch.full_like(read, harmless), read))
    return torch.where(bad, torch.full_like(result, value), result)


def _quotient(call: Call) -> Tensor | None:
    above, below = call.argument(0, "input"), call.argument(1, "other")
    if call.kwargs.get("rounding_mode") or (not isinstance(below, Tensor) and below != 0):
        return None
    if not isinstance(below, Tensor):  # a number of Python's that is 0
        return above * 0.0 if isinstance(above, Tensor) and above.isfinite().all() else None
    quotient = above / torch.where(below == 0, torch.ones_like(below), below)
    return torch.where((below == 0) & (above != 0), torch.zeros_like(quotient), quotient)


def _at_zero(value: float) -> Callable[[Call], Tensor | None]:
    """Return what guards a function whose value or derivative is infinite at 0."""

    def guard(call: Call) -> Tensor | None:
        read = call.read
        return None if read is None else _replaced(call, read == 0, 1.0, value)

    return guard


def _root(call: Call) -> Tensor | None:
    read = call.read
    return None if read is None else _replaced(call, read <= 0, 1.0, 0.0)


def _power(call: Call) -> Tensor | None:
    """Return the power, 0 at 0 where the derivative is infinite, and for a negative number to a
    power that is not whole, or whose own derivative is asked for: that has its logarithm.
    """
    read, given = call.read, call.argument(1, "exponent")
    if read is None or not isinstance(given, int | float | Tensor):
        return None
    if isinstance(given, int | float) and given >= 1 and float(given).is_integer():
        return None
    exponent = torch.as_tensor(given, device=read.device)
    whole = (exponent == exponent.round()) & (not exponent.requires_grad)
    bad = (read == 0) & (exponent < 1) | (read < 0) & ~whole
    if not inside_transform() and not bad.any():  # in one no value is read
        return None
    return _replaced(call, bad, 1.0, 1.0 if isinstance(given, int | float) and given == 0 else 0.0)


def _logarithm(call: Call, power: float = 1.0) -> Tensor | None:
    """Return log with that of the smallest number, to a ``power``, for 0 and for a negative number,
    which has none: what a clamp under it gives.
    """
    read = call.read
    if read is None or not has_values(read):
        return None
    least = torch.finfo(read.dtype).tiny ** power if read.is_floating_point() else 1.0
    value = float(call.function(torch.tensor(least, dtype=torch.float64)))
    return _replaced(call, read <= 0, 1.0, value)


def _at_pole(call: Call) -> Tensor | None:
    """Return log(gamma) with that of the smallest number at 0."""
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    return _replaced(call, read == 0, 1.0, -math.log(torch.finfo(read.dtype).tiny))


def _exponential(call: Call) -> Tensor | None:
    """Return exp with a derivative of 0 where it leaves its format. It stays infinite there: what
    reads that fails as before, and what passes it by, or comes to an end with it, is not multiplied
    by an infinity on the way back.
    """
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    result = call.run()
    beyond = result.isinf() & read.isfinite()
    kept = call.of_another(torch.where(beyond, torch.zeros_like(read), read))
    return torch.where(beyond, result.detach(), kept)


def _times_logarithm(call: Call) -> Tensor | None:
    """Return x log(y) with the logarithm of the smallest number for y = 0."""
    factor, read = call.argument(0, "input"), call.argument(1, "other")
    if not isinstance(factor, Tensor) or not isinstance(read, Tensor):
        return None
    if not read.is_floating_point():
        return None
    least = math.log(torch.finfo(read.dtype).tiny)
    result = call.function(factor, torch.where(read == 0, torch.ones_like(read), read))
    return torch.where(read == 0, factor * least, result)


def _log_of_more(call: Call) -> Tensor | None:
    """Return log(1 + x) with that of the spacing at 1 for x = -1, and for what is below it."""
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    value = math.log(torch.finfo(read.dtype).eps)
    return _replaced(call, read <= -1, 0.0, value)


def _angle(call: Call) -> Tensor | None:
    """Return atan2, 0 where both numbers are 0: that has no direction."""
    above, below = call.argument(0, "input"), call.argument(1, "other")
    if not isinstance(above, Tensor) or not isinstance(below, Tensor):
        return None
    return torch.atan2(above, below.masked_fill((above == 0) & (below == 0), 1))


def _within(
    low: float, high: float, harmless: float, power: float = 1.0
) -> Callable[[Call], Tensor | None]:
    """Return what gives an inverse function no slope from its edges on, where it is vertical.
    ``harmless``: a number between them. ``power``: of the format's spacing, how far from an edge
    its value at a pole is taken.
    """

    def guard(call: Call) -> Tensor | None:
        read = call.read
        if read is None or not read.is_floating_point():
            return None
        outside = (read <= low) | (read >= high)
        inner = torch.where(outside, torch.full_like(read, harmless), read)
        result = call.of_another(inner)
        ends, eps = read.detach().clamp(low, high), torch.finfo(read.dtype).eps ** power
        at_edge = call.of_another(ends)
        within = call.of_another(ends.clamp(low + eps, high - eps))
        return torch.where(outside, torch.where(at_edge.isfinite(), at_edge, within), result)

    return guard


def _softmax(call: Call) -> Tensor | None:
    """Return softmax with 0 in rows that hide everything; of log_softmax, too."""
    read, dim = call.read, call.argument(1, "dim")
    if read is None or not isinstance(dim, int):
        return None
    hidden = (read == -torch.inf).all(dim, keepdim=True).expand_as(read)
    return _replaced(call, hidden, 0.0, 0.0)


def _attention(call: Call) -> Tensor | None:
    """Return attention with 0 for a query that may look at nothing."""
    mask = call.argument(3, "attn_mask")
    if not isinstance(mask, Tensor):
        return None
    is_bool = mask.dtype is torch.bool
    hidden = (~mask if is_bool else mask == -torch.inf).all(-1, keepdim=True)
    seen = torch.ones_like(mask) if is_bool else torch.zeros_like(mask)
    args = list(call.args)
    kwargs = dict(call.kwargs)
    changed = torch.where(hidden, seen, mask)
    if len(args) > 3:
        args[3] = changed
    else:
        kwargs["attn_mask"] = changed
    result = call.function(*args, **kwargs)
    return torch.where(hidden, torch.zeros_like(result), result)


def _mean(call: Call) -> Tensor | None:
    """Return the mean, of no element 0."""
    read, dim = call.read, call.argument(1, "dim")
    if read is None or read.numel():
        return None
    keep = bool(call.argument(2, "keepdim", default=False))
    return read.sum() if dim is None else read.sum(dim, keep)


def _deviation(call: Call) -> Tensor | None:
    """Return the sample variance or deviation, of one element 0."""
    only = _only_elements(call)
    return None if only is None else only * 0


def _deviation_and_mean(call: Call) -> tuple[Tensor, Tensor] | None:
    """Return the sample variance or deviation, of one element 0, and the mean."""
    only = _only_elements(call)
    return None if only is None else (only * 0, only)


def _only_elements(call: Call) -> Tensor | None:
    """Return what is read, in the shape of the result, where that is one element for each."""
    read, dim = call.read, call.argument(1, "dim")
    if read is None or not read.is_floating_point():
        return None
    is_whole = dim is None or isinstance(dim, bool)
    keep = bool(call.kwargs.get("keepdim", False))
    dims: Any = tuple(range(read.dim())) if is_whole else dim
    one = read.sum(dims, keepdim=keep)
    return one if one.numel() == read.numel() else None


def _covariance(call: Call) -> Tensor | None:
    """Return the covariance, of one observation 0."""
    read = call.read
    if read is None or len(call.args) + len(call.kwargs) > 1 or read.shape[-1:] != (1,):
        return None
    return call.function(read, correction=0)


def _norm(call: Call) -> Tensor | None:
    """Return x / |x|, 0 where x is 0, whatever eps the format cannot hold."""
    read, dim = call.read, call.argument(2, "dim", 1)
    if read is None or not read.is_floating_point():
        return None
    nothing = (read == 0).all(dim, keepdim=True).expand_as(read)
    return _replaced(call, nothing, 1.0, 0.0)


def masked_product(call: Call, at_line: Callable[[], bool], *, is_far: bool = False) -> Any:
    """Return the product of what is learned with what a mask has made -Inf of, where the line is
    meant: -Inf wherever that is. 0 * -Inf is NaN, and so is the derivative next to it.
    ``is_far``: a number that is far off in place of -Inf.
    """
    found = _masked_afterwards(call, is_far) if call.name == "mul" and at_line() else None
    return call.run() if found is None else found


@no_choices()
def _masked_afterwards(call: Call, is_far: bool) -> Tensor | None:
    factors = [call.argument(0, "input"), call.argument(1, "other")]
    given = [one for one in factors if isinstance(one, Tensor) and one.is_floating_point()]
    masks = [one for one in given if bool((one == -torch.inf).any())]
    if len(given) < 2 or len(masks) != 1:
        return None
    mask, factor = masks[0], given[given[0] is masks[0]]
    hidden = mask == -torch.inf
    if not factor.requires_grad:  # 0 of the script's own may switch the mask off
        return None
    product = call.function(factor, mask.masked_fill(hidden, 0.0))
    below = -math.sqrt(torch.finfo(product.dtype).max) if is_far else -torch.inf
    return torch.where(hidden, below, product)


def _sum_of_masks(call: Call) -> Tensor | None:
    """Return a sum of finite numbers that stays in the format."""
    result = call.run()
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return result
    ends = torch.finfo(result.dtype)
    operands = [one for one in call.args[:2] if isinstance(one, Tensor)]
    left = torch.isinf(result)
    for operand in operands:
        left = left & torch.isfinite(operand)
    bounded = result.nan_to_num(posinf=ends.max, neginf=ends.min)
    return torch.where(left, bounded, result)


_GUARDS: Mapping[str, Callable[[Call], Any]] = {
    "div": _quotient,
    "reciprocal": _at_zero(0.0),
    "rsqrt": _root,
    "sqrt": _root,
    "pow": _power,
    **dict.fromkeys(("log", "log2", "log10"), _logarithm),
    "log1p": _log_of_more,
    "lgamma": _at_pole,
    "exp": _exponential,
    "xlogy": _times_logarithm,
    **dict.fromkeys(("acos", "asin"), _within(-1.0, 1.0, 0.0)),
    **{name: _within(*ends, sum(ends) / 2) for name, ends in BETWEEN_POLES.items()},
    "atan2": _angle,
    "acosh": _within(1.0, math.inf, 2.0),
    "softmax": _softmax,
    "log_softmax": _softmax,
    "scaled_dot_product_attention": _attention,
    "mean": _mean,
    **dict.fromkeys(("std", "var"), _deviation),
    **dict.fromkeys(("std_mean", "var_mean"), _deviation_and_mean),
    "cov": _covariance,
    "normalize": _norm,
    **LOSSES,
    "layer_norm": layer_norm,
    "entr": _at_zero(0.0),
    "add": _sum_of_masks,
}
_OTHERWISE: Mapping[str, Callable[[Call], Any]] = {
    **dict.fromkeys(("log", "log2", "log10"), partial(_logarithm, power=0.5)),
    **dict.fromkeys(("div", "reciprocal"), _large),
    **dict.fromkeys(("sqrt", "rsqrt", "pow"), _mirrored),
    **{name: _within(*ends, sum(ends) / 2, 0.5) for name, ends in BETWEEN_POLES.items()},
}
