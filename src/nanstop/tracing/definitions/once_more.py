"""The same operation once more, on the same inputs: in a wider format, by reference mathematics, in
other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import bad_mask, is_inexact, is_measurable, widened
from nanstop.records import Finiteness, Unwritten
from nanstop.replay.conditions import filled_memory
from nanstop.replay.rng import rng_kept
from nanstop.tracing import operators
from nanstop.tracing.definitions.attention import defined
from nanstop.tracing.definitions.scaled_product import scaled_product
from nanstop.tracing.operators import outputs_of

Masks = tuple[Tensor | None, ...]
"""Of each output its bad elements, None where it has none."""
_NO_SUCH_FORM = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError)
"""What an op raises that does not take a format, a device or a setting."""
_STRIDES = (1, 7, 3, 5)
"""Of the orders in which blocks are given back, one for each try: which of them an allocator takes
next depends on that.
"""
_FEWEST, _MOST, _BYTES = 2, 256, 2**24
"""How many blocks of memory are left with ones in them, and how large they are together: as many as
an allocator may have to choose from.
"""


def rerun_wider(func: Any, args: Any, kwargs: Mapping[str, Any], bad: Masks) -> Finiteness:
    """Return whether the op, on the same inputs in a wider format, is finite where its result
    was not.
    """
    formats = {t.dtype for _, _, t in operators.tensors(args, kwargs) if is_inexact(t)}
    formats |= {value for value in kwargs.values() if isinstance(value, torch.dtype)}
    wide = widened(formats)

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(wide.get(value.dtype, value.dtype)) if is_measurable(value) else value
        if isinstance(value, torch.dtype):
            return wide.get(value, value)
        if isinstance(value, list | tuple):
            return type(value)(widen(item) for item in value)
        return value

    def run() -> list[Tensor]:
        definition = defined(func, args, kwargs)
        if definition is not None:  # kernels of attention are for some formats only
            return definition(widen)
        wide_args = tuple(widen(a) for a in args)
        wide_kwargs = {k: widen(v) for k, v in kwargs.items()}
        return outputs_of(func, wide_args, wide_kwargs, func(*wide_args, **wide_kwargs))

    own = _verdict(run, bad)
    return own if own != "unknown" else _verdict(lambda: scaled_product(func, args, kwargs), bad)


def rerun_reference(func: Any, args: Any, kwargs: Mapping[str, Any], bad: Masks) -> Finiteness:
    """Return whether reference mathematics in the same format is finite: attention, or its
    backward, opened into its parts; a product of 8-bit floats by its definition.
    """

    def run() -> list[Tensor]:
        definition = defined(func, args, kwargs)
        if definition is not None:
            return definition(lambda operand: operand)
        return scaled_product(func, args, kwargs, own_format=True)

    return _verdict(run, bad)


def _verdict(run: Callable[[], list[Tensor]], bad: Masks) -> Finiteness:
    try:
        with torch.no_grad(), rng_kept():
            outputs = run()
    except _NO_SUCH_FORM:
        return "unknown"
    looked = False
    for output, mask in zip(outputs, bad, strict=False):
        if mask is None or not is_measurable(output) or output.shape != mask.shape:
            continue
        looked = True
        if bool((bad_mask(output) & mask).any()):
            return "nonfinite"
    return "finite" if looked else "unknown"


def unwritten(
    func: Any, args: Any, kwargs: Mapping[str, Any], outputs: Sequence[Tensor], bad: Masks
) -> Unwritten | None:
    """Return which elements of its first bad output an op never writes, where all that are bad are
    of these: they are NaN where memory holds NaN before the op takes it, and finite where ones are
    left there. Of an op that only takes memory it is known. None where that is not so, and of an
    op that changes an operand.
    """
    traits = operators.traits(func)
    place = next((place for place, mask in enumerate(bad) if mask is not None), None)
    if place is None or traits.mutated or not is_inexact(outputs[place]):
        return None
    if traits.uninitialised:
        return Unwritten()

    def again(*, filled: bool) -> Tensor:
        with torch.no_grad(), rng_kept(), filled_memory(filled=filled):
            return outputs_of(func, args, kwargs, func(*args, **kwargs))[place]

    seen = bad_mask(outputs[place])
    try:
        in_nan = again(filled=True).isnan()  # an overflow is none: Inf is no fill
        if in_nan.shape != seen.shape or bool((seen & ~in_nan).any()):
            return None
        for stride in _STRIDES:  # another block may be the one that is taken
            _leave_ones(outputs[place], stride)
            in_ones = bad_mask(again(filled=False))
            if not bool((seen & in_ones).any()):
                return _described(in_nan & ~in_ones)
    except _NO_SUCH_FORM:
        return None
    return None


def _leave_ones(like: Tensor, stride: int) -> None:
    """Leave ones in memory that the next tensor of this size is likely to lie in: every
    ``stride``-th block is given back ahead of those between.
    """
    num = min(_MOST, max(_FEWEST, _BYTES // max(1, like.nbytes)))
    held: list[Tensor | None] = [torch.ones_like(like) for _ in range(num)]
    for start in range(stride):
        held[start::stride] = [None] * len(held[start::stride])


def _described(mask: Tensor) -> Unwritten:
    """Return how many elements a mask has, and the rows of the first axis if it has all of these
    and no others.
    """
    count = int(mask.sum())
    rows = mask.flatten(1).all(1).nonzero().flatten().tolist() if mask.dim() > 1 else []
    is_span = bool(rows) and rows[-1] - rows[0] + 1 == len(rows)
    whole = is_span and count == len(rows) * mask[0].numel()
    return Unwritten(count=count, rows=(rows[0], rows[-1]) if whole else None)
