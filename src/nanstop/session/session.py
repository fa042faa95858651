"""One watched run. What failures need is imported with the first of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanstop.decide.agreement import ONE_RANK, Ranks
from nanstop.decide.decision import STOPPED, Decision
from nanstop.decide.policy import Policy
from nanstop.detect.foresight import Foresight
from nanstop.diagnose.evidence.candidates import updated_in_half
from nanstop.ranks import is_first
from nanstop.records import (
    Atom,
    BatchRows,
    Diagnosis,
    Evidence,
    FailureKey,
    GradientAccount,
    PrecisionPlan,
    Report,
    RunFacts,
    StepId,
)
from nanstop.records.remedies import describe
from nanstop.report.announce import News, short
from nanstop.report.text.blocks.finding import mended_too
from nanstop.report.text.run_end import RunEnd, said_again
from nanstop.report.text.run_start import said_at_start
from nanstop.session.cures import Cures
from nanstop.session.findings import Findings, is_incident
from nanstop.session.history import WHOLE, History
from nanstop.session.looks import Looks
from nanstop.session.machine import command, environment
from nanstop.session.run_end import filled
from nanstop.session.shown_text import ids_as_text
from nanstop.session.telling.live import Live
from nanstop.session.watched_run import WatchedRun, WrittenBy
from nanstop.store.incidents import Store
from nanstop.store.summary import summary_of

if TYPE_CHECKING:
    from nanstop.detect.signals import Alarm
    from nanstop.prove.failing_step import WayBack
    from nanstop.replay.step import Batch, ModelView, Step
    from nanstop.report.run_report import RunReport
    from nanstop.session.failing.failures import Failures
    from nanstop.session.shared.conclusion import Conclusion

Announce = Callable[[News], None]


class Session(WatchedRun):
    """One watched run. It alone tells, writes and puts in force what its stages come to."""

    def __init__(
        self,
        *,
        policy: Policy,
        store: Store,
        view: ModelView,
        facts: RunFacts,
        announce: Announce,
        plan: PrecisionPlan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy, self.terms = policy, repr(policy)
        self.store = store
        self.view = self._cured = view
        self.facts = facts
        self.environment = replace(environment(), command=command())
        self.series = History(WHOLE) if store.keeps_series else History()
        self.metrics, self.rooms = History(), History()
        kept, is_told = (self.series, self.metrics, self.rooms), is_first()
        self.live = Live(store.folder, kept, writes=is_told, quiet=policy.quiet, clock=clock)
        self._told = Findings(self._tell)
        self.beat: Callable[[int | None], None] = lambda _: None
        """Told each completed step, and None when a training is over."""
        self.present: Callable[[], StepId | None] = lambda: None
        self.rows_of: Callable[[Batch], BatchRows | None] = lambda _: None
        self.decode: Callable[[Sequence[int]], str] = ids_as_text
        self.written_by: WrittenBy = lambda _: ()
        self.opened: Callable[[Session], None] = lambda _: None
        """Told of a training that begins, when its facts are known."""
        self._failures: Failures | None = None
        self.announce = announce
        self._plan = plan
        self._clock, self._began = clock, clock()
        self._looks = Looks(
            self,
            self._told,
            announce=announce,
            learned=self.learned,
            keeps_ranges=store.keeps_series and facts.world_size == 1,
            clock=clock,
        )
        self._foresight = Foresight()
        self._cures = Cures(store, announce)
        self._steps = 0
        self._end = RunEnd()
        self._stop: Decision | None = None
        self._exit: int | None = None

    @property
    def reports(self) -> list[Report]:
        return self._failures.known.reports if self._failures is not None else []

    @property
    def findings(self) -> list[Diagnosis]:
        as_incidents = [one.diagnoses[0] for one in self.reports if one.trains_nothing]
        return [one for one in self._told.all if one not in as_incidents]

    @property
    def may_leave_out(self) -> bool:
        facts = self.facts
        return self.policy.on_failure != "observe" and facts.world_size == 1 and facts.veto == "yes"

    def prepare(self) -> None:
        if self._plan is not None:
            from nanstop.remedies.plan import atoms_of

            self.adopt(atoms_of(self._plan, self.view))

    def start(self, *, trains: bool = True) -> None:
        self._exit, self._end, self._stop = None, RunEnd(), None
        self._cures.begin()
        if self._failures is not None:
            self._failures.begun()
        self.opened(self)
        if trains:
            self._suspect_state()
            self._examine_setup()
            for line in said_at_start(self.facts):
                self.announce(line)
        self._write_summary()
        self.live.begin(host=self.facts.host)

    def failed(
        self,
        step: Step | None,
        alarm: Alarm,
        *,
        rewind: WayBack | None = None,
        can_skip: bool = False,
        ranks: Ranks = ONE_RANK,
    ) -> Decision:
        failures = self._met_failures()
        if failures is None:
            ranks.leave("a rank could not look at its failure")
            return Decision(kind="proceed")
        end = failures.concluded(self._named, ranks, step, alarm, rewind=rewind, can_skip=can_skip)
        return self._concluded(end) if end is not None else Decision(kind="proceed")

    def _named(self, end: Conclusion) -> Conclusion:
        return end if end.report.incident.id else end.named(*self.store.open_incident())

    def _met_failures(self) -> Failures | None:
        self._looks.drop()
        try:
            from nanstop.session.failing.failures import Failures
        except Exception as missing:  # a nanstop that was replaced on the disk since this run began
            self.announce(f"a failure could not be looked at ({missing})")
            return None
        if self._failures is None:
            self._failures = Failures(self)
        return self._failures

    def _concluded(self, end: Conclusion) -> Decision:
        """Write, tell and put in force what a failure has come to; nowhere else has one effect."""
        incident, action = end.report.incident.id, end.action
        self._cured = end.view or self.view
        self._keep(end.report, end.key)
        times = self._end.came(incident, end.kept_in)
        if end.interrupt is not None:
            raise end.interrupt
        if end.like_the_last:
            self.logged()
        if end.is_new and incident in self.store.own:
            self.announce(end.report)
        elif action.kind == "adopt":
            self.announce(f"from now on: {describe(action.atoms)} (incident {incident})")
        elif action.kind == "stop" and self.policy.on_stop != "raise":  # an exception says it
            self.announce(f"training stops: {action.reason} (incident {incident})")
        elif said := said_again(end.report, times):
            self.announce(said)
        if action.kind == "adopt":
            self.adopt(action.atoms)
        folder, on_stop = short(self.store.folder / incident), self.policy.on_stop
        return Decision.to(action, end.report, atoms=end.atoms, on_stop=on_stop, folder=folder)

    def carried_out(
        self, decision: Decision, outcome: str, *, before: str = "", after: str = ""
    ) -> None:
        report = next((one for one in self.reports if one.incident.id == decision.incident), None)
        if report is not None and self._failures is not None:
            entry = replace(report.audit[-1], outcome=outcome, before=before, after=after)
            if entry.action.kind == "quarantine" and outcome == "done":
                self._end.dropped += entry.action.atoms
            report = replace(report, audit=(*report.audit[:-1], entry))
            self._keep(report, self._failures.known.key_of(report))

    def _keep(self, report: Report, key: FailureKey) -> None:
        assert self._failures is not None
        self._failures.known.put(report, key)
        if report.incident.id in self.store.own:  # else the rank that looked into it writes it
            self.store.write_report(report)
        self._write_summary()

    def completed(self, step: int, *, optimizer: int | None = None) -> None:
        self._count(step, optimizer)
        if self._failures is not None:
            self._failures.passed(step, optimizer)
        self._looks.updated(step)

    def left_out(self, step: int, *, optimizer: int | None = None) -> None:
        self.metrics.add("skipped", step, (self.metrics.last("skipped") or 0) + 1)
        self._count(step, optimizer)

    def _count(self, step: int, optimizer: int | None) -> None:
        self._steps = max(self._steps, step + 1)
        self._end.seen(optimizer or 0)
        self.beat(step)
        self.live.stepped(step)

    def learned(self, *, at: StepId | None = None, **facts: Any) -> None:
        self.facts = replace(self.facts, **facts)
        if "optimizer" in facts:
            self._suspect_state()
        self._examine_setup(at=at or self.present(), learned=tuple(facts))

    def raised(self, at: StepId, error: BaseException) -> None:
        self._examine_setup(at=at, refusal=str(error)[:500])

    def before_update(self, step: Step) -> Decision | None:
        self._looks.before_update(step)
        stop, self._stop = self._stop, None
        return stop

    def follow(self, view: ModelView) -> None:
        self.view = self._cured = view
        if view.optimizer is not None:
            self.facts = replace(self.facts, **view.about_optimizer())
        self._looks.follow(view)

    def accounted(self, account: GradientAccount) -> None:
        self._looks.accounted(account)

    def foresee(self, step: Step, rewind: Callable[[], WayBack | None]) -> Decision | None:
        if self.facts.world_size > 1 or self.facts.veto != "yes":
            return None
        ruinous = self._foresight.ruinous(step)
        obstacle, self._foresight.obstacle = self._foresight.obstacle, ""
        if obstacle and "float16" in updated_in_half(self.facts):
            self.announce(f"updates cannot be judged before they are applied: {obstacle}")
        failures = self._met_failures() if ruinous else None
        if failures is None:
            return None
        expected = [one.as_signal(step.id) for one in ruinous]
        end = failures.foreseen(step, rewind(), expected, self._foresight.lost_moments)
        decision = None if isinstance(end, tuple) else self._concluded(self._named(end))
        for line in end if isinstance(end, tuple) else ():
            self.announce(f"an update could not be judged ({line})")
        if decision is not None and decision.kind == "skip":
            self._foresight.left_out()
        else:  # cured, left alone, or no more than a sample's: not asked again
            self._foresight.settled()
        return decision

    def may_read_late(self, step: Step) -> bool:
        comes_first = self.policy.audit_devices or self._foresight.looks(step.view.optimizer)
        return self.may_leave_out and not comes_first and self._looks.may_wait(step)

    def gauge_due(self, step: int) -> bool:
        return self._looks.due(step)

    def gauge(self, step: Step) -> None:
        self._looks.again(step)

    def audit(self, step: Step, ranks: Callable[[], Ranks]) -> None:
        self._looks.audit(step, ranks)

    def logged(self) -> None:
        self._looks.logged()

    def adopt(self, atoms: tuple[Atom, ...]) -> None:
        self._cures.adopt(atoms, self._cured, self.view.root, self.reports)

    def saved(self, folder: Path) -> None:
        self._cures.saved(folder)

    @property
    def in_force(self) -> tuple[Atom, ...]:
        return self._cures.in_force

    def resume(self, plan: PrecisionPlan, source: str) -> None:
        if plan == PrecisionPlan():
            return
        from nanstop.remedies.plan import atoms_of

        atoms = tuple(one for one in atoms_of(plan, self.view) if one not in self.in_force)
        if atoms and self.policy.on_failure == "repair":
            self.adopt(atoms)
            self.announce(f"resumed under {source}: {describe(atoms)}")

    def checkpoint_refused(self, path: str, bad_params: Sequence[str], last_good: str) -> Decision:
        kept = f"; the last good state is {last_good}" if last_good else ""
        refusal = f"checkpoint {path} was not written: {', '.join(bad_params[:3])} not finite{kept}"
        self.announce(refusal)
        kind = "stop" if self.policy.on_failure == "stop" else "proceed"
        return Decision(kind=kind, reason=refusal, on_stop=self.policy.on_stop)

    def finish(self, exit_code: int = 0) -> None:
        in_force, self._exit = self._cures.end(), exit_code
        ranges = self._looks.finish(ended_well=exit_code == 0)
        self.beat(None)
        self._cures.undo()
        self._write_summary()
        self.live.end(exit_code)
        if self.store.keeps_series:
            self.store.write_series((*self.series.records(), *ranges))
        if is_first() and self.store.has_news:
            from nanstop.report.page_file import write_page

            plan = PrecisionPlan(remedies=in_force) if in_force else None
            write_page(self.store, lambda: (*self.series.recent(), *ranges), plan)
        if not self.policy.quiet:
            self.announce(self._told_at_end(in_force))

    def _told_at_end(self, in_force: tuple[Atom, ...]) -> RunEnd:
        end, kept = self._end, in_force if self._exit == 0 else ()
        end.findings = self.findings
        end.lost = self._failures.lost if self._failures is not None else {}
        end.ended = {0: "", STOPPED: "then stopped"}.get(self._exit or 0, "ended early")
        if kept:
            end.needed = self._cures.needed_by_saved()
        return filled(end, self, self.store, kept)

    def report(self) -> RunReport:
        from nanstop.report.run_report import RunReport

        return RunReport(
            tuple(self.reports),
            tuple(self.findings),
            self._steps,
            self._clock() - self._began,
            stopped=self._exit == STOPPED,
            exit=self._exit,
            series=(*self.series.recent(), *self.metrics.recent()),
        )

    def _examine_setup(self, **seen: Any) -> None:
        """``seen``: fields of ``Evidence`` that say where something was met."""
        self._told.examine_setup(Evidence(facts=self.facts, environment=self.environment, **seen))

    def _suspect_state(self) -> None:
        optimizer = self.facts.optimizer
        self._foresight.suspect(optimizer.state_faults if optimizer is not None else ())

    def _tell(self, finding: Diagnosis) -> None:
        if is_incident(finding, self.facts) and self._met_failures() is not None:
            from nanstop.session.telling.no_training import of_no_training

            decision = self._concluded(self._named(of_no_training(self, finding)))
            self._stop = decision if decision.kind == "stop" else None
            return
        by = finding.mended_by
        self.announce(mended_too(finding, by) if by else self._told.without_help_again(finding))
        self._write_summary()

    def _write_summary(self) -> None:
        own, took = self.store.own, self._clock() - self._began
        self.store.write_summary(
            summary_of(
                [one for one in self.reports if one.incident.id in own],
                self.findings,
                stopped=self._exit == STOPPED,
                exit=self._exit,
                steps=self._steps,
                seconds=took,
                began=round(time.time() - took),
                script=getattr(self.environment.command, "script_name", None),
                trained_nothing=self._failures is not None
                and self._end.trains_nothing(self._failures.lost),
            )
        )
