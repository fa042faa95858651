"""The only file that knows the order: capture, replay, localize, diagnose, prove, decide, record.

Adapters call a session when the sentinel fires, before the update, and carry out the ``Resolution`` it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from nanstop.core.localize import localize
from nanstop.core.step import ModelView, Step
from nanstop.records import (
    Action,
    Atom,
    AuditEntry,
    Diagnosis,
    Evidence,
    FailureKey,
    Phase,
    Proof,
    Report,
    RunFacts,
    Signal,
)
from nanstop.remedies.table import applied
from nanstop.report.run_report import RunReport
from nanstop.rules.cures import describe
from nanstop.rules.diagnose import examine
from nanstop.run import policy as policies
from nanstop.run.case import Case, Occasion, Rewind, breaking_update, failing_case
from nanstop.run.environment import environment
from nanstop.run.history import WHOLE, History
from nanstop.run.investigation import Investigation
from nanstop.run.known import KnownFailures, left_alone, names_samples
from nanstop.run.policy import Policy, PolicyState
from nanstop.run.resolution import Resolution, resolution_of
from nanstop.run.store import Store
from nanstop.run.summary import FindingRow, Summary, summary_row

Announce = Callable[[Report | Diagnosis | str], None]

_GAUGE_SHARE = 0.005
"""Share of the run's time that the gauge may take, after its look at the first healthy step."""
_HALF = ("float16", "bfloat16")


class Session:
    """One watched run."""

    def __init__(
        self,
        *,
        policy: Policy,
        store: Store,
        view: ModelView,
        facts: RunFacts,
        announce: Announce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.store = store
        self.view = view
        self.facts = facts
        self.series = History(WHOLE) if store.keeps_series else History()
        self.findings: list[Diagnosis] = []
        self.beat: Callable[[int | None], None] = lambda _: None
        """Told each completed step, and None when a training is over."""
        self._known = KnownFailures()
        self._announce = announce
        self._clock = clock
        self._began = clock()
        self._state = PolicyState()
        self._adopted = ExitStack()
        self._in_force: tuple[Atom, ...] = ()
        self._steps = 0
        self._next_gauge: float | None = None
        self._last_signature: tuple[object, ...] | None = None
        self._exit: int | None = None

    @property
    def reports(self) -> list[Report]:
        """The incidents so far, the one that was last seen at the end."""
        return self._known.reports

    def start(self) -> None:
        """Begin a training (again): announce standing findings and what cannot be done in it. No device work."""
        self._exit, self._last_signature = None, None
        self._state = policies.completed(self._state)
        given = Evidence(facts=self.facts, environment=environment())
        for finding in examine(given, "static").diagnoses:
            self._found(finding)
        if self.facts.world_size > 1 and self.policy.on_failure != "observe":
            self._announce(
                f"{self.facts.world_size} processes train together: failures are observed, "
                "nothing is changed"
            )
        if self.facts.veto != "yes":
            self._announce(f"the update cannot be held back here: {self.facts.veto}")
        self._write_summary()

    def failed(
        self,
        step: Step | None,
        signals: Sequence[Signal],
        *,
        phase: Phase = "forward",
        error: BaseException | None = None,
        rewind: Rewind | None = None,
        bad_params: Sequence[str] = (),
        bad_state: Sequence[str] = (),
        can_skip: bool = False,
    ) -> Resolution:
        """Investigate a failure and return what to do. Synchronises the device; everything tried is undone.

        ``can_skip``: without a ``step`` there is an update that can be left out all the same.
        """
        now = Occasion.of(step, signals, can_skip=can_skip)
        known = self._known.explaining(bad_params, at_step=now.at.step, over=not now.can_skip)
        if known is not None:
            # A training that is over has nothing left to decide.
            return self._again(known, now) if now.can_skip else Resolution(kind="proceed")
        signature = (phase, bool(bad_params), type(error), signals[0].source)
        if signature == self._last_signature and self.reports and left_alone(self.reports[-1]):
            self.logged()
            return self._again(self.reports[-1], now)
        self._last_signature = signature
        found = Investigation(
            facts=self.facts,
            at=now.at,
            phase=phase,
            signals=tuple(signals),
            raised=error is not None,
            bad_params=tuple(bad_params),
            bad_state=tuple(bad_state),
        )
        try:
            return self._investigate(found, now, rewind)
        except KeyboardInterrupt:
            found.failures.append("investigation: interrupted by the user")
            self._record(
                found, Action(kind="continue", reason="the investigation was interrupted"), now
            )
            raise
        except Exception as failure:  # nanstop is never the reason a run dies
            found.failures.append(f"investigation: {type(failure).__name__}: {failure}")
            return self._decide(found, now, None)

    def completed(self, step: int) -> None:
        """Note that an update was applied. No device work."""
        self._steps = max(self._steps, step + 1)
        self.beat(step)
        self._state = policies.completed(self._state)
        self._last_signature = None

    def gauge_due(self, _step: int) -> bool:
        """Return whether a healthy micro-batch should run under the recorder now.

        Only half formats absorb overflow at values that training meets, so others are not gauged.
        """
        half = self.facts.autocast in _HALF or any(
            group.dtype in _HALF for group in self.facts.param_groups
        )
        if not half or self.facts.world_size > 1:
            return False
        return self._next_gauge is None or self._clock() >= self._next_gauge

    def gauge(self, step: Step) -> None:
        """Run one micro-batch of a healthy window under the recorder, undone; report overflow that was absorbed."""
        began = self._clock()
        try:
            place = localize(step, 0)
        except Exception as error:  # an instrument must not end a healthy run
            place = None
            self._announce(f"the gauge could not run ({type(error).__name__}: {error})")
        self._next_gauge = self._clock() + (self._clock() - began) / _GAUGE_SHARE
        if place is not None:
            self._examine_healthy(
                Evidence(facts=self.facts, localization=place, series=self.series.records())
            )

    def logged(self) -> None:
        """Look at what was just logged: a number may be an artefact of the log filter. Synchronises the device."""
        self._examine_healthy(Evidence(facts=self.facts, series=self.series.records()))

    def adopt(self, atoms: tuple[Atom, ...]) -> None:
        """Switch remedies on until the run ends, and save them as the run's plan."""
        new = tuple(atom for atom in atoms if atom not in self._in_force)
        if new:
            self._adopted.enter_context(applied(self.view, new))
            self._in_force += new
            self.store.save_plan(self._in_force)

    @property
    def in_force(self) -> tuple[Atom, ...]:
        """The remedies that are on for the rest of the run."""
        return self._in_force

    def resume(self, atoms: tuple[Atom, ...], source: str) -> None:
        """Adopt the remedies that a checkpoint was saved under, before the first step after it."""
        if atoms and self.policy.on_failure == "repair":
            self.adopt(atoms)
            self._announce(f"resumed under {source}: {describe(atoms)}")

    def checkpoint_refused(self, path: str, bad_params: Sequence[str], last_good: str) -> bool:
        """Report a checkpoint that would have held non-finite values; return whether training goes on."""
        names = ", ".join(bad_params[:3])
        kept = f"; the last good state is {last_good}" if last_good else ""
        self._announce(f"checkpoint {path} was not written: {names} not finite{kept}")
        return self.policy.on_failure != "stop"

    def finish(self, exit_code: int = 0) -> None:
        """Undo what was adopted and write the last summary."""
        in_force, self._in_force, self._exit = self._in_force, (), exit_code
        self.beat(None)
        try:
            self._adopted.close()
        except Exception as error:
            self._announce(f"a remedy could not be undone ({type(error).__name__}: {error})")
        self._write_summary()
        if self.store.keeps_series:
            self.store.write_series(self.series.records())
        ended_well = exit_code == 0 and not any(
            report.audit[-1].action.kind == "stop" for report in self.reports
        )
        if in_force and ended_well:
            self._announce(f"this run was kept finite by: {describe(in_force)}")

    def report(self) -> RunReport:
        """Return everything that happened so far."""
        return RunReport(
            tuple(self.reports), tuple(self.findings), self._steps, self._clock() - self._began
        )

    def _investigate(
        self, found: Investigation, now: Occasion, rewind: Rewind | None
    ) -> Resolution:
        case = self._case(found, now.step, rewind)
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
            found.prove(case, self.policy)
            if known is not None and names_samples(known):
                # The samples are new, the failure is not.
                return self._again(known, now, case, proof=found.proof)
        return self._decide(found, now, case)

    def _case(self, found: Investigation, step: Step | None, rewind: Rewind | None) -> Case | None:
        if step is None or self.facts.world_size > 1:
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
        history = found.stage("history", self.series.records) or ()
        found.explain(self.store.open_incident()[0], history)

    def _decide(self, found: Investigation, now: Occasion, case: Case | None) -> Resolution:
        nothing = Proof(incident=found.incident_id, verdict="none_found", minimal=())
        clean = found.replay is not None and found.replay.fidelity == "not_reproduced"
        action = self._choose(found.key, now, case, found.proof or nothing, replays_clean=clean)
        report = self._record(found, action, now)
        self._announce(report)
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
            self._announce(f"{known.incident.id}: adopted for the rest: {describe(action.atoms)}")
        elif action.kind == "stop":
            self._announce(f"{known.incident.id}: training stops: {action.reason}")
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
        action, self._state = policies.decide(
            self.policy,
            self._state,
            key=key,
            proof=proof,
            at_step=now.at.step,
            world_size=self.facts.world_size,
            can_veto=self.facts.veto == "yes" and now.can_skip,
            weights_broken=case is not None and case.update,
            replays_clean=replays_clean,
        )
        if action.kind == "observe" and not now.can_skip and self.policy.on_failure != "observe":
            return replace(action, reason="there is no step to run again: observed only")
        return action

    def _passes(self, case: Case, known: Report) -> bool:
        """Return whether the remedy proven for the earlier failure passes here too (True where none was found then)."""
        if names_samples(known):
            return case.phase != "forward"
        atoms = known.proof.minimal if known.proof else ()
        new = tuple(atom for atom in atoms if atom not in self._in_force)
        return not atoms or not any(
            case.attempt(micro, under=lambda: applied(self.view, new)).failed
            for micro in case.failing
        )

    def _resolve(self, action: Action, case: Case | None, report: Report) -> Resolution:
        if action.kind == "adopt":
            self.adopt(action.atoms)
        return resolution_of(action, case, report.incident.id)

    def _keep(self, report: Report, key: FailureKey) -> None:
        self._known.put(report, key)
        self.store.write_report(report)
        self._write_summary()

    def _examine_healthy(self, evidence: Evidence) -> None:
        for finding in examine(evidence, "gauge").diagnoses:
            self._found(finding)

    def _found(self, finding: Diagnosis) -> None:
        known = {(one.code, one.where) for one in self.findings}
        if (finding.code, finding.where) not in known:
            self.findings.append(finding)
            self._announce(finding)
            self._write_summary()

    def _write_summary(self) -> None:
        self.store.write_summary(
            Summary(
                incidents=tuple(summary_row(report) for report in self.reports),
                findings=tuple(
                    FindingRow(code=f.code, title=f.title, where=f.where, confidence=f.confidence)
                    for f in self.findings
                ),
                exit=self._exit,
                steps=self._steps,
                seconds=self._clock() - self._began,
            )
        )
