"""What is known of a failure: cause, rows and tokens, ranks, replays, and how sure that is."""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.descent import reads_weights_alone
from nanstop.records import BatchRows, Diagnosis, Incident, Localization, OpEvent, Replay, Report
from nanstop.report.text.blocks.block import Block, certainty
from nanstop.wording import counted

MAX_POSITIONS = 4
MAX_ROWS = 16
_HELD = ("from_constant", "from_buffer", "from_state", "carried_over")
"""Origins of what is bad whatever the batch is."""


def evidence(best: Diagnosis, report: Report) -> tuple[Block, ...]:
    """Return what speaks for a diagnosis, what does not, and what could not be seen."""
    texts = [best.cause, *best.lines]
    if not best.of_updates:  # else no row of this step is to blame
        texts += _positions(report.localization, report.incident)
    texts += _ranks(report.incident)
    texts += _replayed(report.replay)
    texts += certainty(best, "the cause")
    texts += [] if best.of_updates else _place_certainty(report.localization)
    texts += _beside(report.diagnoses)
    texts += [f"not seen: {spot}" for spot in _blind_spots(report.localization)]
    texts += [f"not completed: {failure}" for failure in report.failures]
    return tuple(Block("evidence", "  = ", (text,)) for text in texts if text)


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
        return _of_unknown(found, found.first_bad, incident)
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


def _of_unknown(found: Localization, event: OpEvent, incident: Incident) -> list[str]:
    """Return what is said of the samples where no axis of the op is known to be theirs."""
    if reads_weights_alone(event):
        return ["it reads weights alone: no sample has a part in it"]
    rows, of_failing = incident.rows, (f for f in incident.batch if f.micro == incident.at.micro)
    is_known = found.origin == "from_param" or (rows is not None and len(rows.rows) == 1)
    is_known = is_known or any(fact.num_supervised == 0 for fact in of_failing)  # all are alike
    unknown = [] if is_known else ["which sample it is, is not known"]
    return [*unknown, *_made_of(rows)]


def _is_of_the_program(event: OpEvent) -> bool:
    """Return whether an op fails by a number of the program, whatever the batch is."""
    by_zero = event.name == "div" and 0.0 in event.scalars
    alone = event.descent[0] if len(event.inputs) == 1 and event.descent else ()
    return by_zero or "constant" in alone or not all(map(math.isfinite, event.scalars))


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
