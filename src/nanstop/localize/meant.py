"""Infinities that a program means: it fills them in, they are part of a mask, they hide choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from nanstop.localize import dataflow, slicing
from nanstop.localize.provenance import CHOOSES, HIDE_HIGHEST, HIDE_LOWEST, KEEPS, Kinds
from nanstop.localize.slicing import Births, carries, range_of
from nanstop.records import op_kind
from nanstop.records.vocabulary import HiddenChoice
from nanstop.tracing.op_details import OpDetails
from nanstop.tracing.recorder import Op, Trace

_TERM_BY_TERM = frozenset({"mul", "add", "sub", "rsub", "div"})
"""Ops of two operands at which something else may be chosen in place of what is hidden."""
_SIGNAL: Kinds = frozenset({"parameter", "state", "data"})


def is_meant(
    trace: Trace, index: int, details: Mapping[int, OpDetails], made: Sequence[Kinds]
) -> bool:
    """Return whether an op's infinities are the program's own: filled in, or part of a mask.

    A mask is built of constants, positions and ids alone, or added to scores where it stands.
    """
    op = trace.ops[index]
    edges = [range_of(trace, o) for o in op.outputs if o.slot >= 0]
    if not edges or any(edge.has_nan for edge in edges):
        return False
    if slicing.is_placed(op):
        return True
    look = details.get(index)
    if look is not None and look.masking:
        return True
    negative = all(edge.high != math.inf for edge in edges)
    return negative and not made[index] & _SIGNAL


def behind(trace: Trace, births: Births, born: int | None) -> int | None:
    """Return the op that was left with hidden choices, or that counts one, before op ``born`` made
    NaN of that; where nothing was born, before what failed.

    A product with a mask is to blame itself: it could choose.
    """
    if born is None:
        return _uncovered(trace, births)
    if op_kind(trace.ops[born].name) in _TERM_BY_TERM:
        return None
    return _uncovered(trace, dataflow.of_infinities(trace, born))


def _uncovered(trace: Trace, births: Births) -> int | None:
    """Return the op that is left with nothing but choices that an infinity hides, or that counts
    one: a logsumexp of a row that is hidden in full, the sum of all log-probabilities.

    -Inf hides a choice where a softmax reads it, or what is like it. None where nothing does: what
    is averaged as it is was wrong to be filled in.
    """
    hidden: set[int] = set()
    for op in (trace.ops[index] for index in births.path):
        read = [value for value in op.inputs if carries(trace, value)]
        is_hidden = any(id(value.storage) in hidden for value in read)
        if not read or not (is_hidden or _hides(op, [range_of(trace, value) for value in read])):
            continue
        if _picks(op) or _reduces(trace, op):
            return op.index
        hidden |= {id(value.storage) for value in op.outputs}
    return None


def hidden_choice(trace: Trace, index: int, details: Mapping[int, OpDetails]) -> HiddenChoice:
    """Return what op ``index``, of which a failure was born, makes of choices that are hidden."""
    op, look = trace.ops[index], details.get(index)
    read = [value for value in op.inputs if carries(trace, value)]
    if not read or any(range_of(trace, value).has_nan for value in read):
        return ""
    is_row = look is not None and look.fully_masked_rows > 0
    if is_row and _takes_own_away(trace, op):
        return "row"
    if _hides(op, [range_of(trace, value) for value in read]):
        return "row" if is_row or _reduces(trace, op) else ""
    if any(range_of(trace, value).has_nan for value in op.outputs):
        return ""
    return "chosen" if _picks(op) else "counted" if _reduces(trace, op) else ""


def _takes_own_away(trace: Trace, op: Op) -> bool:
    """Return whether an op takes away from scores what a softmax-like op made of them: their
    logsumexp, their largest.
    """
    if op_kind(op.name) != "sub" or len(op.inputs) != 2:
        return False
    scores, own = op.inputs
    made_of = (trace.ops[index] for index in slicing.writers(trace, own))
    return any(
        op_kind(one.name) in HIDE_LOWEST and any(v.storage is scores.storage for v in one.inputs)
        for one in made_of
    )


def _hides(op: Op, read: Sequence[slicing.Range]) -> bool:
    """Return whether infinities have no part in what an op makes of the other numbers of a row."""
    base = op_kind(op.name)
    if base in HIDE_HIGHEST:
        return all(one.low != -math.inf for one in read)
    return base in HIDE_LOWEST and all(one.high != math.inf for one in read)


def _picks(op: Op) -> bool:
    """Return whether an op picks single numbers of each row (last axis) by ids, and no rows."""
    base = op_kind(op.name)
    read, *ids = op.inputs
    if base == "index":
        by_places = sum(len(one.shape) if one.dtype is torch.bool else 1 for one in ids)
        return by_places == len(read.shape)
    alike = any(one.shape[-1:] == read.shape[-1:] for one in op.outputs)
    return base in CHOOSES and not (base == "gather" and alike)


def _reduces(trace: Trace, op: Op) -> bool:
    """Return whether an op makes fewer numbers of what is infinite."""
    read = max(math.prod(value.shape) for value in op.inputs if carries(trace, value))
    bad = (math.prod(o.shape) for o in op.outputs if range_of(trace, o).is_bad)
    return op_kind(op.name) not in KEEPS and max(bad, default=read) < read
