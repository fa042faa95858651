"""Findings of a run that has not failed, each told once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanstop.diagnose.diagnose import examine
from nanstop.records import Atom, Diagnosis, Evidence, RunFacts
from nanstop.store.summary import by_weight, finding_row

_SEEN_BY_THE_RUN = (("NS102", "possible"), ("NS106", "certain"))
"""What the run itself shows soon enough, and what does no harm if it does not.

Updates of bfloat16 weights are measured (NS111). Weights that are not finite spoil the first step
that reads them, and stand beside that failure.
"""


def is_incident(finding: Diagnosis, facts: RunFacts) -> bool:
    """Return whether a finding is told as an incident: it was seen to keep a run from training.

    Of processes that train together each would tell its own: there it is a warning.
    """
    sure = finding.trains_nothing and finding.confidence != "possible"
    return sure and finding.seen is not None and facts.world_size == 1


UPDATES = 3
"""Updates in which a run shows by itself what it was only expected to."""


class Findings:
    """What was told of a run, weightiest first."""

    def __init__(self, tell: Callable[[Diagnosis], None]) -> None:
        self.all: list[Diagnosis] = []
        self._awaited: dict[tuple[str, str], Diagnosis] | None = {}
        """What is told unless the first updates show it by another finding, by code and title."""
        self._in_full: set[str] = set()
        self._helps: dict[str, tuple[tuple[Atom, ...], ...]] = {}
        """The help that a finding was told with last, by its code."""
        self._tell = tell

    @property
    def told(self) -> tuple[str, ...]:
        """Codes of the findings that are "certain" or "likely"."""
        return tuple(one.code for one in self.all if one.confidence != "possible")

    def examine_setup(self, evidence: Evidence) -> None:
        """Announce the findings that the facts of the run show before its first step."""
        is_alone = evidence.facts is not None and evidence.facts.world_size == 1
        for finding in examine(evidence, "static").diagnoses:
            waits = finding.measured_by and is_alone
            if finding.seen is not None:
                self.measured(finding)
            elif waits and self._awaited is not None:
                self._awaited.setdefault((finding.code, finding.title), finding)
            elif (finding.code, finding.confidence) not in _SEEN_BY_THE_RUN:
                self.found(finding)

    def updated(self, step: int) -> None:
        """Note an update: after ``UPDATES`` of them what none of them has shown is told."""
        if step >= UPDATES and self._awaited is not None:
            self.await_no_longer()

    def await_no_longer(self) -> None:
        """Tell what the run was to show by itself and has not."""
        awaited, self._awaited = self._awaited or {}, None
        shown = {one.code for one in self.all}
        for finding in awaited.values():
            if finding.measured_by not in shown:
                self.found(finding)

    def examine_healthy(self, evidence: Evidence) -> None:
        """Announce the findings that a look at a healthy step shows."""
        for finding in examine(evidence, "gauge").diagnoses:
            self.found(finding)

    def measured(self, finding: Diagnosis) -> None:
        """Tell once what was measured, in place of what was only to be expected, which has no
        place.
        """
        told = [one for one in self.all if one.code == finding.code]
        new = finding.seen is not None and not any(one.seen for one in told)
        if not told or new or (finding.where and not any(one.where for one in told)):
            self.all = [one for one in self.all if one not in told]
            self.found(finding)

    def found(self, finding: Diagnosis) -> None:
        """Keep and announce a finding, unless it is known of this place already."""
        places = {one.where for one in self.all if one.code == finding.code}
        # Without a place it is what was to be expected: nothing new beside what was seen somewhere.
        if finding.where not in places and (finding.where or not places):
            like = self._with_the_help_of(finding)
            finding = replace(finding, mended_by=like if like != finding.code else "")
            self.all.append(finding)
            self.all.sort(key=lambda one: by_weight(finding_row(one)))
            self._tell(finding)

    def without_help_again(self, finding: Diagnosis) -> Diagnosis:
        """Return a finding as it is told: the help that its code was told with before is not said
        again.
        """
        is_known = bool(finding.remedies) and self._helps.get(finding.code) == finding.remedies
        self._helps[finding.code] = finding.remedies
        if not is_known:
            return finding
        above = f"what helps is said above, at the first {finding.code}"
        return replace(finding, remedies=(), lines=(*finding.lines, above))

    def _with_the_help_of(self, finding: Diagnosis) -> str:
        """Return the code of the finding that was told with the help that this one has, its own
        where none was: then it is to be told with its help.
        """
        full = (one for one in self.all if one.remedies and one.code in self._in_full)
        like = next((one.code for one in full if one.remedies == finding.remedies), finding.code)
        if like == finding.code:
            self._in_full.add(like)
        return like
