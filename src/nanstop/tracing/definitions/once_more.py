"""The same operation once more, on the same inputs: in a wider format, by reference mathematics, in
other memory.
"""

from __future__ import annotations

from collections import deque
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
_TRIES = 64
"""How often memory is asked for at most, until some of it is known to have held ones."""
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
        always = _bad_in_ones(lambda: again(filled=False), outputs[place], seen)
    except _NO_SUCH_FORM:
        return None
    return None if bool((seen & always).any()) else _described(in_nan & ~always)


def _bad_in_ones(run: Callable[[], Tensor], like: Tensor, seen: Tensor) -> Tensor:
    """Return which elements of an output are bad in each of some runs, for each of which ones are
    left in memory. Ends where none of those ``seen`` is bad in all of them, or a few were made and
    the output of one lay in memory that held ones.
    """
    room = _BYTES // max(1, like.nbytes)
    num = min(_MOST, max(_FEWEST, room))
    held: deque[Tensor] = deque(maxlen=room)  # what a run has taken the next one cannot take
    always, in_ones = torch.ones_like(seen), False
    for number in range(min(_TRIES, max(len(_STRIDES), room))):
        blocks = _leave_ones(like, num, _STRIDES[number % len(_STRIDES)])
        output = run()
        held.append(output)
        always &= bad_mask(output)
        in_ones = in_ones or output.data_ptr() in blocks
        enough = in_ones and number + 1 >= len(_STRIDES)
        if enough or not bool((seen & always).any()):
            break
    return always


def _leave_ones(like: Tensor, num: int, stride: int) -> set[int]:
    """Leave ones in memory that the next tensor of this size is likely to lie in, and return the
    addresses of its blocks: every ``stride``-th is given back ahead of those between.
    """
    held: list[Tensor | None] = [torch.ones_like(like) for _ in range(num)]
    blocks = {block.data_ptr() for block in held if block is not None}
    for start in range(stride):
        held[start::stride] = [None] * len(held[start::stride])
    return blocks


def _described(mask: Tensor) -> Unwritten:
    """Return how many elements a mask has, and the rows of the first axis if it has all of these
    and no others.
    """
    count = int(mask.sum())
    rows = mask.flatten(1).all(1).nonzero().flatten().tolist() if mask.dim() > 1 else []
    is_span = bool(rows) and rows[-1] - rows[0] + 1 == len(rows)
    whole = is_span and count == len(rows) * mask[0].numel()
    return Unwritten(count=count, rows=(rows[0], rows[-1]) if whole else None)
