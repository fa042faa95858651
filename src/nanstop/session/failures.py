"""The only file that knows the order: capture, replay, localize, diagnose, prove, decide, record.

A session imports it with the first failure of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nanstop.decide import policy as policies
from nanstop.decide.decision import Kind, Resolution
from nanstop.decide.repeats import KnownFailures, left_alone, names_samples
from nanstop.numerics.weights import param_groups
from nanstop.prove.bad_samples import atoms_for
from nanstop.prove.failing_step import (
    Case,
    Occasion,
    Rewind,
    breaking_update,
    failing_case,
    pending_case,
)
from nanstop.records import (
    Action,
    ActionKind,
    Atom,
    AuditEntry,
    FailureKey,
    Phase,
    Proof,
    Report,
    RunFacts,
    Signal,
)
from nanstop.records.remedies import describe
from nanstop.remedies.apply import applied
from nanstop.replay.collectives import communicates
from nanstop.session.investigation import Investigation
from nanstop.session.run_state import RunState

if TYPE_CHECKING:
    from nanstop.replay.step import Step

_MAX_NAMED = 8

_KINDS: Mapping[ActionKind, Kind] = {
    "continue": "proceed",
    "observe": "proceed",
    "redo": "redo",
    "adopt": "redo",
    "quarantine": "redo",
    "rollback": "rollback",
    "skip": "skip",
    "stop": "stop",
}

_EACH_LOOKED_INTO = 3
"""Failures of a row whose updates are left out; of those that follow each one whose number is a power of two."""


class Failures:
    """The failures of one session, and what the policy remembers of them."""

    def __init__(self, session: RunState) -> None:
        self._session = session
        self._known = KnownFailures()
        self._state = policies.PolicyState()
        self._last_signature: tuple[object, ...] | None = None

    @property
    def reports(self) -> list[Report]:
        """The incidents so far, the one that was last seen at the end."""
        return self._known.reports

    @property
    def num_left_out(self) -> int:
        """How many updates of the present training were left out."""
        return policies.num_lost(self._state)

    def passed(self) -> None:
        """Note that an update was applied: no row of failures goes on."""
        self._state = policies.completed(self._state)
        self._last_signature = None

    def begun(self) -> None:
        """Note that a training begins: what was lost in an earlier one is no reason to stop it."""
        self._state = policies.begun(self._state)
        self._last_signature = None

    def met(
        self,
        step: Step | None,
        signals: Sequence[Signal],
        *,
        phase: Phase,
        error: BaseException | None,
        rewind: Rewind | None,
        bad_params: Sequence[str],
        bad_state: Sequence[str],
        can_skip: bool,
    ) -> Resolution:
        """Investigate a failure and return what to do, as ``Session.failed`` says."""
        now = Occasion.of(step, signals, can_skip=can_skip)
        known = self._known.explaining(bad_params, at_step=now.at.step, over=not now.can_skip)
        if known is not None:
            # A training that is over has nothing left to decide.
            return self._again(known, now) if now.can_skip else Resolution(kind="proceed")
        signature = (phase, bool(bad_params), type(error), signals[0].source)
        if signature == self._last_signature and self.reports:
            latest = self.reports[-1]
            if left_alone(latest):
                self._session.logged()
                return self._again(latest, now)
            if self._is_one_more(latest):
                return self._again(latest, now, proof=latest.proof)
        self._last_signature = signature
        found = Investigation(
            facts=self._session.facts,
            at=now.at,
            phase=phase,
            signals=tuple(signals),
            raised=error is not None,
            bad_params=tuple(bad_params),
            bad_state=tuple(bad_state),
        )
        return self._settled(found, now, lambda: self._case(found, step, rewind))

    def foreseen(
        self, step: Step, rewind: Rewind | None, expected: Sequence[Signal]
    ) -> Resolution | None:
        """Investigate an update that a rehearsal says will ruin weights; None if the whole of it does not.

        Where that cannot be run, what is ``expected`` counts as far as it is not finite.
        """
        found = Investigation(facts=self._session.facts, at=step.id, phase="optimizer", signals=())
        case = found.stage("capture", lambda: pending_case(step, rewind))
        unseen = [one for one in expected if not math.isfinite(one.value or 0.0)]
        if case is None and not (found.failures and unseen):
            for line in found.failures:
                self._session.announce(f"an update could not be judged ({line})")
            return None
        found.signals = case.broken[:_MAX_NAMED] if case is not None else tuple(unseen)
        now = Occasion(step.id, step, can_skip=True)
        return self._settled(found, now, lambda: case)

    def _settled(
        self, found: Investigation, now: Occasion, case: Callable[[], Case | None]
    ) -> Resolution:
        try:
            return self._investigate(found, now, case())
        except KeyboardInterrupt:
            found.failures.append("investigation: interrupted by the user")
            self._record(
                found, Action(kind="continue", reason="the investigation was interrupted"), now
            )
            raise
        except Exception as failure:  # nanstop is never the reason a run dies
            found.failures.append(f"investigation: {type(failure).__name__}: {failure}")
            return self._decide(found, now, None)

    def _is_one_more(self, latest: Report) -> bool:
        """Return whether a failure that looks like the last is taken for it: a long row is looked into ever more seldom."""
        row = self._state.skips_in_a_row
        skipped = latest.audit[-1].action.kind == "skip"
        return skipped and row > _EACH_LOOKED_INTO and row & (row - 1) != 0

    def _investigate(self, found: Investigation, now: Occasion, case: Case | None) -> Resolution:
        found.facts = _present(found.facts, case.step if case is not None else now.step)
        if case is None:
            known = self._known.like(found.key)
            if known is not None and bool(known.incident.bad_params) == bool(found.bad_params):
                return self._again(known, now)
            return self._decide(found, now, None)
        with case.in_place():
            found.look(case)
            known = self._known.like(found.key)
            if known is not None and found.stage("repeat", lambda: self._passes(case, known)):
                return self._again(known, now, case)
            self._explain(found)
            if self._session.facts.world_size == 1:  # the others wait, and nothing would come of it
                found.prove(case, self._session.policy)
            if known is not None and names_samples(known):
                # The samples are new, the failure is not.
                return self._again(known, now, case, proof=found.proof)
        return self._decide(found, now, case)

    def _case(self, found: Investigation, step: Step | None, rewind: Rewind | None) -> Case | None:
        if step is None:
            return None
        if self._session.facts.world_size > 1:
            # An update of one rank's own gradients is none that the run has made: there is no way back here.
            rewind = None
            if not _runs_alone(found, step):
                return None
        if found.bad_params and rewind is not None:
            broken = found.stage("rewind", lambda: breaking_update(rewind))
            if broken is not None:
                return broken
        return found.stage(
            "capture", lambda: failing_case(step, phase=found.phase, raised=found.raised)
        )

    def _explain(self, found: Investigation) -> None:
        # On a device whose context is gone, not even a number can be read any more.
        history = found.stage("history", self._session.series.records) or ()
        found.explain(self._session.store.open_incident()[0], history)

    def _decide(self, found: Investigation, now: Occasion, case: Case | None) -> Resolution:
        nothing = Proof(incident=found.incident_id, verdict="none_found", minimal=())
        clean = found.replay is not None and found.replay.fidelity == "not_reproduced"
        action = self._choose(found.key, now, case, found.proof or nothing, replays_clean=clean)
        report = self._record(found, action, now)
        self._session.announce(report)
        return self._resolve(action, case, report)

    def _record(self, found: Investigation, action: Action, now: Occasion) -> Report:
        if found.incident is None:
            self._explain(found)
        report = found.report(AuditEntry(at=now.at, action=action))
        self._keep(report, found.key)
        return report

    def _again(
        self,
        known: Report,
        now: Occasion,
        case: Case | None = None,
        proof: Proof | None = None,
    ) -> Resolution:
        """Fold a repeat into the report of the first: its remedy is used, unless it has a ``proof`` of its own."""
        key = self._known.key_of(known)
        if proof is None and not names_samples(known):
            proof = known.proof
        action = self._choose(key, now, case, proof)
        entry = AuditEntry(at=now.at, action=action, incident=known.incident.id)
        report = replace(known, count=known.count + 1, audit=(*known.audit, entry))
        self._keep(report, key)
        if action.kind == "adopt":
            kept = describe(action.atoms)
            self._session.announce(f"{known.incident.id}: adopted for the rest: {kept}")
        elif action.kind == "stop":
            self._session.announce(f"{known.incident.id}: training stops: {action.reason}")
        return self._resolve(action, case, report)

    def _choose(
        self,
        key: FailureKey,
        now: Occasion,
        case: Case | None,
        proof: Proof | None,
        *,
        replays_clean: bool = False,
    ) -> Action:
        policy, facts = self._session.policy, self._session.facts
        action, self._state = policies.decide(
            policy,
            self._state,
            key=key,
            proof=proof,
            at_step=now.at.step,
            optimizer=id(now.step.view.optimizer) if now.step is not None else 0,
            world_size=facts.world_size,
            can_veto=facts.veto == "yes" and now.can_skip,
            weights_broken=case is not None and case.update and not case.pending,
            update_pending=case is not None and case.pending,
            replays_clean=replays_clean,
        )
        if action.kind == "observe" and not now.can_skip and policy.on_failure != "observe":
            return replace(action, reason="there is no step to run again: observed only")
        return action

    def _passes(self, case: Case, known: Report) -> bool:
        """Return whether the remedy proven for the earlier failure passes here too (True where none was found then)."""
        if names_samples(known):
            return case.phase != "forward"
        atoms = known.proof.minimal if known.proof else ()
        new = tuple(atom for atom in atoms if atom not in self._session.in_force)
        return not atoms or not any(
            case.attempt(micro, under=lambda: applied(self._session.view, new)).failed
            for micro in case.failing
        )

    def _resolve(self, action: Action, case: Case | None, report: Report) -> Resolution:
        if action.kind == "adopt":
            self._session.adopt(action.atoms)
        resolution = _resolution(action, case, report.incident.id)
        return replace(resolution, on_stop=self._session.policy.on_stop)

    def _keep(self, report: Report, key: FailureKey) -> None:
        self._known.put(report, key)
        self._session.store.write_report(report)
        self._session.write_summary()


def _runs_alone(found: Investigation, step: Step) -> bool:
    """Return whether one rank can run a step again without the others; if not, why is noted."""
    if not step.is_local:
        return False
    met = found.stage("alone", lambda: communicates(step))
    if met:
        found.failures.append(f"replay: `{met}` needs the other processes")
    return met == ""


def _present(facts: RunFacts, step: Step | None) -> RunFacts:
    """Return the facts of a run as they are in a step: layers may have been unfrozen or cast, the learning rate moved."""
    if step is None:
        return facts
    optimizer, rates = facts.optimizer, [r for r in step.rates if isinstance(r, float)]
    if optimizer is not None and rates:
        odd = [rate for rate in rates if not math.isfinite(rate)]
        optimizer = replace(optimizer, lr=(odd or rates)[0])
    groups = param_groups(step.view.root.named_parameters())
    return replace(facts, param_groups=groups, optimizer=optimizer)


def _resolution(action: Action, case: Case | None, incident: str) -> Resolution:
    """Return how an action is carried out; one that is adopted is in force already, except after a rollback."""
    kind = _KINDS[action.kind]
    atoms: dict[int, tuple[Atom, ...]] = {}
    if kind == "redo" and action.kind != "adopt" and case is not None:
        atoms = {micro: atoms_for(case, action.atoms, micro) for micro in case.failing}
    return Resolution(
        kind=kind,
        atoms=atoms,
        adopt=action.atoms if kind == "rollback" else (),
        reason=action.reason,
        incident=incident,
    )
