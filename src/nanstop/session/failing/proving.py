"""The cure of a failure, proven: of the step that fails, or of the updates that led to it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from nanstop.decide.policy import Policy
from nanstop.diagnose.evidence.candidates import own_lines
from nanstop.diagnose.evidence.climbs import climbs
from nanstop.diagnose.evidence.descent import read_alone
from nanstop.prove.course import Course, prove_course
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.prove import prove_step
from nanstop.records import Atom, Proof
from nanstop.records.line_forms import leaves_values_out
from nanstop.replay.conditions import filled_memory
from nanstop.rewrite.files import read
from nanstop.rewrite.forms.form_code import codes_of
from nanstop.session.failing.investigation import Investigation
from nanstop.session.telling.live import Search


@dataclass(frozen=True, slots=True)
class Proving:
    """What is tried on one failing step for what is known of it."""

    found: Investigation
    failing: FailingStep
    policy: Policy

    def prove(self) -> None:
        """Try the candidate remedies of the diagnoses on the failing step, or first on the updates
        that led to it, where that is what the first diagnosis says of them.
        Call inside ``failing.in_place()``.
        """
        if not self.found.is_steady:
            return
        of_updates_first = self._ran_away
        if of_updates_first:
            self._of_updates()
        if not self._is_cured:
            self._of_step()
        if not of_updates_first and self.found.is_steady:  # else it is seen to pass by chance
            self._of_updates()
        proof, place = self.found.proof, self.found.localization
        if proof is not None and place is not None and proof.is_at(place.first_bad):
            self.found.localization = replace(place, confidence="certain")

    @property
    def _ran_away(self) -> bool:
        """Whether the failing step is only where a training has ended that had run away: a cure of
        that step alone would keep what is ruined.
        """
        first = self.found.diagnoses[0] if self.found.diagnoses else None
        return first is not None and first.of_updates and first.confidence != "possible"

    @property
    def _is_cured(self) -> bool:
        return self.found.proof is not None and self.found.proof.verdict == "proven"

    def _of_step(self) -> None:
        """Try what changes the failing step."""
        found = self.found
        candidates: dict[tuple[Atom, ...], None] = dict.fromkeys(
            candidate
            for diagnosis in found.diagnoses
            for candidate in diagnosis.remedies
            if not diagnosis.of_updates
        )
        if not candidates:
            return
        search, before = partial(self._search, tuple(candidates)), found.proof
        with filled_memory() if found.reads_unwritten else nullcontext():
            proof = found.stage("proof", search)
        if proof is not None and before is not None:
            proof = replace(proof, tried=(*before.tried, *proof.tried))
        found.proof = proof or before
        if proof is not None and proof.chance and found.replay is not None:
            found.replay = replace(found.replay, fidelity="different", runs=found.replay.runs + 1)
            found.diagnose()
        elif proof is not None and any(map(leaves_values_out, proof.minimal)):
            found.diagnose()

    def _of_updates(self) -> None:
        """Try the remedies of a diagnosis that says it of the updates that led here, on these,
        unless a change of this step alone is proven.
        """
        found, way_back = self.found, self.failing.way_back
        said = next((one for one in found.diagnoses if one.of_updates and one.remedies), None)
        if said is None or way_back is None or self._is_cured:
            return
        self._announce()
        apart = found.apart.step if found.apart is not None else None
        course, (loss, _) = Course(way_back, self.failing, apart), climbs(found.evidence())
        made_anew = partial(
            prove_course,
            course,
            found.key,
            said.remedies,
            policy=self.policy,
            usual=loss.first if loss is not None else None,
            tried=found.live.tried,
        )
        proof = found.stage("proof", made_anew)
        if proof is None:
            return
        if found.proof is not None and not proof.minimal:
            proof = replace(found.proof, tried=(*found.proof.tried, *proof.tried))
        found.proof = proof
        found.diagnose()

    def _announce(self) -> None:
        bounds = Search(self.policy.budget_trials, self.policy.budget_seconds)
        self.found.live.stage("proof", self.found.at.step, bounds)

    def _search(self, candidates: tuple[tuple[Atom, ...], ...]) -> Proof:
        self._announce()
        place = self.found.localization
        event = place.first_bad if place is not None else None
        return prove_step(
            self.failing,
            self.found.key,
            candidates,
            policy=self.policy,
            wider=event.wider if event is not None else "unknown",
            in_float64=place.in_float64 if place is not None else "unknown",
            weights=read_alone(event) if event is not None else (),
            tried=self.found.live.tried,
            codes=lambda proof: codes_of(proof, event, read),
            lines=own_lines(event) if event is not None and event.module else (),
        )
