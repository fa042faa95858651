"""What a run remembers of its failures:
a repeat, or a consequence, belongs to the report of the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanstop.decide.policy import DATA_REMEDIES
from nanstop.records import FailureKey, Report

_EACH_LOOKED_INTO = 3
"""Failures of a row whose updates are left out, or finite;
of those that follow each one whose number is a power of two.
"""

_MOST_ALIKE = 4
"""Reports whose cures are tried on a failure that looks like theirs."""


class Repeats:
    """The reports of a run, latest last.
    ``names_samples`` and ``left_alone`` say what one means for the next.
    """

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self._keys: dict[str, FailureKey] = {}

    def put(self, report: Report, key: FailureKey) -> None:
        """Add a report, or put a newer version in the place of one with the same id."""
        self._keys[report.incident.id] = key
        others = [known for known in self.reports if known.incident.id != report.incident.id]
        self.reports = [*others, report]

    def key_of(self, report: Report) -> FailureKey:
        """Return the key that a report was put under."""
        return self._keys[report.incident.id]

    def like(self, key: FailureKey) -> Report | None:
        """Return the report of an earlier failure with the same key, None where there is none.

        Keys are compared as ``FailureKey.same_as`` does, without layer numbers.
        """
        return next((r for r in self.reports if self.key_of(r).same_as(key)), None)

    def all_like(self, key: FailureKey) -> list[Report]:
        """Return the report that ``like`` does, then the latest of others with the same key."""
        alike = [one for one in self.reports if self.key_of(one).same_as(key)]
        return [*alike[:1], *alike[1:][-_MOST_ALIKE:]]

    def explaining(
        self, bad_params: Sequence[str], *, at_step: int, over: bool = False
    ) -> Report | None:
        """Return the report that says why these weights are bad:
        it left alone what broke them at the step before.

        When training is ``over``, one that saw them bad says as much.
        """
        if not bad_params:
            return None
        for report in reversed(self.reports):
            if over and set(bad_params) <= set(report.incident.bad_params):
                return report
            if left_alone(report) and report.audit[-1].at.step + 1 == at_step:
                return report
        return None


def is_one_more(latest: Report, row: int) -> bool:
    """Return whether a failure that looks like the last is taken for it: a long ``row`` is looked
    into ever more seldom, and not at all what the same weights led to.
    """
    skipped = latest.audit[-1].action.kind == "skip"
    return skipped and row > 0 and (latest.led_here or not _is_looked_into(row))


def goes_on_alone(latest: Report, *, is_harmless: bool) -> bool:
    """Return whether a failure that looks like the last, about which nothing was done, is taken for
    it. Of updates that are finite, which ``is_harmless`` says, such may come in each step for
    another cause than before.
    """
    return left_alone(latest) and not (is_harmless and _is_looked_into(latest.count))


def _is_looked_into(row: int) -> bool:
    """Return whether the failure that follows ``row`` of its kind is looked into."""
    return row <= _EACH_LOOKED_INTO or row & (row - 1) == 0


def left_alone(report: Report) -> bool:
    """Return whether training went on with what had failed: nothing was done about it."""
    at_stake = report.incident.phase not in ("evaluate", "generate") and not report.trains_nothing
    return at_stake and report.audit[-1].action.kind in ("observe", "continue")


def names_samples(report: Report) -> bool:
    """Return whether the cure leaves out samples of one window, which says nothing of another."""
    cure = report.proof.minimal if report.proof else ()
    return any(atom.remedy in DATA_REMEDIES for atom in cure)
