"""Whether an incident is gone: with a script that was changed, or under the cure that its report
names.

Finite is not yet gone. The run before the step must be the one that failed, so that its data has
come again; the step must pass; and so must the updates after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nanstop.commands.prove.result import Proved, ProveVerdict
from nanstop.commands.replay.replay import replay
from nanstop.commands.replay.result import Replayed
from nanstop.decide.policy import DATA_REMEDIES
from nanstop.errors import NanstopError
from nanstop.process.children.command import mention_ours
from nanstop.records import Atom
from nanstop.records.remedies import describe
from nanstop.store.incidents import incident_folders, load_report

STEPS = 20
"""Updates after the incident's that have to be healthy."""


def prove(
    folder: Path, command: Sequence[str], *, steps: int = STEPS, cured: bool = False
) -> Proved:
    """Run a script up to the step of an incident and ``steps`` updates on, and return whether its
    failure is gone.

    ``cured``: under the cure that the incident's report names. Errors: as ``replay``, and
    ``NanstopError`` NS001 for an incident without a cure that can be in force for a whole run.
    """
    mention_ours(command, ("--cure",))
    atoms = _cure(folder) if cured else ()
    found = replay(folder, command, steps=steps, atoms=atoms)
    healthy = found.updates - found.step if found.met == "nothing" else 0
    return Proved(verdict=_verdict(found), healthy=healthy, cure=atoms, replayed=found)


def _verdict(found: Replayed) -> ProveVerdict:
    if found.met == "nothing":
        return "gone" if found.differs is None else "not comparable"
    return "still there" if found.met == "same" else "another failure"


def _cure(folder: Path) -> tuple[Atom, ...]:
    report = load_report(incident_folders(folder)[-1])
    atoms = report.proof.minimal if report.proof is not None else ()
    if not atoms:
        raise NanstopError(f"{folder}: no cure is known that could be proven")
    left_out = [atom for atom in atoms if atom.remedy in DATA_REMEDIES]
    if left_out:
        raise NanstopError(
            f"{folder}: its cure is to {describe(tuple(left_out))}, which no run has in force",
            hint="change the data or the script, and prove that",
        )
    return atoms
