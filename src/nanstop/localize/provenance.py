"""What values are, by descent: a count, a norm, a probability, the difference of two
log-probabilities.

The operations of a trace are read in their order; each hands on what its operands are, or makes
something of it: the sum of a mask is a count, the logarithm of a probability is a log-probability.
Neither a name nor a line of source takes part: a script may call things as it likes, and spell a
division as a product with a reciprocal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch

from nanstop.frozen import frozen
from nanstop.localize.slicing import writers
from nanstop.records import op_kind
from nanstop.records.values import origin_of
from nanstop.records.vocabulary import Descent
from nanstop.tracing.recorder import Op, Trace, Value

Kinds = frozenset[Descent]

NOTHING: Kinds = frozenset()
SOURCES: Kinds = frozenset({"parameter", "state", "data", "ids"})
_CONSTANT: Kinds = frozenset({"constant"})
_MASK: Kinds = frozenset({"mask"})
_NORM: Kinds = frozenset({"norm"})
_COUNT: Kinds = frozenset({"count"})
_WHOLE: Kinds = frozenset({"whole"})
_TOTAL: Kinds = frozenset({"total"})
_EMPTY: Kinds = frozenset({"empty"})
_EXTREME: Kinds = frozenset({"extreme"})
_EXPONENTIAL: Kinds = frozenset({"exponential"})
_LOG_SUM: Kinds = frozenset({"log_sum"})
_LOG_PROBABILITY: Kinds = frozenset({"log_probability"})
_CHOSEN: Kinds = frozenset({"chosen"})
_SIZES: Kinds = frozenset({"norm", "deviation", "extreme", "magnitude", "square", "total"})
"""What is 0 where what it was made of is 0, or does not vary."""
_MOST_OF_EPS = 1e-2
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_COMPARES = frozenset(
    {"eq", "ne", "lt", "gt", "le", "ge", "isnan", "isinf", "isfinite", "signbit", "isin"}
    | {"logical_and", "logical_or", "logical_not", "logical_xor"}
    | {"bitwise_and", "bitwise_or", "bitwise_not"}
)
_FILLS = frozenset({"full", "full_like", "new_full", "fill", "scalar_tensor"})
_ZEROS_AND_ONES = frozenset({"zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones"})
_SUMS = frozenset({"sum", "mean", "cumsum", "scatter_add", "index_add", "_segment_reduce"})
_COUNTS = frozenset({"count_nonzero", "bincount", "histc"})
_PRODUCTS = frozenset({"mm", "bmm", "mv", "dot", "vdot"})
_EXTREMES = frozenset({"amax", "amin", "max", "min", "aminmax", "kthvalue", "median", "quantile"})
_NORMS = frozenset(
    {"norm", "linalg_vector_norm", "frobenius_norm"}
    | {"_cdist_forward", "_euclidean_dist", "_pdist_forward"}
)
_DEVIATIONS = frozenset({"std", "var", "std_mean", "var_mean"})
_ROOTS = frozenset({"sqrt", "rsqrt", "reciprocal"})
_PROBABILITIES = frozenset({"_softmax", "softmax", "sigmoid"})
_LOG_PROBABILITIES = frozenset({"_log_softmax", "log_softmax", "log_sigmoid_forward"})
HIDE_LOWEST = _PROBABILITIES | _LOG_PROBABILITIES | {"logsumexp", "amax", "max"}
"""Ops to which -Inf is a choice that is hidden: it has no part in what they make of the others."""
HIDE_HIGHEST = frozenset({"amin", "min"})
"""Ops to which Inf is."""
LOGARITHMS = frozenset({"log", "log2", "log10", "log1p"})
KEEPS = frozenset(
    {"_to_copy", "copy", "clone", "gather", "index", "index_select", "cat", "stack", "repeat"}
    | {"clamp", "clamp_min", "clamp_max", "where", "masked_fill", "masked_select", "flip", "roll"}
    | {"constant_pad_nd", "nan_to_num", "tril", "triu", "sort", "topk", "index_put", "scatter"}
    | {"slice_scatter", "select_scatter", "expand_copy", "lift_fresh_copy", "neg", "_foreach_neg"}
    | {"repeat_interleave", "native_dropout", "take", "diag_embed", "_unsafe_index"}
)
CHOOSES = frozenset({"gather", "index", "nll_loss_forward", "nll_loss2d_forward"})
_MIXES = frozenset({"add", "sub", "rsub", "maximum", "minimum"})
_ZERO_OR_ONE = _COMPARES | _FILLS | _ZEROS_AND_ONES
_STAY_WHOLE = (KEEPS - {"native_dropout"}) | _SUMS - {"mean"} | _PRODUCTS | _MIXES | {"mul"}


@frozen
class OpInputs:
    """An operation with what it reads: its values, and what each of them is by descent."""

    base: str
    scalars: tuple[float, ...]
    values: tuple[Value, ...]
    kinds: tuple[Kinds, ...]

    @classmethod
    def of(cls, op: Op, kinds: Sequence[Kinds]) -> OpInputs:
        """Return what an op of a trace is and reads;
        in place (``add_``) or not is the same kind.
        """
        raises = op.name == "aten.pow.Scalar"  # 2 ** x: its number is what is raised
        return cls(op_kind(op.name), () if raises else op.scalars, op.inputs, tuple(kinds))


def descents(trace: Trace, masks: Collection[str] = ()) -> tuple[Kinds, ...]:
    """Return of each op what it wrote, by descent.

    ``masks``: names of tensors that hold nothing but 0 and 1.
    """
    made: list[Kinds] = []
    for op in trace.ops:
        read = [kinds_of(trace, made, value, masks) for value in op.inputs]
        sources = NOTHING.union(*read) & SOURCES
        reading = OpInputs.of(op, read)
        meaning = _meaning(reading) - SOURCES - _CONSTANT - _WHOLE
        if meaning & (_MASK | _COUNT) and _is_whole(reading):
            meaning |= _WHOLE
        made.append(meaning | (sources or _CONSTANT))
    return tuple(made)


def kinds_of(
    trace: Trace, made: Sequence[Kinds], value: Value, masks: Collection[str] = ()
) -> Kinds:
    """Return what a value is, given what the ops before it ``made``; masks by their format too."""
    found = [made[index] for index in writers(trace, value) if index < len(made)]
    kinds = _agreed(found) if found else _own(value)
    is_mask = value.dtype is torch.bool or (not found and value.storage.name in masks)
    return kinds | _MASK | _WHOLE if is_mask else kinds


def _own(value: Value) -> Kinds:
    """Return what a value is that no op wrote: by where it lies, and by its format."""
    origin = origin_of(value.storage.name)
    if origin in ("unknown", "from_buffer"):
        return _CONSTANT
    if origin == "from_state":
        return frozenset({"state"})
    if origin == "from_param":
        return frozenset({"parameter"})
    numbers = value.dtype.is_floating_point or value.dtype.is_complex
    return frozenset({"data"}) if numbers else frozenset({"ids"})


def _agreed(kinds: Iterable[Kinds]) -> Kinds:
    """Return what values that are put together are: what all that say something agree on."""
    found = list(kinds)
    sources = NOTHING.union(*found) & SOURCES
    telling = [one - SOURCES - _CONSTANT for one in found if one != _CONSTANT]
    meaning = frozenset.intersection(*telling) if telling else NOTHING
    return meaning | (sources or _CONSTANT)


def _meaning(op: OpInputs) -> Kinds:
    """Return what an op makes of its operands, the sources left out of account."""
    for names, made in _RULES.items():
        if op.base in names:
            return made(op)
    return NOTHING


def _is_whole(op: OpInputs) -> bool:
    """Return whether masks and counts are whole numbers still: weights and shares are none."""
    if op.base in _ZERO_OR_ONE or op.base in _COUNTS:
        return True
    read = zip(op.values, op.kinds, strict=True)
    is_square = op.base == "square" or (op.base == "pow" and op.scalars[-1:] == (2.0,))
    return (
        (op.base in _STAY_WHOLE or is_square)
        and all(float(number).is_integer() for number in op.scalars)
        and all("whole" in kinds or value.dtype in _INTEGERS for value, kinds in read)
    )


def _fixed(*kinds: Descent) -> Callable[[OpInputs], Kinds]:
    return lambda _: frozenset(kinds)


def _filled(op: OpInputs) -> Kinds:
    return _MASK if op.scalars and op.scalars[-1] in (0.0, 1.0) else NOTHING


def _floats(op: OpInputs) -> Iterator[Kinds]:
    """Yield what the operands are that carry values: ids and masks beside floats only choose, and
    so do those that a scatter puts numbers at.
    """
    floating = [value.dtype.is_floating_point for value in op.values]
    for place, (kinds, is_float) in enumerate(zip(op.kinds, floating, strict=True)):
        is_place = op.base == "scatter" and place == 1
        if is_float or not (any(floating) or is_place):
            yield kinds


def _kept(op: OpInputs) -> Kinds:
    return _agreed(_floats(op))


def _picked(op: OpInputs) -> Kinds:
    """Return what is picked by ids: of log-probabilities, those of what was chosen."""
    kinds = _kept(op)
    each = op.base != "index" or len(op.kinds) > 2
    return kinds | _CHOSEN if each and "log_probability" in kinds else kinds


def _summed(op: OpInputs) -> Kinds:
    empty = _EMPTY if any(0 in value.shape for value in op.values) else NOTHING
    kinds = _kept(op)
    counts = "mask" in kinds or all(value.dtype in _INTEGERS for value in op.values)
    if counts and op.values:
        return _COUNT | empty
    if kinds & {"square", "magnitude"}:
        return _NORM | empty
    return kinds | _TOTAL | empty


def _multiplied(op: OpInputs) -> Kinds:
    """Return what a product is: a square, a masked value, or what it was times a constant."""
    if len(op.kinds) == 2 and all("mask" in kinds for kinds in op.kinds):
        return _MASK
    if len(op.kinds) == 2 and _same(*op.values):
        return _squared(op)
    return _scaled(op.kinds)


def _squared(op: OpInputs) -> Kinds:
    """Return what a square is: of a count one that is 0 where nothing is counted as well."""
    return op.kinds[0] & _COUNT or frozenset({"square"})


def _scaled(read: Sequence[Kinds]) -> Kinds:
    rest = [one for one in read if one != _CONSTANT and "mask" not in one]
    if len(rest) == 1:
        return rest[0]
    both: Kinds = frozenset({"probability", "exponential", "count", "norm", "deviation"})
    return frozenset.intersection(*rest) & both if rest else _agreed(read)


def _contracted(op: OpInputs) -> Kinds:
    if len(op.kinds) >= 2 and all("mask" in kinds for kinds in op.kinds):
        return _COUNT
    with_itself = len(op.values) == 2 and op.values[0].storage is op.values[1].storage
    return _NORM if with_itself else NOTHING


def _divided(op: OpInputs) -> Kinds:
    """Return what a quotient is: a mean of what was summed, a share of probabilities."""
    if len(op.kinds) == 2 and "count" in op.kinds[1] and "mask" not in op.kinds[1]:
        return op.kinds[0]
    return (_scaled(op.kinds) | op.kinds[0] & {"square"}) if op.kinds else NOTHING


def _powered(op: OpInputs) -> Kinds:
    exponent = op.scalars[-1] if op.scalars else None
    kinds = op.kinds[0] if op.kinds else NOTHING
    if exponent == 2.0:
        return _squared(op)
    return kinds if exponent in (-1.0, 0.5, -0.5) else NOTHING


def _rooted(op: OpInputs) -> Kinds:
    kinds = _kept(op)
    rooted = {"norm", "deviation", "count", "total", "extreme", "probability", "magnitude"}
    return kinds & rooted


def _extreme(op: OpInputs) -> Kinds:
    kinds = _kept(op)
    if "magnitude" in kinds:
        return _NORM
    return kinds if kinds & {"count", "norm"} else kinds - _MASK | _EXTREME


def _logarithm(op: OpInputs) -> Kinds:
    kinds = _kept(op)
    made: Kinds = frozenset({"logarithm"})
    if "exponential" in kinds:  # as many of them as were summed
        return made | _LOG_SUM
    return made | _LOG_PROBABILITY if "probability" in kinds else made


def _exponential(op: OpInputs) -> Kinds:
    kinds = _kept(op)
    if "log_ratio" in kinds:
        return frozenset({"ratio"})
    return frozenset({"probability"}) if "log_probability" in kinds else _EXPONENTIAL


def _mixed(op: OpInputs) -> Kinds:
    """Return what a sum or difference is; numbers that the program adds do not change it, and what
    is left of one is 0 elsewhere than a norm or a sum is.
    """
    if len(op.kinds) == 2 and op.base in ("sub", "rsub"):
        found = _difference(op)
        if found:
            return found
    if op.base == "add" and any("log_sum" in one for one in op.kinds) and _raises(op):
        return _LOG_SUM
    telling = [one for one in op.kinds if one != _CONSTANT]
    if len(telling) == 1 and _takes_away(op):
        return telling[0] - _SIZES
    squares = [one for one in telling if "square" in one]
    if len(telling) == 2 and squares and any("logarithm" in one for one in telling):
        return _LOG_PROBABILITY  # the logarithm of a normal density
    return frozenset.intersection(*telling) if telling else _agreed(op.kinds)


def _takes_away(op: OpInputs) -> bool:
    """Return whether a number of the program that is no eps is taken from a tensor, or that from
    it.
    """
    if op.base not in ("sub", "rsub"):
        return False
    return len(op.kinds) > 1 or any(abs(one) > _MOST_OF_EPS for one in op.scalars[:1])


def _raises(op: OpInputs) -> bool:
    """Return whether the logarithm of a sum is given back the largest of what was summed, which
    was taken away before.
    """
    return any("extreme" in one and "log_sum" not in one for one in op.kinds)


def _difference(op: OpInputs) -> Kinds:
    """Return what a difference of two tensors is: of two log-probabilities, their log-ratio.

    What is noted of an earlier policy comes with the batch, or from outside the step. What one
    number is taken away from many for is no policy: their mean, or their largest.
    """
    first, second = op.kinds
    if "log_sum" in second:
        return _LOG_PROBABILITY
    if "extreme" in first and "extreme" in second:
        return _NORM
    if len({math.prod(value.shape) for value in op.values}) > 1:
        return NOTHING
    ours = ["log_probability" in one for one in op.kinds]
    noted = [
        ("data" in kinds or kinds == _CONSTANT) and len(value.shape) > 0
        for kinds, value in zip(op.kinds, op.values, strict=True)
    ]
    ratio = all(one or other for one, other in zip(ours, noted, strict=True)) and any(ours)
    return frozenset({"log_ratio"}) if ratio else NOTHING


def _same(first: Value, second: Value) -> bool:
    return (
        first.storage is second.storage
        and first.generation == second.generation
        and (first.layout, first.shape) == (second.layout, second.shape)
    )


_RULES: Mapping[frozenset[str], Callable[[OpInputs], Kinds]] = {
    _COMPARES | _ZEROS_AND_ONES: _fixed("mask"),
    _FILLS: _filled,
    _SUMS: _summed,
    _COUNTS: _fixed("count"),
    _PRODUCTS: _contracted,
    _EXTREMES: _extreme,
    _NORMS: _fixed("norm"),
    _DEVIATIONS: _fixed("norm", "deviation"),
    _ROOTS: _rooted,
    _PROBABILITIES: _fixed("probability"),
    _LOG_PROBABILITIES: _fixed("log_probability"),
    CHOOSES: _picked,
    KEEPS: _kept,
    LOGARITHMS: _logarithm,
    frozenset({"exp"}): _exponential,
    frozenset({"logsumexp"}): lambda _: _LOG_SUM,
    frozenset({"abs"}): _fixed("magnitude"),
    frozenset({"square"}): _squared,
    frozenset({"pow"}): _powered,
    frozenset({"mul"}): _multiplied,
    frozenset({"div"}): _divided,
    _MIXES: _mixed,
}


def named(kinds: Kinds) -> tuple[Descent, ...]:
    """Return kinds in the order of their vocabulary, as records hold them."""
    return cast("tuple[Descent, ...]", tuple(sorted(kinds)))
