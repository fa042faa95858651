"""Bad tensors that no operation of a step has made: the script wrote them down, or held them
before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from nanstop.frozen import frozen
from nanstop.localize.carried import carried_into
from nanstop.localize.dataflow import of_infinities
from nanstop.localize.positions import BatchLayout
from nanstop.localize.slicing import range_of
from nanstop.numerics.tensors import format_name
from nanstop.own_code import is_library
from nanstop.records import FORMAT_MAX, Localization, OpEvent, Origin, SourceLine
from nanstop.records.values import origin_of
from nanstop.tracing.op_details import OpDetails
from nanstop.tracing.places import source_line
from nanstop.tracing.recorder import Trace, Value
from nanstop.tracing.source.assignments import (
    Assignment,
    is_assignment,
    is_of_class_at,
    line_of,
)
from nanstop.tracing.source.holders import Holder
from nanstop.tracing.source.written import writes_down

_MOST_READERS = 3


def written_number(trace: Trace, index: int, details: OpDetails | None) -> Value | None:
    """Return the bad number that an op reads and that no op has made: it stands in the source, or
    a variable of the script holds it.
    """
    numbers = (v for v in trace.ops[index].inputs if not v.shape)
    for value in numbers:
        storage = value.storage
        if storage.name or value.generation or not range_of(trace, value).is_bad:
            continue
        if storage.line is not None or _holder(value, details) is not None:
            return value
        if carried_into(source_line(trace.ops[index].line)) is not None:
            return value
    return None


def spells_constant(event: OpEvent) -> bool:
    """Return whether the line of an op spells the constant that the op made a bad value of."""
    bad = [value for value in event.scalars if not math.isfinite(value)]
    if not bad or event.source is None:
        return False
    return writes_down(event.source, is_nan=any(map(math.isnan, bad)))


@frozen
class HeldInfinity:
    """An infinity that op ``read_by`` reads of what has held it since before the step. ``name``:
    what a script's variable is called, or the end of a buffer's name. ``line``: that which made it.
    """

    read_by: int
    name: str
    line: SourceLine | None


def held_infinity(
    trace: Trace, index: int, details: Mapping[int, OpDetails]
) -> HeldInfinity | None:
    """Return where all infinities come from that an op reads, or that it makes NaN of, where a
    variable of the script, or a buffer, has held them since before the step.
    """
    births = of_infinities(trace, index)
    origins = births.external or [(index, value) for value in trace.ops[index].inputs]
    read = [(min(at, index), value) for at, value in origins]  # what it reads itself has no reader
    found = [(at, _held_since(trace, value, details.get(at))) for at, value in read]
    known = [HeldInfinity(at, *held) for at, held in found if held is not None]
    is_all = not births.inf and (not births.external or len(known) == len(births.external))
    return known[0] if known and is_all else None


def _held_since(
    trace: Trace, value: Value, details: OpDetails | None
) -> tuple[str, SourceLine | None] | None:
    """Return the name and the line of what has held a bad value since before the step."""
    if value.generation or value.storage.line is not None or not range_of(trace, value).has_inf:
        return None
    holder, name = _holder(value, details), value.storage.name or ""
    origin = origin_of(value.storage.name)
    if origin not in ("unknown", "from_batch", "from_buffer"):
        return None
    if holder is not None and holder.before:
        return holder.name, holder.line
    return (name.rpartition(".")[2].rpartition(" ")[2], None) if origin == "from_buffer" else None


def readers(trace: Trace, found: Localization) -> tuple[SourceLine, ...]:
    """Return the lines of the first operations that read what was not finite before, or what came
    of it, and hand it on; () of a failure that comes of nothing of the script's.
    """
    if found.origin not in ("from_batch", "from_constant") or found.first_bad is None:
        return ()
    lines: dict[tuple[str, int], SourceLine] = {}
    for op in trace.ops[found.first_bad.index :]:
        at = source_line(op.line) if op.phase != "backward" else None
        if at is None or (at.file, at.line) in lines:
            continue
        carries = (
            any(range_of(trace, one).is_bad for one in part) for part in (op.inputs, op.outputs)
        )
        if all(carries):
            lines[at.file, at.line] = at
        if len(lines) == _MOST_READERS:
            break
    return tuple(lines.values())


def _most_of_one_number(value: Value) -> float:
    """Return the largest number that the format of a single number has."""
    return math.inf if value.shape else FORMAT_MAX.get(format_name(value.dtype), math.inf)


def as_constant(
    found: Localization, value: Value, details: OpDetails | None, batch: BatchLayout
) -> Localization | None:
    """Return what is said where a bad tensor is the script's own, None where it is not: written
    down by a line of the step, where it is born then, or held by a variable and no part of the
    ``batch``.
    """
    storage, holder = value.storage, _holder(value, details)
    origin = origin_of(storage.name)
    if value.generation or origin == "from_state":
        return None
    read = found.first_bad.source if found.first_bad is not None else None
    is_entry = origin in ("unknown", "from_batch")
    if storage.line is None and holder is None and is_entry:
        earlier = carried_into(read)
        if earlier is not None:
            return _held(found, "carried_over", earlier)
    if storage.name and (holder is None or not _is_known(holder) or not batch.is_beside(value)):
        return None
    if origin == "from_buffer" and holder is not None and not holder.declared:
        return None
    if storage.line is None and holder is None and not _is_one_number(details):
        return None
    if storage.line is not None or holder is None:
        # One number that nobody holds is of the expression that reads it.
        made = source_line(storage.line) or read
        if made is None or storage.name:
            return None
        return replace(
            found,
            origin="born_here",
            culprit=None,
            made=made,
            is_written=writes_down(
                made, is_nan=found.key.kind == "nan", most=_most_of_one_number(value)
            ),
            blind_spots=(),
        )
    return _held(found, "from_constant", holder)


def with_holder(found: Localization, value: Value, details: OpDetails | None) -> Localization:
    """Return ``found`` with the variable that holds a bad entry of the batch, and the statement
    that gave it its value, where the source says: it may be the script's own arithmetic.
    """
    holder = _holder(value, details)
    if origin_of(value.storage.name) != "from_batch" or value.generation or holder is None:
        return found
    if holder.line is None or not is_assignment(holder.line):
        return found
    return replace(found, held_in=holder.name, held_at=holder.line)


def with_writer(found: Localization, root: nn.Module) -> Localization:
    """Return ``found`` with the only line of its module's class that writes to a buffer that was
    not finite before the step.
    """
    owner, _, name = (found.culprit or "").rpartition(".")
    module = dict(root.named_modules()).get(owner) if found.origin == "from_buffer" else None
    code = getattr(type(module).__init__, "__code__", None)
    if code is None or is_library(code.co_filename):
        return found
    file, first = code.co_filename, code.co_firstlineno
    line = line_of(Assignment(file, first, name, attribute=True, buffer=True), is_written=True)
    inside = line is not None and is_of_class_at(file, line.line, first)
    return replace(found, held_at=line) if inside else found


def _held(found: Localization, origin: Origin, holder: Holder) -> Localization:
    """Return ``found`` as what a variable of the script was given elsewhere."""
    return replace(
        found,
        origin=origin,
        culprit=holder.name,
        made=holder.line,
        is_written=holder.line is not None
        and writes_down(holder.line, is_nan=found.key.kind == "nan"),
        made_before=holder.before,
        blind_spots=(),
    )


def _is_known(holder: Holder) -> bool:
    """Return whether a tensor was held before the step, or is of a class of the script's own that
    writes to it in place.
    """
    return holder.before or (holder.declared and holder.line is not None)


def _is_one_number(details: OpDetails | None) -> bool:
    """Return whether all that an op reads and is not finite is single numbers."""
    return details is not None and not any(x.shape for x in details.inputs if not x.finite)


def _holder(value: Value, details: OpDetails | None) -> Holder | None:
    """Return who holds a bad operand: that of its shape, else the first."""
    if details is None or len(details.held) != len(details.inputs):
        return None
    pairs = zip(details.inputs, details.held, strict=True)
    held = [(stats.shape == value.shape, holder) for stats, holder in pairs if holder]
    return next((h for alike, h in held if alike), None) or next((h for _, h in held), None)
