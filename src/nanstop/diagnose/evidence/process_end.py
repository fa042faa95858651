"""How a dead process ended, and its last operations, for the rules about such."""

from __future__ import annotations

import re

from nanstop.records import Evidence, FailureKind, OpEvent, Signal, SourceLine, op_name
from nanstop.records.vocabulary import DEATHS

BESIDE = ("evidence", "rank", "script", "frame")
"""Names of "exit" signals that stand beside the one that names the end."""
_PLACE = re.compile(r"^(.*):(\d+) in (.*)$")


def unnatural_end(evidence: Evidence, kind: FailureKind) -> Signal | None:
    """Return the "exit" signal that names the end of a process, if it is of this kind."""
    found, incident = evidence.localization, evidence.incident
    if found is None or incident is None or found.key.kind != kind:
        return None
    named = (one for one in incident.signals if one.source == "exit" and one.name not in BESIDE)
    return next(named, None)


def signals_named(evidence: Evidence, name: str) -> tuple[str, ...]:
    """Return the messages of the "exit" signals of a name."""
    signals = evidence.incident.signals if evidence.incident is not None else ()
    return tuple(one.message for one in signals if one.source == "exit" and one.name == name)


def script_line(evidence: Evidence) -> SourceLine | None:
    """Return the script's innermost line at the end of a process, if it is known."""
    found = next(map(_PLACE.match, signals_named(evidence, "script")), None)
    if found is None:
        return None
    return SourceLine(file=found[1], line=int(found[2]), function=found[3])


def last_op(evidence: Evidence) -> OpEvent | None:
    """Return the operation of a dead process that ran last; None where none was recorded."""
    found = evidence.localization
    if found is None or found.key.kind not in DEATHS or not found.growth:
        return None
    return found.growth[-1]


def op_in_title(evidence: Evidence, *, known: bool = True) -> str:
    """Return `` in `mm` ``, or nothing."""
    event = last_op(evidence) if known else None
    return f" in `{op_name(event.op)}`" if event is not None else ""


def spelled(event: OpEvent) -> str:
    """Return an operation with its operands: ``aten.mm.default: bfloat16 [64, 896] x ...``."""
    shapes = (f"{one.dtype} [{', '.join(map(str, one.shape))}]" for one in event.inputs)
    operands = " x ".join(shapes)
    return f"{event.op}: {operands}" if operands else event.op


def last_op_lines(evidence: Evidence, *, fatal: bool = True) -> tuple[str, ...]:
    """Return the last operation and lines of the process, or how to come to know them."""
    event = last_op(evidence)
    frames = signals_named(evidence, "frame")[:1]
    lines = [f"{'last operation' if fatal else 'it was at'} {spelled(event)}"] if event else []
    if event is not None and event.source is not None:
        source = event.source
        lines.append(f"at {source.file}:{source.line} {source.text}".rstrip())
    lines += [f"innermost Python frame {frame}" for frame in frames]
    if event is None:
        lines.append("the operation is not known: `nanstop run --record` notes every one")
    return tuple(lines)
