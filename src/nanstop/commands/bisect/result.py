"""What a bisect established: as records for JSON, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nanstop.commands.bisect.search import Status
from nanstop.commands.bisect.trial_store import Failure
from nanstop.records.record import record

TrialOutcome = Literal["pass", "same_failure", "other_failure", "invalid"]

_WORDS = {
    "pass": "passes",
    "same_failure": "fails",
    "other_failure": "fails in another way",
    "invalid": "cannot run",
}


@record
class TrialRow:
    """One trial.

    ``keys``: what it took from BAD. "invalid": it ended by an error before any step of training.

    ``failure``: the one that decided. ``known``: the result was on disk. ``folder``: its config,
    output and incidents. ``forked``: from a process that had imported its libraries; what confirms
    an answer never is.
    """

    number: int
    keys: tuple[str, ...]
    attempt: int
    outcome: TrialOutcome
    failure: Failure | None
    end: str
    code: int
    steps: int
    seconds: float
    peak_bytes: int
    known: bool
    forked: bool
    folder: str


@record
class KeyDifference:
    """A key and what it is in BAD and in GOOD, as text."""

    key: str
    bad: str
    good: str


@record
class BisectResult:
    """What a bisect established, and every trial that says so.

    ``minimal``: from GOOD plus these it fails the same, and with any left out it does not.
    ``sufficient_fix``: BAD without these passes. ``inseparable``: of ``minimal``, keys without
    which the others are no valid configuration. ``flaky``: configurations (keys taken from BAD)
    that ended differently when run again. ``message``: why there is no answer; empty with status
    "found". ``not_forked``: why no trial was, or none any more.
    """

    status: Status
    message: str = ""
    minimal: tuple[str, ...] = ()
    sufficient_fix: tuple[str, ...] = ()
    inseparable: tuple[str, ...] = ()
    failure: Failure | None = None
    flaky: tuple[tuple[str, ...], ...] = ()
    differences: tuple[KeyDifference, ...] = ()
    trials: tuple[TrialRow, ...] = ()
    seconds: float = 0.0
    folder: str = ""
    problem: str = ""
    not_forked: str = ""


def trial_line(row: TrialRow, differing: Sequence[str]) -> str:
    """Return one line on a trial of the ``differing`` keys."""
    again = ", again" if row.attempt else ""
    end = f" ({row.failure})" if row.failure else ""
    known = ", known from before" if row.known else ""
    name = configuration(row.keys, differing)
    outcome = f"{_WORDS[row.outcome]}{end}, {row.seconds:.1f} s{known}"
    return f"trial {row.number:2}: {name}{again}: {outcome}"


def configuration(keys: Sequence[str], differing: Sequence[str]) -> str:
    """Return the shorter of "GOOD with keys" and "BAD without keys"."""
    left = [key for key in differing if key not in keys]
    if not keys or not left:
        return "BAD" if keys else "GOOD"
    return (
        f"GOOD with {_listed(keys)}" if len(keys) <= len(left) else f"BAD without {_listed(left)}"
    )


def render(result: BisectResult) -> str:
    """Return the outcome as text.

    The failure, the answer with the values of its keys, the evidence, what is unsure.
    """
    values = {one.key: one for one in result.differences}
    lines = [f"failure: {result.failure}"] if result.failure else []
    if result.message:
        lines.append(f"not established: {result.message}")
    if result.minimal:
        claim = "makes it fail" if result.status == "found" else "seen to fail with"
        lines += _rows(f"{claim} (GOOD with these of BAD):", result.minimal, values)
    if result.sufficient_fix:
        lines += _rows(
            "cures it (BAD with these of GOOD):", result.sufficient_fix, values, fix=True
        )
    if result.inseparable:
        names = ", ".join(result.inseparable)
        lines.append(f"note: without {names} the trial cannot run, or fails in another way")
    lines += [f"flaky: {configuration(one, list(values))}" for one in result.flaky]
    new = sum(not row.known for row in result.trials)
    lines.append(
        f"{len(result.trials)} trials of {len(values)} differing keys, {new} of them run now, "
        f"{result.seconds:.0f} s; all in {result.folder}"
    )
    if result.status == "found":
        lines.append("confirmed: each answer run twice, and without each of its members")
    if result.problem:
        lines.append(f"warning: {result.problem}")
    return "\n".join(lines)


def _rows(
    title: str, keys: Sequence[str], values: dict[str, KeyDifference], *, fix: bool = False
) -> list[str]:
    pairs = [(values[key].bad, values[key].good) for key in keys]
    shown = [(good, bad) if fix else (bad, good) for bad, good in pairs]
    return [
        title,
        *(f"  {key}: {one}, not {other}" for key, (one, other) in zip(keys, shown, strict=True)),
    ]


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys) if len(keys) <= 4 else f"{len(keys)} keys"
