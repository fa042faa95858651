"""A report as plain sentences, in the fixed order:
what, what was done about it, where, evidence, certainty, help with its proof, pointer.

A block is one logical line; ``report.text`` and ``report.html.notebook`` wrap and colour it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from nanstop.diagnose.evidence.reading import bad_counts
from nanstop.frozen import frozen
from nanstop.records import (
    FORMAT_MAX,
    Atom,
    BatchRows,
    Diagnosis,
    Incident,
    Localization,
    OpEvent,
    Proof,
    Replay,
    Report,
    TensorStats,
)
from nanstop.records.remedies import describe, safety_of
from nanstop.report.text.nearness import alternative_in_brackets, exact_fails, proof_in_brackets
from nanstop.wording import counted, number

MAX_TENSORS = 6
MAX_OUTPUTS = 3
MAX_POSITIONS = 4
MAX_UNTRIED = 3
MAX_SOURCE = 100
MAX_ROWS = 16


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


@frozen
class Block:
    """One line before wrapping. ``cells`` come after ``lead``, ``gap`` apart, and wrap singly."""

    kind: str
    lead: str
    cells: tuple[str, ...]
    gap: str = "    "


def incident_blocks(
    report: Report, record: str | None = None, code: tuple[Block, ...] = ()
) -> tuple[Block, ...]:
    """Return the blocks of an incident. ``record``: path of its ``report.json``, to point to.
    ``code``: what the cure is in the user's code.
    """
    best = report.diagnoses[0] if report.diagnoses else _UNDIAGNOSED
    found = report.localization
    event = found.first_bad if found is not None else None
    where = _event_blocks(event, best.where) if event is not None else _place_blocks(best.where)
    helps = _help(best, report.proof)
    return (
        Block("error", f"error[{best.code}]: ", (_headline(best, report),)),
        *_done(report),
        *where,
        *_evidence(best, report),
        *helps[:1],
        *code,
        *helps[1:],
        _pointer(best.code, record),
    )


REASSURING = ("NS802",)
"""Findings that say that all is well."""


def severity(code: str) -> Literal["note", "warning"]:
    """Return how a finding that is no failure is shown: what is no fault is no warning."""
    return "note" if code in REASSURING else "warning"


def finding_label(diagnosis: Diagnosis) -> str:
    """Return ``warning[NS102]`` or ``note[NS802]``."""
    return f"{severity(diagnosis.code)}[{diagnosis.code}]"


def finding_blocks(diagnosis: Diagnosis) -> tuple[Block, ...]:
    """Return the blocks of a finding that is no failure."""
    texts = (diagnosis.cause, *diagnosis.lines, *_certainty(diagnosis, "this finding"))
    return (
        Block("warning", f"{finding_label(diagnosis)}: ", (_finding_headline(diagnosis),)),
        *_place_blocks(diagnosis.where),
        *(Block("evidence", "  = ", (text,)) for text in texts if text),
        *_untried(diagnosis.remedies),
        _pointer(diagnosis.code, None),
    )


def mended_too(finding: Diagnosis, by: str) -> str:
    """Return the line of a finding whose help another one, of the code ``by``, has told."""
    place = f" at `{finding.where}`" if finding.where else ""
    told = f"{finding.code}, {finding.title}{place}"
    return f"also {told}: {finding.cause}; the help of {by} mends it too"


_HELD = ("from_constant", "from_buffer", "from_state", "carried_over")
"""Origins of what is bad whatever the batch is."""
_UNDIAGNOSED = Diagnosis(
    code="NS000", title="not diagnosed", cause="no rule was run", confidence="possible"
)


def _headline(best: Diagnosis, report: Report) -> str:
    at, found = report.incident.at, report.localization
    phase = found.key.phase if found is not None else report.incident.phase
    micro = f"micro-batch {at.micro}" if at.micro is not None else ""
    again = f"seen {report.count} times" if report.count > 1 else ""
    rank = f"rank {at.rank}" if report.incident.facts.world_size > 1 or at.rank else ""
    parts = (best.title, phase, f"step {at.step}", micro, rank, again)
    return ", ".join(part for part in parts if part)


def _finding_headline(finding: Diagnosis) -> str:
    seen = finding.seen
    if seen is None:
        return finding.title
    micro = f"micro-batch {seen.micro}" if seen.micro is not None else ""
    parts = (finding.title, seen.phase, f"step {seen.step}", micro)
    return ", ".join(part for part in parts if part)


def _place_blocks(where: str) -> tuple[Block, ...]:
    place = "the training loop of the script" if where == "loop" else _layer(where)
    return (Block("where", "  --> ", (place,)),) if place else ()


def _event_blocks(event: OpEvent, where: str) -> tuple[Block, ...]:
    own = event.phase != "loss" and event.source is not None and event.source.function == "forward"
    outside = "the model's own forward" if own else "outside any module"
    layer = _layer(event.module, event.module_class) if event.module else _layer(where)
    place: tuple[str, ...] = (layer or outside,)
    if event.source is not None:
        file = event.source.file.replace("\\", "/").rsplit("/", 1)[-1]
        place = (*place, f"{file}:{event.source.line}", _shortened(event.source.text.strip()))
    return (Block("where", "  --> ", tuple(cell for cell in place if cell)), *_tensors(event))


def _layer(name: str, kind: str = "") -> str:
    """Return the name of a module or a parameter, said as a layer where it is a number alone. A
    module that a container counts is told with its ``kind``, the name of its class.
    """
    beginning, end = name.partition(".")[0], name.rpartition(".")[2]
    said = name
    if beginning.isdigit():
        said = f"layer {name} of the model" if name == end else f"{name} of the model"
    return f"{said} ({kind})" if kind and end.isdigit() else said


def _shortened(line: str) -> str:
    """Return a line of source code, its end left out where it is very long."""
    return line if len(line) <= MAX_SOURCE else f"{line[: MAX_SOURCE - 3].rstrip()}..."


def _tensors(event: OpEvent) -> tuple[Block, ...]:
    """Return a row of facts a tensor, in columns; outputs last, because they are what went wrong.

    Of an op with many outputs only the bad ones are shown.
    """
    bad = [stats for stats in event.outputs if not stats.finite]
    outputs = list(dict.fromkeys(_row("output", s) for s in bad or event.outputs))[:MAX_OUTPUTS]
    inputs = list(dict.fromkeys(_row("input", s) for s in event.inputs))
    left_out = len(inputs) - (MAX_TENSORS - len(outputs))
    rows = [*inputs[: MAX_TENSORS - len(outputs)], *outputs]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    blocks = [Block("tensor", "      ", tuple(_aligned(row, widths))) for row in rows]
    if left_out > 0:
        blocks.append(Block("tensor", "      ", (f"and {counted(left_out, 'more input')}",)))
    return tuple(blocks)


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
    cells[-1] = cells[-1].rstrip()
    return [*cells, *row[len(widths) :]]


def _row(role: str, stats: TensorStats) -> tuple[str, ...]:
    shape = f"{stats.dtype} [{', '.join(str(size) for size in stats.shape)}]"
    named = (f"`{stats.name}`",) if stats.name else ()
    if stats.finite:
        return (role, shape, f"max {number(stats.absmax)}", "finite", *named)
    limit = FORMAT_MAX.get(stats.dtype)
    overflowed = role == "output" and (stats.posinf or stats.neginf)
    end = f"limit {number(limit)}" if overflowed and limit is not None else ""
    return (role, shape, bad_counts(stats), end, *named)


def _evidence(best: Diagnosis, report: Report) -> tuple[Block, ...]:
    texts = [best.cause, *best.lines]
    if not best.of_updates:  # else no row of this step is to blame
        texts += _positions(report.localization, report.incident)
    texts += _ranks(report.incident)
    texts += _replayed(report.replay)
    texts += _certainty(best, "the cause")
    texts += [] if best.of_updates else _place_certainty(report.localization)
    texts += _beside(report.diagnoses)
    texts += [f"not seen: {spot}" for spot in _blind_spots(report.localization)]
    texts += [f"not completed: {failure}" for failure in report.failures]
    return tuple(Block("evidence", "  = ", (text,)) for text in texts if text)


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


def _ranks(incident: Incident) -> list[str]:
    """Return on which of several ranks the failure was born, and that the others have it of it."""
    born_on, num = incident.born_on, incident.facts.world_size
    if born_on is None:
        return []
    if not born_on:
        return [f"none of the {num} ranks fails by itself: it came with the exchange of gradients"]
    if len(born_on) == num:
        return [f"each of the {num} ranks fails by itself"]
    named = f"{'ranks' if len(born_on) > 1 else 'rank'} {', '.join(map(str, born_on))}"
    return [f"born on {named} of {num}; it reached the others with the exchange of gradients"]


def _certainty(diagnosis: Diagnosis, what: str) -> list[str]:
    sure = diagnosis.confidence
    how = diagnosis.confirmed.removesuffix(f": {diagnosis.cause}")
    confirmed = [f"confirmed: {how}"] if how else []
    unsure = [] if sure == "certain" else [f"{what} is {sure}, not certain"]
    return confirmed + unsure


def _place_certainty(found: Localization | None) -> list[str]:
    if found is None or found.confidence in (None, "certain") or found.first_bad is None:
        return []
    return [f"that it began at this place is {found.confidence}, not certain"]


def _beside(diagnoses: tuple[Diagnosis, ...]) -> list[str]:
    if not diagnoses:
        return []
    named = diagnoses[0].accompanied_by
    return [
        f"beside it {other.code}: {other.title}; {other.cause}"
        for other in diagnoses[1:]
        if other.code in named
    ]


def _blind_spots(found: Localization | None) -> tuple[str, ...]:
    return found.blind_spots if found is not None else ()


def _positions(found: Localization | None, incident: Incident) -> list[str]:
    if found is None or found.key.phase == "optimizer":
        return []
    rows = incident.rows
    if found.positions is None and _has_bad_rows(found, incident):
        return _made_of(rows)
    if found.origin in _HELD or (found.origin == "from_param" and found.in_every_sample):
        return []  # no row is to blame
    if found.first_bad is None:
        return _made_of(rows)
    if _is_of_the_program(found.first_bad):
        return []
    if found.in_every_sample:
        return ["every sample of the micro-batch has it", *incident.text]
    if found.positions is None:
        is_known = found.origin == "from_param" or (rows is not None and len(rows.rows) == 1)
        unknown = [] if is_known else ["which sample it is, is not known"]
        return [*unknown, *_made_of(rows)]
    texts = []
    for place in found.positions[:MAX_POSITIONS]:
        first, last = place.first_token, place.last_token
        tokens = f" tokens {first}-{last}" if first != last else f" token {first}"
        row = rows.row(place.sample, first) if rows is not None else None
        said = f" (row {row} of {rows.data})" if rows is not None and row is not None else ""
        texts.append(f"sample {place.sample}{tokens if first is not None else ''}{said}")
    more = len(found.positions) - MAX_POSITIONS
    texts += [f"{counted(more, 'more sample')}"] if more > 0 else []
    unknown = _made_of(rows) if rows is not None and not rows.in_order else []
    return [*(["; ".join(texts)] if texts else []), *unknown, *incident.text]


def _is_of_the_program(event: OpEvent) -> bool:
    """Return whether an op fails by a number of the program, whatever the batch is."""
    by_zero = event.name == "div" and 0.0 in event.scalars
    return by_zero or not all(map(math.isfinite, event.scalars))


def _has_bad_rows(found: Localization, incident: Incident) -> bool:
    """Return whether the rows of the bad entry of the batch are said by the finding."""
    facts = (one for one in incident.batch if found.culprit in (one.name, f"batch[{one.name}]"))
    return found.origin == "from_batch" and any(one.bad_rows for one in facts)


def _made_of(rows: BatchRows | None) -> list[str]:
    if rows is None or len(rows.rows) > MAX_ROWS:
        return []
    named = ", ".join(str(row) for row in sorted(rows.rows))
    if len(rows.rows) == 1:
        return [f"the micro-batch was made of row {named} of {rows.data}"]
    return [f"the micro-batch was made of rows {named} of {rows.data}"]


def _replayed(replay: Replay | None) -> list[str]:
    if replay is None:
        return []
    times = {1: "once", 2: "twice"}.get(replay.runs, f"{replay.runs} times")
    same = "the same failure, other digits"
    outcome = {
        "bitwise": "bitwise identical",
        "same_failure": same if replay.digest else "the same failure; no number of it is finite",
        "different": f"it failed in {replay.num_failed} of them",
        "not_reproduced": "no failure",
    }[replay.fidelity]
    return [f"replayed {times}: {outcome}", *((replay.note,) if replay.note else ())]


def _help(best: Diagnosis, proof: Proof | None) -> tuple[Block, ...]:
    if proof is None:
        return tuple(_untried(best.remedies)) or _usual_cure(best)
    if proof.verdict == "none_found" or not proof.minimal:
        return tuple(_none_found(best, proof))
    others: dict[str, str] = {}
    for other in proof.alternatives:
        others.setdefault(describe(other.atoms), alternative_in_brackets(other, proof.reference))
    others.pop(describe(proof.minimal), None)
    cures = [(describe(proof.minimal), proof_in_brackets(proof))]
    cures += [(f"or {cure}", how) for cure, how in others.items()]
    shown = tuple(Block("help", "help: ", cells, gap="     ") for cells in cures)
    return shown if proof.verdict != "isolated" else (*shown, *_usual_cure(best))


def _usual_cure(best: Diagnosis) -> tuple[Block, ...]:
    if not best.usual_cure or best.confidence == "possible":
        return ()
    return (Block("help", "help: ", (f"the usual cure, not tried here: {best.usual_cure}",)),)


def _untried(remedies: tuple[tuple[Atom, ...], ...]) -> list[Block]:
    said = {describe(atoms): safety_of(atoms) for atoms in remedies}
    blocks = []
    for cure, safety in list(said.items())[:MAX_UNTRIED]:
        joint = "or " if blocks else ""
        changes = "; changes training" if safety != "safe" else ""
        cells = (f"{joint}{cure}", f"[not tried{changes}]")
        blocks.append(Block("help", "help: ", cells, gap="     "))
    return blocks


def _none_found(best: Diagnosis, proof: Proof) -> list[Block]:
    applicable = [trial for trial in proof.tried if trial.outcome != "not_applicable"]
    outcomes = ((describe(trial.atoms), trial.outcome.replace("_", " ")) for trial in applicable)
    tried = "; ".join(dict.fromkeys(f"{cure} ({outcome})" for cure, outcome in outcomes))
    said = f"nothing that was tried cures it: {tried}" if tried else "no remedy could be tried"
    label = "" if exact_fails(proof) else "next experiment: "  # else it is what was seen
    following = (f"{label}{proof.next_experiment}",) if proof.next_experiment else ()
    usual = () if tried else _usual_cure(best)  # what to do comes first
    texts = ("; ".join((said, *following)),) if usual else (said, *following)
    return [*usual, *(Block("help", "help: ", (text,)) for text in texts)]


def _pointer(code: str, record: str | None) -> Block:
    full = f" ; full record {record}" if record else ""
    return Block("note", "note: ", (f"nanstop explain {code}{full}",))
