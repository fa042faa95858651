"""What lies before and after an operation of a trace: growth, numbers that vanish, who reads it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from nanstop.localize.provenance import KEEPS, LOGARITHMS, Kinds, kinds_of
from nanstop.localize.slicing import (
    Births,
    carries,
    is_placed,
    range_of,
    reaching,
    trace_back,
    writers,
)
from nanstop.numerics.tensors import HALF, format_name
from nanstop.records import FORMAT_MAX, LineOp, op_kind
from nanstop.records.formats import vanishes
from nanstop.records.values import origin_of
from nanstop.tracing.operators import ADDITIVE
from nanstop.tracing.places import source_line
from nanstop.tracing.recorder import Op, Trace, Value
from nanstop.tracing.source.written import writes_down

_FLOORS = frozenset({"clamp", "clamp_min", "maximum"})
_ROOTS = frozenset({"sqrt", "rsqrt", "reciprocal", "pow", "div"})
_BATCH: Kinds = frozenset({"data", "ids"})
_CHOICES: Kinds = frozenset({"chosen", "ratio"})
_EXPONENTIALS = frozenset(
    {"exp", "exp2", "_softmax", "softmax", "sigmoid", "softplus", "erfc", "special_ndtr"}
)
"""Functions that are above 0 of each finite number."""
_UNBOUNDED = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})
_PRODUCTS = frozenset({"mul", "div", "pow", "square", "prod"})
_SQUARES = frozenset({"mse_loss"})
"""Products of a difference with itself."""
_CASTS = frozenset({"_to_copy"})
_SUMS = frozenset({"sum", "mean", "add", "mm", "bmm", "mv", "dot", "addmm"})
_CHECK = "_linalg_check_errors"
_MOST_IN_LINES = 1024
_WEIGHS = frozenset({"mul", "dot", "mv", "mm", "bmm"})


def growth_chain(
    trace: Trace, index: int, made: Sequence[Kinds], *, factor: float = 8.0, limit: int = 6
) -> tuple[int, ...]:
    """Return ops upstream of ``index``, oldest first, whose output is ``factor`` times larger than
    all they read.

    At each op the largest activation is followed:
    of the operands made from the batch, those that are not broadcast.
    """
    chain: list[int] = []
    seen: set[int] = set()
    current: int | None = index
    while current is not None and current not in seen and len(chain) < limit:
        seen.add(current)
        op = trace.ops[current]
        read = _activation(trace, op, made)
        written = max((range_of(trace, o).absmax for o in op.outputs), default=0.0)
        if read is None:
            break
        before = range_of(trace, read).absmax
        if current != index and 0.0 < factor * before < written < math.inf:
            chain.append(current)
        current = next(writers(trace, read), None)
    return tuple(reversed(chain))


def _activation(trace: Trace, op: Op, made: Sequence[Kinds]) -> Value | None:
    measured = [v for v in op.inputs if v.slot >= 0 and not range_of(trace, v).is_bad]
    activations = [v for v in measured if kinds_of(trace, made, v) & _BATCH] or measured
    most = max((math.prod(v.shape) for v in activations), default=0)
    whole = [v for v in activations if math.prod(v.shape) == most]
    return max(whole, key=lambda v: range_of(trace, v).absmax, default=None)


def lines_in_half(trace: Trace, index: int, *, limit: int = 4) -> tuple[LineOp, ...]:
    """Return the first op in half precision of each line in its module, or outside of all, that an
    op, or of a derivative its function, goes back to, and whether the line casts to that: the
    latest line first. What other modules make ends the way, and so do many operations.
    """
    of = trace.ops[index].made_by
    start = index if of is None else of
    queue, seen = deque([start]), set[int]()
    by_line: dict[Any, list[int]] = {}
    while queue and len(seen) < _MOST_IN_LINES:
        op = trace.ops[at := queue.popleft()]
        if at in seen or op.module != trace.ops[start].module or op.line is None:
            continue
        seen.add(at)
        if any(value.dtype in HALF for value in (*op.inputs, *op.outputs)):
            by_line.setdefault(op.line, []).append(at)
        queue.extend(writer for value in op.inputs for writer in writers(trace, value))
    latest = sorted(by_line.values(), key=max, reverse=True)[:limit]
    found = (_first_in_half(trace, ops) for ops in latest)
    return tuple(one for one in found if one is not None)


def _first_in_half(trace: Trace, ops: Sequence[int]) -> LineOp | None:
    """Return the first op of a line that reads half precision, or else the first."""
    reads = [at for at in ops if any(v.dtype in HALF for v in trace.ops[at].inputs)]
    casts = any(op_kind(trace.ops[at].name) in _CASTS and at not in reads for at in ops)
    first = trace.ops[min(reads or ops)]
    source = source_line(first.line)
    name, phase = op_kind(first.name), first.phase
    return source and LineOp(source=source, op=name, phase=phase, casts=casts)


def lost(trace: Trace, op: Op, divisor: Value | None, *, of_function: bool) -> int | None:
    """Return the op that should have kept from 0 what ``op`` divides by or takes the logarithm of
    by a number that is rounded to 0 itself, or that has rounded that to 0, or what the derivative
    is taken at (a hook's, it may be). ``of_function``: whether ``op`` is of a function of a script.
    """
    of = trace.ops[op.made_by] if op.made_by is not None else op
    logged = of.inputs[0] if op_kind(op.name) in LOGARITHMS and of.inputs else None
    kept = logged if logged is not None else divisor
    found = None if kept is None else vanished_number(trace, kept)
    is_derived = of is not op
    if (logged is not None and found is None) or (is_derived and of.inputs):
        found = rounded_to_zero(trace, of.inputs[0])
    if found is None and divisor is not None and (is_derived or of_function):
        found = rounded_to_zero(trace, divisor)
    return found


def vanished_number(trace: Trace, divisor: Value, *, limit: int = 8) -> int | None:
    """Return the op that kept a divisor from 0 by a number that its format rounds to 0: an eps of
    1e-12 in float16. None where there is no such op, followed through roots and casts.
    """
    queue, seen = deque(writers(trace, divisor)), set[int]()
    while queue and len(seen) < limit:
        index = queue.popleft()
        if index in seen:
            continue
        seen.add(index)
        op = trace.ops[index]
        base = op_kind(op.name).removeprefix("_foreach_")
        if base in ADDITIVE | _FLOORS and any(_vanishes(op, number) for number in op.scalars):
            return index
        if base in _ROOTS | _FLOORS | KEEPS:
            queue.extend(writer for value in op.inputs for writer in writers(trace, value))
    return None


def rounded_to_zero(trace: Trace, value: Value, *, limit: int = 1024) -> int | None:
    """Return the op that made 0 of what is not 0, before a value that holds zeros: an exponential
    of finite numbers, a product or a cast of numbers above 0, a power of one tensor that is all 0.
    None where there is no such op, followed through sums and products of what is 0 at least.
    """
    queue, seen = deque(writers(trace, value)), set[int]()
    while queue and len(seen) < limit:
        index = queue.popleft()
        op = trace.ops[index]
        least = min((range_of(trace, o).low for o in op.outputs if o.slot >= 0), default=1.0)
        if index in seen or least != 0.0:
            continue
        seen.add(index)
        base = op_kind(op.name)
        read = [range_of(trace, one) for one in op.inputs if one.slot >= 0]
        if base in _EXPONENTIALS and not any(one.is_bad for one in read):
            return index
        if base in _PRODUCTS | _CASTS and _is_of_positive(trace, op):
            return index
        if base in _PRODUCTS and _is_square_of_small(trace, op):
            return index
        if base in _PRODUCTS | _SUMS | KEEPS:
            queue.extend(writer for one in op.inputs for writer in writers(trace, one))
    return None


def exploded_number(trace: Trace, index: int, *, limit: int = 16) -> int | None:
    """Return the exponential that made numbers of more than half the exponents of the format beyond
    which op ``index`` went. None where there is none, followed through products, sums and casts
    along what is largest.
    """
    ends = (FORMAT_MAX.get(format_name(one.dtype), math.inf) for one in trace.ops[index].outputs)
    half, current = math.sqrt(max(ends, default=math.inf)), index
    for _ in range(limit):
        op = trace.ops[current]
        base = op_kind(op.name)
        if current != index and base in _UNBOUNDED:
            made = (range_of(trace, one).absmax for one in op.outputs if one.slot >= 0)
            return current if any(half < size < math.inf for size in made) else None
        if base not in _PRODUCTS | _SQUARES | _SUMS | KEEPS:
            return None
        read = [one for one in op.inputs if one.slot >= 0 and not range_of(trace, one).is_bad]
        largest = max(read, key=lambda one: range_of(trace, one).absmax, default=None)
        wrote = next(writers(trace, largest), None) if largest is not None else None
        if wrote is None:
            return None
        current = wrote
    return None


def _is_of_positive(trace: Trace, op: Op) -> bool:
    """Return whether all that an op reads is above 0 and finite: a mask is not."""
    if not op.inputs or 0.0 in op.scalars or any(one.slot < 0 for one in op.inputs):
        return False
    read = [range_of(trace, one) for one in op.inputs]
    return all(0.0 < one.low <= one.high < math.inf for one in read)


def _is_square_of_small(trace: Trace, op: Op) -> bool:
    """Return whether an op makes nothing but 0 of one tensor that is not 0 and no other operand:
    a power of it, or its product with itself. A product along a dimension is 0 with one factor.
    """
    if op_kind(op.name) == "prod" or any(one.slot < 0 for one in (*op.inputs, *op.outputs)):
        return False
    if any(number == 0.0 or math.isinf(number) for number in op.scalars):
        return False
    read = {(id(one.storage), one.generation, one.layout) for one in op.inputs}
    ranges = [range_of(trace, one) for one in op.inputs]
    is_one_number = len(read) == 1 and all(0.0 < one.absmax < math.inf for one in ranges)
    return is_one_number and all(range_of(trace, one).absmax == 0.0 for one in op.outputs)


def _vanishes(op: Op, number: float) -> bool:
    return any(vanishes(number, format_name(value.dtype)) for value in op.outputs)


def entries_of(trace: Trace, value: Value) -> tuple[str, ...]:
    """Return the names of the batch's entries that a value was made of."""
    read = [v for index in sorted(reaching(trace, [value])) for v in trace.ops[index].inputs]
    names = [one.storage.name or "" for one in (*read, value)]
    entries = (name[len("batch[") : -1] for name in names if origin_of(name) == "from_batch")
    return tuple(dict.fromkeys(entries))


def weighs_choices(trace: Trace, made: Sequence[Kinds], value: Value) -> bool:
    """Return whether a value, or what is made of it, is multiplied with log-probabilities of what
    was chosen, or with ratios of them, that it has no part in: as a reward is. What is itself
    compared with log-probabilities, by a difference, is none: those of a reference.
    """
    tainted = {id(value.storage)}
    for op in _after(trace, -1):
        own = [id(v.storage) in tainted for v in op.inputs]
        if not any(own):
            continue
        others = [v for v, is_own in zip(op.inputs, own, strict=True) if not is_own]
        if any(kinds_of(trace, made, v) & _CHOICES for v in others):
            base, is_itself = op_kind(op.name), any(v.storage is value.storage for v in op.inputs)
            if is_itself and base in ("sub", "rsub"):
                return False
            if base in _WEIGHS:
                return True
        tainted |= {id(v.storage) for v in op.outputs}
    return False


def read_by(trace: Trace, index: int, *, limit: int = 4) -> tuple[str, ...]:
    """Return the first ops (``bmm``, ``topk``) that compute with what an op wrote, passed on as it
    is (cast, dropped out, masked) as often as need be.
    """
    passed = {id(value.storage) for value in trace.ops[index].outputs}
    found: dict[str, None] = {}
    for op in _after(trace, index):
        if not any(id(value.storage) in passed for value in op.inputs):
            continue
        base = op_kind(op.name)
        if base in KEEPS and base != "topk":
            passed |= {id(value.storage) for value in op.outputs}
        else:
            found[base] = None
        if len(found) == limit:
            break
    return tuple(found)


def turned_over(trace: Trace, births: Births, born: int | None) -> int | None:
    """Return the first of the ops that made negative infinities whose sign was changed before op
    ``born`` made NaN of positive ones, else ``born``: no mask is made so.
    """
    if born is None or born not in births.nan:
        return born
    if not any(range_of(trace, value).high == math.inf for value in trace.ops[born].inputs):
        return born
    computed = (i for i in births.inf if i < born and not is_placed(trace.ops[i]))
    return min((i for i in computed if _is_turned_over(trace, i, born)), default=born)


def refused(trace: Trace) -> int | None:
    """Return the op that raised last, None where none did; for torch's check of what a
    decomposition says of itself, the decomposition.
    """
    raised = next((op for op in reversed(trace.ops) if op.raised), None)
    if raised is None or op_kind(raised.name) != _CHECK:
        return None if raised is None else raised.index
    return next(writers(trace, raised.inputs[0]), raised.index)


def fills(trace: Trace, index: int) -> tuple[int, ...]:
    """Return the fills that wrote all infinities that op ``index`` was given, the last first; ()
    where an operation computed one of them. What reads a number that its own line writes down is
    a fill, too.
    """
    births = of_infinities(trace, index)
    placed = all(is_placed(trace.ops[i]) or _copies_number(trace, i) for i in births.inf)
    if not placed or not all(_is_filled_in(trace, *one) for one in births.external):
        return ()
    return tuple(sorted({*births.inf, *(reader for reader, _ in births.external)}, reverse=True))


def emptied(trace: Trace, index: int) -> Iterator[int]:
    """Yield the op of an earlier line that left no element of what op ``index`` reads."""
    current = index
    while True:
        empty = next((v for v in trace.ops[current].inputs if not math.prod(v.shape)), None)
        made = None if empty is None else next(writers(trace, empty), None)
        if made is None or made >= current:
            return
        if any(math.prod(value.shape) for value in trace.ops[made].inputs):
            if trace.ops[made].line != trace.ops[index].line:
                yield made
            return
        current = made


def of_infinities(trace: Trace, index: int) -> Births:
    """Return where the infinities come from of which an op made NaN, or infinities that it writes
    no number of its own for; nowhere where it made none.
    """
    op = trace.ops[index]
    read = [value for value in op.inputs if value.slot >= 0 and range_of(trace, value).has_inf]
    made = [range_of(trace, o) for o in op.outputs if o.slot >= 0]
    if not any(one.has_nan for one in made):
        read = [value for value in read if carries(trace, value)]
    return trace_back(trace, read) if any(one.is_bad for one in made) else Births((), (), ())


def _is_filled_in(trace: Trace, reader: int, value: Value) -> bool:
    """Return whether an op before the one that is explained, which stands for what nobody else
    reads, writes in a number of its own line.
    """
    return reader < len(trace.ops) and _writes_down(trace, reader, value)


_WRITE_NUMBERS = frozenset({"copy", "index_put"})
"""What puts a number of its line into a whole tensor, or where ids or a mask say."""


def _copies_number(trace: Trace, index: int) -> bool:
    """Return whether an op puts one number that stands in its own line into a tensor."""
    op = trace.ops[index]
    numbers = (value for value in op.inputs if not value.shape)
    return op_kind(op.name) in _WRITE_NUMBERS and any(
        _writes_down(trace, index, v) for v in numbers
    )


def _writes_down(trace: Trace, reader: int, value: Value) -> bool:
    """Return whether an op reads a number that stands in its own line."""
    line = source_line(trace.ops[reader].line)
    is_of_program = not value.storage.name and not value.generation
    return is_of_program and line is not None and writes_down(line, is_nan=False)


def _is_turned_over(trace: Trace, index: int, born: int) -> bool:
    """Return whether negative infinities that op ``index`` made, alone or in what was made of
    them, have become positive ones before op ``born``.
    """
    if any(range_of(trace, value).high == math.inf for value in trace.ops[index].outputs):
        return False
    hidden = {id(value.storage) for value in trace.ops[index].outputs}
    for op in _after(trace, index):
        if op.index >= born:
            return False
        read = [value for value in op.inputs if carries(trace, value)]
        if not any(id(value.storage) in hidden for value in read):
            continue
        if any(range_of(trace, value).high == math.inf for value in op.outputs if value.slot >= 0):
            return all(range_of(trace, value).high != math.inf for value in read)
        hidden |= {id(value.storage) for value in op.outputs if carries(trace, value)}
    return False


def _after(trace: Trace, index: int) -> Iterator[Op]:
    return (op for op in trace.ops[index + 1 :] if op.phase not in ("backward", "optimizer"))


def forward_outputs(trace: Trace, op: Op) -> tuple[Value, ...]:
    """Return what the forward op returned whose gradient ``op`` computes, () where it was not
    recorded.
    """
    made = None if op.made_by is None else trace.ops[op.made_by]
    return made.outputs if made is not None and made.name == op.forward else ()
