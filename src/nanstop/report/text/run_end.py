"""What is said of a run when it is over, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nanstop.records import Atom, Diagnosis, Report
from nanstop.records.remedies import describe
from nanstop.report.text.blocks.finding import REASSURING
from nanstop.report.text.blocks.incident import DONE
from nanstop.store.summary import IncidentRow, summary_row
from nanstop.wording import counted, typed

_MAX_NAMED = 3
_MAX_REDONE = 1
_SAID_AGAIN = 10


@dataclass(slots=True, kw_only=True)
class RunEnd:
    """What a training came to. ``steps``: updates that were seen, of each optimizer by its number.

    ``failures``: how often each incident came, by its id; ``codes``: what they are, ``named``: each
    with its title. ``lost``: updates that were skipped, by optimizer; ``dropped``: samples and
    micro-batches that were left out. ``redone``: the remedies under which steps were run again,
    once for each. ``kept``: remedies that were in force at its end, and what was not finite then
    (None where that could not be looked at); ``needed``: what is to be said of saved models then.
    ``ended``: how, where it did not come to its own end. ``kept_in``: where each incident is, by
    its id, as "machine:folder"; ``folders``: where to look, each with the name of its machine, ""
    for this one.
    """

    steps: dict[int, int] = field(default_factory=dict[int, int])
    failures: dict[str, int] = field(default_factory=dict[str, int])
    codes: Sequence[str] = ()
    named: frozenset[tuple[str, str]] = frozenset()
    findings: Sequence[Diagnosis] = ()
    lost: dict[int, int] = field(default_factory=dict[int, int])
    dropped: list[Atom] = field(default_factory=list[Atom])
    redone: Sequence[tuple[Atom, ...]] = ()
    kept: tuple[Atom, ...] = ()
    not_finite: tuple[str, ...] | None = ()
    needed: str = ""
    ended: str = ""
    kept_in: dict[str, str] = field(default_factory=dict[str, str])
    folders: Sequence[tuple[str, str]] = ()

    def came(self, incident: str, kept_in: str) -> int:
        """Note that an incident came, and where it is kept if that is said now; return how often it
        has come.
        """
        if kept_in:
            self.kept_in[incident] = kept_in
        self.failures[incident] = self.failures.get(incident, 0) + 1
        return self.failures[incident]

    def seen(self, optimizer: int) -> None:
        """Note an update of an optimizer, applied or skipped."""
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1

    def trains_nothing(self, lost: Mapping[int, int]) -> bool:
        """Return whether all updates that were seen are among the ``lost`` ones."""
        return bool(lost) and all(lost.get(one, 0) >= num for one, num in self.steps.items())

    def met(self, own: Sequence[Report], of_all: Iterable[IncidentRow]) -> None:
        """Note what the incidents are and what steps were run again under, and the incidents of
        other ranks, whose end has no line.
        """
        self.redone = _steps_redone(own)
        others = [row for row in of_all if row.rank]
        self.failures |= {row.folder: row.count for row in others}
        rows = (*map(summary_row, own), *others)
        self.codes = [row.code for row in rows]
        self.named = frozenset((row.code, row.title) for row in rows)


def end_line(run: RunEnd) -> str:
    """Return the line. It begins with what was not trained at all."""
    said = [_watched(run), _met(run), *_lost(run), *_dropped(run)]
    if run.ended:
        said.append(run.ended)
    kept = [_kept(run)] if run.kept else []
    details = map(_details, run.folders if run.failures or run.findings else ())
    return "; ".join([*_untrained(run), ", ".join(said), *_redone(run), *kept, *details])


def _details(folder: tuple[str, str]) -> str:
    machine, path = folder
    if machine:
        return f"details on {machine}: `nanstop report {typed(path)}`"
    return f"details: `nanstop report {typed(path)}`"


def _watched(run: RunEnd) -> str:
    """Return how many updates were seen, of all optimizers: a step is one of a single optimizer."""
    num = sum(run.steps.values())
    if len(run.steps) > 1:
        return f"{counted(num, 'update')} of several optimizers watched"
    return f"{counted(num, 'step')} watched"


def said_again(report: Report, times: int) -> str:
    """Return what is said of an incident that came for the 10th, the 100th, the 1000th time, ""
    for any other.
    """
    if times < _SAID_AGAIN or str(times).strip("0") != "1":
        return ""
    best = report.diagnoses[0] if report.diagnoses else None
    where, done = f"incident {report.incident.id}", DONE[report.audit[-1].action.kind]
    if best is None:
        return f"{where}, {times} times by now: the same failure; {done}"
    return f"{where}, {times} times by now: {best.code} {best.title}; {done}"


def _met(run: RunEnd) -> str:
    failed = (one for one in run.findings if not one.mended_by)
    apart = [one for one in failed if (one.code, one.title) not in run.named]
    warnings = [one.code for one in apart if one.code not in REASSURING]
    met: list[str] = []
    if run.failures:
        times = sum(run.failures.values())
        often = f", {times} times" if times > len(run.failures) else ""
        met.append(f"{counted(len(run.failures), 'incident')} ({_named(run.codes)}{often})")
    if warnings:
        met.append(f"{counted(len(warnings), 'warning')} ({_named(warnings)})")
    return " and ".join(met) or "nothing found"


def _named(codes: Sequence[str]) -> str:
    once = list(dict.fromkeys(codes))
    more = " and more" if len(once) > _MAX_NAMED else ""
    return ", ".join(once[:_MAX_NAMED]) + more


def _untrained(run: RunEnd) -> list[str]:
    """Return what was trained by no update, for all of an optimizer were skipped."""
    lost = [num for num, of in _skipped(run) if num >= of]
    if len(lost) > 1:
        num = sum(lost)
        return [f"{len(lost)} optimizers have trained nothing: all their {num} updates skipped"]
    if len(run.steps) > 1:
        return [f"one optimizer has trained nothing: all its {num} updates skipped" for num in lost]
    return [f"nothing was trained: all {num} updates were skipped" for num in lost]


def _lost(run: RunEnd) -> list[str]:
    whose = " of one optimizer" if len(run.steps) > 1 else ""
    lost = [(num, of) for num, of in _skipped(run) if num < of]
    if len(lost) > 1:
        whose = f" of {len(lost)} optimizers"
        lost = [(sum(num for num, _ in lost), sum(of for _, of in lost))]
    return [f"{num} of {of} updates{whose} skipped (they trained nothing)" for num, of in lost]


def _skipped(run: RunEnd) -> list[tuple[int, int]]:
    """Return how many updates of each optimizer were skipped, and of how many."""
    most = max(run.steps.values(), default=0)
    return [(num, run.steps.get(one, most or num)) for one, num in run.lost.items() if num]


def _dropped(run: RunEnd) -> list[str]:
    micros = sum(atom.remedy == "drop_micro" for atom in run.dropped)
    samples = len(run.dropped) - micros
    said = [counted(micros, "micro-batch")] if micros else []
    said += [counted(samples, "sample")] if samples else []
    return [f"{' and '.join(said)} of the data left out"] if said else []


def _steps_redone(reports: Iterable[Report]) -> list[tuple[Atom, ...]]:
    """Return the remedies under which steps were run again and updated with, once for each."""
    audits = (entry for report in reports for entry in report.audit if entry.outcome == "done")
    return [entry.action.atoms for entry in audits if entry.action.kind == "redo"]


def _redone(run: RunEnd) -> list[str]:
    """Return what steps ended well under that is not in force any more."""
    often = Counter(atoms for atoms in run.redone if not set(atoms) <= set(run.kept))
    said = [
        f"{counted(num, 'step')} run again under: {describe(atoms)}"
        for atoms, num in often.most_common(_MAX_REDONE)
    ]
    rest = sum(often.values()) - sum(num for _, num in often.most_common(_MAX_REDONE))
    return [*said, f"{rest} more under others"] if rest else said


def _kept(run: RunEnd) -> str:
    cure = describe(run.kept)
    if run.not_finite is None:
        return f"in force to the end: {cure} (whether all is finite could not be looked at)"
    if not run.not_finite:
        return f"kept finite by: {cure}{run.needed}"
    names = ", ".join(f"`{name}`" for name in run.not_finite[:_MAX_NAMED])
    more = " and more" if len(run.not_finite) > _MAX_NAMED else ""
    return f"it did not stay finite under: {cure} (not finite at its end: {names}{more})"
