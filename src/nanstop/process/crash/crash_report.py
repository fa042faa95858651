"""The report of a process that can no longer tell what happened to it."""

from __future__ import annotations

import linecache
import re
import time
from collections.abc import Sequence
from typing import cast

from nanstop.diagnose.diagnose import examine
from nanstop.own_code import is_own
from nanstop.process.crash.flight_file import Flight, OpRecord
from nanstop.process.crash.left_files import ProcessFiles
from nanstop.process.crash.process_end import ProcessEnd
from nanstop.records import (
    Action,
    AuditEntry,
    Evidence,
    FailureKey,
    FailureKind,
    Incident,
    Localization,
    OpEvent,
    Phase,
    Report,
    RunFacts,
    Signal,
    SourceLine,
    StepId,
    TensorStats,
)
from nanstop.session.machine import environment

MAX_EVENTS = 16
"""Operations kept in the report; the flight file's others are older."""
MAX_FRAMES = 4

_KINDS: dict[str, FailureKind] = {
    "signal": "signal",
    "oom_killed": "oom",
    "out_of_memory": "oom",
    "hang": "timeout",
    "exception": "timeout",
    "nonfinite": "timeout",
    "interrupted": "timeout",
}
_SOURCE = re.compile(r"^(.*):(\d+) (.*)$", re.DOTALL)


def crash_report(
    end: ProcessEnd,
    *,
    incident_id: str,
    run_id: str,
    evidence: Sequence[str] = (),
    recorded: bool = False,
) -> Report:
    """Return the report of an end that no exception tells of of its own.

    The last operations are ``localization.growth``, the fatal one last; ``evidence`` and the
    innermost frames of Python are signals beside the one that names the end (source "exit").
    """
    files = end.files
    flight = files.flight if files is not None else None
    known = files.known if files is not None else None
    at = StepId(run=run_id, step=flight.step if flight else 0, rank=known.rank if known else 0)
    place = _localization(end, flight, recorded=recorded)
    incident = Incident(
        id=incident_id,
        at=at,
        phase=place.key.phase,
        signals=tuple(_signals(end, evidence, at)),
        facts=known.facts if known else RunFacts(),
        environment=known.environment if known else environment(),
        time=time.time(),
    )
    given = Evidence(facts=incident.facts, incident=incident, localization=place)
    found = examine(given, "incident")
    action = Action(kind="observe", reason="the process had ended")
    return Report(
        incident=incident,
        localization=place,
        diagnoses=found.diagnoses,
        audit=(AuditEntry(at=at, action=action, incident=incident_id),),
        failures=found.failures,
    )


def fatal_op(flight: Flight | None) -> OpRecord | None:
    """Return the operation that was running, else the last that returned, else None."""
    if flight is None or not flight.ops:
        return None
    return next((op for op in reversed(flight.ops) if not op.done), flight.ops[-1])


def _localization(end: ProcessEnd, flight: Flight | None, *, recorded: bool) -> Localization:
    last = fatal_op(flight)
    events = [op for op in flight.ops if op is not last] if flight else []
    growth = [*events[-MAX_EVENTS + 1 :], last] if last is not None else []
    blind = []
    if flight is not None and flight.torn:
        blind.append(f"{flight.torn} record(s) that were cut off half-way")
    if last is not None and last.done:
        blind.append("what ran after the last operation had returned")
    if last is None and recorded:
        blind.append("any operation: the process ended before its first")
    return Localization(
        key=FailureKey(
            kind=_KINDS[end.kind],
            phase=cast("Phase", last.phase) if last else "forward",
            op=last.op if last else "",
            module=last.module if last else "",
        ),
        first_bad=None,
        origin="unknown",
        growth=tuple(_event(op) for op in growth if op is not None),
        num_ops=flight.ops[-1].number if flight and flight.ops else 0,
        blind_spots=tuple(blind),
    )


def _event(op: OpRecord) -> OpEvent:
    return OpEvent(
        index=op.number,
        phase=cast("Phase", op.phase),
        op=op.op,
        module=op.module,
        source=_source(op.source),
        inputs=tuple(TensorStats(shape=shape, dtype=dtype) for dtype, shape in op.operands),
    )


def _source(text: str) -> SourceLine | None:
    found = _SOURCE.match(text)
    if found is None:
        return None
    file, line, function = found[1], int(found[2]), found[3]
    shown = linecache.getline(file, line).strip()
    return SourceLine(file=file, line=line, function=function, text=shown)


def _signals(end: ProcessEnd, evidence: Sequence[str], at: StepId) -> list[Signal]:
    name, message = end.signal or end.kind, _first_line(end.message)
    found = [Signal(source="exit", name=name, message=message, at=at)]
    found += [Signal(source="exit", name="evidence", message=one, at=at) for one in evidence]
    found += [Signal(source="exit", name="rank", message=one, at=at) for one in end.places]
    if end.files is not None and end.files.place:
        found.append(Signal(source="exit", name="script", message=end.files.place, at=at))
    found += [
        Signal(source="exit", name="frame", message=frame, at=at) for frame in _frames(end.files)
    ]
    return found


def _frames(files: ProcessFiles | None) -> list[str]:
    shown = [one for one in files.frames if not is_own(one[0])] if files is not None else []
    return [f"{file}:{line} in {name}" for file, line, name in shown[:MAX_FRAMES]]


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else ""
