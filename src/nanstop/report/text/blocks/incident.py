"""An incident as plain sentences, in the fixed order:
what, what was done about it, where, evidence, certainty, help with its proof, pointer.
"""

from __future__ import annotations

from collections.abc import Mapping

from nanstop.records import Diagnosis, Report
from nanstop.records.line_forms import is_typed_beside
from nanstop.report.text.blocks.block import Block, pointer
from nanstop.report.text.blocks.evidence import evidence
from nanstop.report.text.blocks.help import help_blocks
from nanstop.report.text.blocks.place import event_blocks, place_blocks
from nanstop.report.text.in_code import is_code

DONE: Mapping[str, str] = {
    "continue": "nothing changed",
    "observe": "nothing changed",
    "redo": "the step was run again",
    "adopt": "the cure stays on",
    "rollback": "went back to good weights",
    "quarantine": "data left out",
    "skip": "update skipped",
    "stop": "training stopped",
}
"""What was done about a failure, in a word or two."""
_SAID = {"skip": "this optimizer update was skipped (weights unchanged)", "stop": "training stops"}
_SAID |= {"observe": "nothing was changed", "continue": "nothing was changed"}
_UNDIAGNOSED = Diagnosis(
    code="NS000", title="not diagnosed", cause="no rule was run", confidence="possible"
)


def incident_blocks(
    report: Report, record: str | None = None, code: tuple[Block, ...] = ()
) -> tuple[Block, ...]:
    """Return the blocks of an incident. ``record``: path of its ``report.json``, to point to.
    ``code``: what the cure is in the user's code.
    """
    best = report.diagnoses[0] if report.diagnoses else _UNDIAGNOSED
    found = report.localization
    event = found.first_bad if found is not None else None
    where = event_blocks(event, best.where) if event is not None else place_blocks(best.where)
    return (
        Block("error", f"error[{best.code}]: ", (_headline(best, report),)),
        *_done(report),
        *where,
        *evidence(best, report),
        *_cures(best, report, code),
        pointer(best.code, record),
    )


def _cures(best: Diagnosis, report: Report, code: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return what helps, with the code behind what it is of."""
    helps = help_blocks(best, report.proof)
    in_code = tuple(one for one in code if is_code(one))
    allowed = tuple(one for one in code if not is_code(one))
    if best.at_source is not None:  # what mends the data comes first, and is what is typed
        return (*helps[:1], *in_code, *helps[1:2], *allowed, *helps[2:])
    if is_typed_beside(report.proof):
        return (*helps[:1], *allowed, *helps[1:2], *in_code, *helps[2:])
    return (*helps[:1], *in_code, *allowed, *helps[1:])


def _headline(best: Diagnosis, report: Report) -> str:
    at, found = report.incident.at, report.localization
    phase = found.key.phase if found is not None else report.incident.phase
    micro = f"micro-batch {at.micro}" if at.micro is not None else ""
    again = f"seen {report.count} times" if report.count > 1 else ""
    rank = f"rank {at.rank}" if report.incident.facts.world_size > 1 or at.rank else ""
    parts = (best.title, phase, f"step {at.step}", micro, rank, again)
    return ", ".join(part for part in parts if part)


def _done(report: Report) -> tuple[Block, ...]:
    """Return what was done about it in the end."""
    if not report.audit:
        return ()
    done = report.audit[-1]
    reason = f": {done.action.reason}" if done.action.reason else ""
    outcome = f"; {done.outcome}" if done.outcome.startswith("failed") else ""
    is_raised = any(signal.source == "exception" for signal in report.incident.signals)
    to_come = is_raised and done.action.kind == "adopt"  # the script has its exception by now
    said = _SAID["observe"] if to_come else _SAID.get(done.action.kind, "the run goes on")
    blocks = [Block("done", "  = ", (f"{said}{reason}{outcome}",))]
    found, facts = report.localization, report.incident.facts
    is_redone = done.action.kind in ("redo", "adopt", "quarantine") and not to_come
    if is_redone and facts.host == "loop" and found is not None and "loss" in found.reaches:
        text = "the loss that the script prints for this step is still that of the failed run"
        blocks.append(Block("done", "  = ", (text,)))  # it has that tensor by now
    return tuple(blocks)
