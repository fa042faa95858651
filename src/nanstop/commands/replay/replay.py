"""An incident met again: a script runs up to its step, in a child process, and saves nothing.

Of a failure nothing is kept but its report, so that the script itself has to lead to the step
again, with the same arguments. What failed there then and what fails there now are compared as the
failures of one run are; the losses before the step tell whether it is still the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nanstop.commands.replay.result import Difference, Met, Replayed, Seen
from nanstop.errors import NanstopError
from nanstop.process.inject.dry_run import dry_run
from nanstop.records import Atom, FailureKey, Report, Series
from nanstop.store.incidents import SUMMARY, incident_folders, load_report, load_summary
from nanstop.wording import counted

NEAR = 0.01
"""How far two losses of one run may be apart, as a part of them: other forms round otherwise."""
_OUTSIDE = ("evaluate", "generate")
"""Phases that come after the update of their step."""


def replay(
    folder: Path,
    command: Sequence[str],
    *,
    steps: int = 0,
    atoms: Sequence[Atom] = (),
) -> Replayed:
    """Run a script up to the step of an incident, and return what fails there.

    ``folder``: an incident, or a run, whose newest is taken. ``steps``: how many updates more are
    made. ``atoms``: remedies that are in force from the start. What the script prints goes to
    standard error. Errors: ``NanstopError`` NS001 where there is no incident, and for a script that
    cannot be started, does not train, or ends before the step without a failure of numbers.
    """
    found = incident_folders(folder)[-1]
    report = load_report(found)
    outside = report.incident.phase in _OUTSIDE
    last = report.incident.at.step + max(steps, int(outside))
    options = {"last": last, "atoms": [asdict(atom) for atom in atoms]}
    seen = dry_run(command, f"{__package__}.job", Seen, options=options)
    return judged(report, seen, incident=str(found), known=_before(found))


def judged(report: Report, seen: Seen, *, incident: str, known: Sequence[Report] = ()) -> Replayed:
    """Return what a training says of an incident. Pure.

    ``known``: incidents of the run that failed, before this one: they are no news.
    Errors: ``NanstopError`` NS001 where the training did not come to the step.
    """
    met, now = _met(report, seen.reports, known)
    step = report.incident.at.step
    if met == "nothing" and seen.updates <= step:
        raise _never_there(step, seen)
    return Replayed(
        incident=incident,
        step=step,
        met=met,
        updates=seen.updates,
        report=now,
        differs=_difference(report, seen.losses),
        ended=seen.ended,
    )


def _met(
    report: Report, seen: Sequence[Report], known: Sequence[Report]
) -> tuple[Met, Report | None]:
    same = next((one for one in seen if _is_same(one, report)), None)
    if same is not None:
        return "same", same
    new = (one for one in seen if not any(_is_same(one, other) for other in known))
    other = next(new, None)
    return ("nothing", None) if other is None else ("other", other)


def _is_same(one: Report, other: Report) -> bool:
    first, second = _key(one), _key(other)
    if first is None or second is None:
        return first is second and one.incident.phase == other.incident.phase
    return first.same_as(second)


def _key(report: Report) -> FailureKey | None:
    for found in (report.localization, report.replay):
        if found is not None and found.key is not None:
            return found.key
    return None


def _before(folder: Path) -> tuple[Report, ...]:
    """Return the incidents of the same run that came before one, as far as its summary tells."""
    place = (folder if folder.is_dir() else folder.parent).resolve()
    try:
        rows = load_summary(place.parent / SUMMARY).incidents
        ids = [row.folder for row in rows]
        if place.name not in ids:  # of a run before the last
            return ()
        return tuple(load_report(place.parent / one) for one in ids if one < place.name)
    except NanstopError:
        return ()


def _difference(report: Report, now: Series | None) -> Difference | None:
    """Return the first loss before the step that is not what it was; None where all are, or where
    none is known.
    """
    then = next((one for one in report.incident.history if one.name == "loss_raw"), None)
    if then is None or now is None:
        return None
    by_step: dict[int, list[float]] = {}
    for step, loss in zip(now.steps, now.values, strict=True):
        by_step.setdefault(step, []).append(loss)
    for step, loss in zip(then.steps, then.values, strict=True):
        if step >= report.incident.at.step:
            break
        losses = by_step.get(step)
        value = losses.pop(0) if losses else None
        if value is not None and not abs(value - loss) <= NEAR * max(abs(value), abs(loss)):
            return Difference(step=step, before=loss, now=value)
    return None


def _never_there(step: int, seen: Seen) -> NanstopError:
    updates = counted(seen.updates, "update")
    if seen.ended:
        return NanstopError(
            f"the script ended after {updates}, before step {step} of the incident: {seen.ended}",
            hint="what it wrote stands above; run it without nanstop to see whether it trains",
        )
    return NanstopError(
        f"the script's training is over after {updates}, before step {step} of the incident",
        hint="give it the arguments that it had when it failed",
    )
