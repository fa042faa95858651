"""What a failure that was looked into comes to: a report, and what is done."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanstop.decide.apart import decide_apart
from nanstop.decide.policy import decide
from nanstop.decide.remembered import PolicyState, begun, completed
from nanstop.decide.repeats import Repeats, names_samples
from nanstop.prove.failing_step import FailingStep, FailurePoint
from nanstop.records import Action, AuditEntry, FailureKey, Proof, Report
from nanstop.session.run_state import RunState
from nanstop.session.shared.conclusion import Conclusion, redone

if TYPE_CHECKING:
    from nanstop.session.failing.investigation import Investigation

NOTHING_HELPS = Proof(incident="", verdict="none_found", minimal=())


class Outcomes:
    """Decides over each failure of one run, and remembers of those before what the policy asks for.

    ``known``: the failures that were reported.
    """

    def __init__(self, run: RunState, known: Repeats) -> None:
        self._run, self._known = run, known
        self._state = PolicyState()

    @property
    def lost(self) -> dict[int, int]:
        """How many updates of each optimizer were left out in the present training."""
        return {one.optimizer: one.num for one in self._state.lost}

    def in_a_row(self, optimizer: int) -> int:
        """Return how many updates of an optimizer were left out one after the other."""
        return self._state.in_a_row(optimizer)

    def passed(self, optimizer: int | None) -> None:
        """Note that an update of an optimizer (None: the only one) was applied."""
        self._state = completed(self._state, optimizer)

    def begun(self) -> None:
        """Note that a training begins: what was lost in an earlier one is no reason to stop it."""
        self._state = begun(self._state)

    def follow(self, end: Conclusion, optimizer: int) -> None:
        """Remember what another rank has come to, of an ``optimizer`` as this rank counts it."""
        lost = replace(end.state.losses(end.optimizer), optimizer=optimizer)
        others = tuple(one for one in self._state.lost if one.optimizer != optimizer)
        self._state = replace(end.state, lost=(*others, lost) if lost.num else others)

    def of(
        self, found: Investigation, now: FailurePoint, failing: FailingStep | None
    ) -> Conclusion:
        """Return what the investigation ``found`` comes to."""
        proof = NOTHING_HELPS if found.put_right else found.proof or NOTHING_HELPS
        way_back, clean = failing is not None and failing.update, found.may_pass
        # Ranks that have agreed go back together, or not at all.
        lost = bool((now.agreed or now.by_itself) and found.bad_params and not way_back)
        # By what is not made again, or by what this step does to them itself.
        lost = lost or found.remade_finite is not None or found.is_broken_within
        action = self.choose(found.key, now, failing, proof, replays_clean=clean, lost=lost)
        return self.new(found, action, now, failing)

    def new(
        self,
        found: Investigation,
        action: Action,
        now: FailurePoint,
        failing: FailingStep | None = None,
    ) -> Conclusion:
        """Return the conclusion of a failure that none before explains, with what is done."""
        if found.incident is None:
            found.explain(self._run.series)
        report = found.report(AuditEntry(at=now.at, action=action))
        return self._conclusion(report, found.key, now, failing)

    def again(
        self,
        known: Report,
        now: FailurePoint,
        failing: FailingStep | None = None,
        proof: Proof | None = None,
    ) -> Conclusion:
        """Fold a repeat into the report of the first; ``proof``: one of its own."""
        key = self._known.key_of(known)
        if proof is None and not names_samples(known):
            proof = known.proof
        comes_and_goes = known.replay is not None and known.replay.fidelity == "different"
        lost = bool(now.by_itself and known.incident.bad_params)
        proof = proof and replace(proof, incident=known.incident.id)
        action = self.choose(key, now, failing, proof, replays_clean=comes_and_goes, lost=lost)
        entry = AuditEntry(at=now.at, action=action, incident=known.incident.id)
        report = replace(known, count=known.count + 1, audit=(*known.audit, entry))
        return self._conclusion(report, key, now, failing)

    def num_apart(self, now: FailurePoint) -> int:
        """Return how many processes train together that have not agreed to act as one."""
        return 1 if now.agreed else self._run.facts.world_size

    def choose(
        self,
        key: FailureKey,
        now: FailurePoint,
        failing: FailingStep | None,
        proof: Proof | None,
        *,
        replays_clean: bool = False,
        lost: bool = False,
    ) -> Action:
        """Return what is done; ``lost``: weights are broken, and no way back is known."""
        policy, facts = self._run.policy, self._run.facts
        pending = failing is not None and failing.pending
        known = {
            "key": key,
            "at_step": now.at.step,
            "optimizer": now.optimizer,
            "can_veto": facts.veto == "yes" and now.can_skip,
            "weights_broken": lost or (failing is not None and failing.update and not pending),
            "harmless": now.harmless,
        }
        if now.by_itself and self.num_apart(now) > 1:
            action, self._state = decide_apart(policy, self._state, now.by_itself, **known)
            return action
        action, self._state = decide(
            policy,
            self._state,
            proof=proof,
            world_size=self.num_apart(now),
            update_pending=pending,
            replays_clean=replays_clean,
            no_redo=now.no_redo,
            is_past=now.is_past,
            **known,
        )
        if action.kind == "observe" and not now.can_skip and policy.on_failure != "observe":
            return replace(action, reason="there is no step to run again: observed only")
        return action

    def _conclusion(
        self, report: Report, key: FailureKey, now: FailurePoint, failing: FailingStep | None
    ) -> Conclusion:
        return Conclusion(
            report=report,
            key=key,
            state=self._state,
            optimizer=now.optimizer,
            atoms=redone(report.audit[-1].action, failing),
            view=failing.step.view if failing is not None else None,
            is_new=not report.incident.id,
        )
