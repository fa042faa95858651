"""One watched run: what a healthy one needs is here, what failures need is imported with the
first of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanstop.decide.decision import STOPPED, Decision
from nanstop.decide.policy import Policy
from nanstop.detect.foresight import Foresight
from nanstop.diagnose.evidence.candidates import updated_in_half
from nanstop.ranks import is_first
from nanstop.records import (
    Atom,
    Diagnosis,
    Evidence,
    FailureKey,
    GradientAccount,
    PrecisionPlan,
    Report,
    RunFacts,
    Series,
    Signal,
    StepId,
)
from nanstop.records.facts import BY_HAND
from nanstop.records.remedies import describe
from nanstop.session.findings import Findings
from nanstop.session.history import WHOLE, History
from nanstop.session.looks import Looks
from nanstop.session.machine import command, environment
from nanstop.session.watched_run import WatchedRun
from nanstop.store.incidents import Store
from nanstop.store.summary import Summary, finding_row, summary_row

if TYPE_CHECKING:
    from nanstop.detect.signals import Alarm
    from nanstop.prove.failing_step import Rewind
    from nanstop.remedies.saved_models import SavedModels
    from nanstop.replay.step import ModelView, Step
    from nanstop.report.run_report import RunReport
    from nanstop.session.failures import Conclusion, Failures

Announce = Callable[[Report | Diagnosis | str], None]


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
        self.policy = policy
        self.store = store
        self.view = view
        self.facts = facts
        self.environment = replace(environment(), command=command())
        self.series = History(WHOLE) if store.keeps_series else History()
        self._told = Findings(self._tell)
        self.beat: Callable[[int | None], None] = lambda _: None
        """Told each completed step, and None when a training is over."""
        self.present: Callable[[], StepId | None] = lambda: None
        self.opened: Callable[[Session], None] = lambda _: None
        """Told of a training that begins, when its facts are known."""
        self._failures: Failures | None = None
        self.announce = announce
        self._plan = plan
        self._clock = clock
        self._began = clock()
        self._looks = Looks(
            self,
            self._told,
            announce=announce,
            learned=self.learned,
            keeps_ranges=store.keeps_series and facts.world_size == 1,
            clock=clock,
        )
        self._foresight = Foresight()
        self._adopted = ExitStack()
        self._in_force: tuple[Atom, ...] = ()
        self._saves: SavedModels | None = None
        self._steps = 0
        self._exit: int | None = None

    @property
    def reports(self) -> list[Report]:
        return self._failures.known.reports if self._failures is not None else []

    @property
    def findings(self) -> list[Diagnosis]:
        return self._told.all

    @property
    def may_leave_out(self) -> bool:
        facts = self.facts
        return self.policy.on_failure != "observe" and facts.world_size == 1 and facts.veto == "yes"

    def prepare(self) -> None:
        if self._plan is None:
            return
        from nanstop.remedies.plan import atoms_of

        self.adopt(atoms_of(self._plan, self.view))

    def start(self) -> None:
        self._exit = None
        if self._saves is not None and not self._in_force:
            self._saves.release()  # of an earlier training of this model
        if self._failures is not None:
            self._failures.begun()
        self.opened(self)
        self._examine_setup()
        left = self.facts.left_weights
        if left:
            names = ", ".join(f"`{stats.name}`" for stats in left[:3])
            self.announce(
                f"an earlier training in this process left {len(left)} weights not finite or far "
                f"too large: {names}{' and more' if len(left) > 3 else ''}"
            )
        if self.facts.world_size > 1 and self.policy.on_failure != "observe":
            self.announce(
                f"{self.facts.world_size} processes train together: failures are observed, "
                "nothing is changed"
            )
        if self.facts.veto not in ("yes", BY_HAND):
            self.announce(f"the update cannot be held back here: {self.facts.veto}")
        self._write_summary()

    def failed(
        self,
        step: Step | None,
        alarm: Alarm,
        *,
        rewind: Rewind | None = None,
        can_skip: bool = False,
    ) -> Decision:
        failures = self._met_failures()
        end = failures and failures.met(step, alarm, rewind=rewind, can_skip=can_skip)
        return self._concluded(end) if end is not None else Decision(kind="proceed")

    def _met_failures(self) -> Failures | None:
        self._looks.drop()
        try:
            from nanstop.session.failures import Failures
        except Exception as missing:  # a nanstop that was replaced on the disk since this run began
            self.announce(f"a failure could not be looked at ({missing})")
            return None
        if self._failures is None:
            self._failures = Failures(self)
        return self._failures

    def _concluded(self, end: Conclusion) -> Decision:
        """Write, tell and put in force what a failure has come to, and return it.
        Nowhere else has one an effect.
        """
        is_new = end.is_new
        if is_new:
            end = end.named(self.store.open_incident()[0])
        incident, action = end.report.incident.id, end.action
        self._keep(end.report, end.key)
        if end.interrupt is not None:
            raise end.interrupt
        if end.like_the_last:
            self.logged()
        if is_new:
            self.announce(end.report)
        elif action.kind == "adopt":
            self.announce(f"{incident}: adopted for the rest: {describe(action.atoms)}")
        elif action.kind == "stop":
            self.announce(f"{incident}: training stops: {action.reason}")
        if action.kind == "adopt":
            self.adopt(action.atoms)
        on_stop = self.policy.on_stop
        return Decision.to(action, atoms=end.atoms, incident=incident, on_stop=on_stop)

    def carried_out(
        self, decision: Decision, outcome: str, *, before: str = "", after: str = ""
    ) -> None:
        report = next((one for one in self.reports if one.incident.id == decision.incident), None)
        if report is not None and self._failures is not None:
            entry = replace(report.audit[-1], outcome=outcome, before=before, after=after)
            report = replace(report, audit=(*report.audit[:-1], entry))
            self._keep(report, self._failures.known.key_of(report))

    def _keep(self, report: Report, key: FailureKey) -> None:
        assert self._failures is not None
        self._failures.known.put(report, key)
        self.store.write_report(report)
        self._write_summary()

    def completed(self, step: int) -> None:
        self._steps = max(self._steps, step + 1)
        self.beat(step)
        if self._failures is not None:
            self._failures.passed()
        self._looks.updated(step)

    def left_out(self, step: int) -> None:
        self._steps = max(self._steps, step + 1)
        self.beat(step)

    def learned(self, *, at: StepId | None = None, **facts: Any) -> None:
        self.facts = replace(self.facts, **facts)
        self._examine_setup(at=at or self.present(), learned=tuple(facts))

    def raised(self, at: StepId, error: BaseException) -> None:
        self._examine_setup(at=at, refusal=str(error)[:500])

    def before_update(self, step: Step) -> None:
        self._looks.before_update(step)

    def accounted(self, account: GradientAccount) -> None:
        self._looks.accounted(account)

    def foresee(self, step: Step, rewind: Callable[[], Rewind | None]) -> Decision | None:
        if self.facts.world_size > 1 or self.facts.veto != "yes":
            return None
        ruinous = self._foresight.ruinous(step)
        obstacle, self._foresight.obstacle = self._foresight.obstacle, ""
        if obstacle and "float16" in updated_in_half(self.facts):
            self.announce(f"updates cannot be judged before they are applied: {obstacle}")
        failures = self._met_failures() if ruinous else None
        if failures is None:
            return None
        expected = [
            Signal(source="param", name=one.parameter, value=one.length, at=step.id)
            for one in ruinous
        ]
        end = failures.foreseen(step, rewind(), expected, self._foresight.lost_moments)
        decision = None
        if isinstance(end, tuple):
            for line in end:
                self.announce(f"an update could not be judged ({line})")
        else:
            decision = self._concluded(end)
        if decision is not None and decision.kind == "skip":
            self._foresight.left_out()
        else:  # cured, left alone, or no more than a sample's: not asked again
            self._foresight.over = True
        return decision

    def gauge_due(self, step: int) -> bool:
        return self._looks.due(step)

    def gauge(self, step: Step) -> None:
        self._looks.again(step)

    def logged(self) -> None:
        self._looks.logged()

    def adopt(self, atoms: tuple[Atom, ...]) -> None:
        new = tuple(atom for atom in atoms if atom not in self._in_force)
        if new:
            from nanstop.remedies.lasting import lasting

            self._adopted.enter_context(lasting(self.view, new))
            self._in_force += new
            self.store.save_plan(self._in_force)
            self._follow_saves()

    def _follow_saves(self) -> None:
        from nanstop.remedies.saved_models import SavedModels

        if self._saves is None or self._saves.root is not self.view.root:
            self._saves = SavedModels(self.view.root, self.announce)
        self._saves.need(self._in_force)

    def saved(self, folder: Path) -> None:
        if self._saves is not None:
            self._saves.saved(folder)

    @property
    def in_force(self) -> tuple[Atom, ...]:
        return self._in_force

    def resume(self, plan: PrecisionPlan, source: str) -> None:
        if plan == PrecisionPlan():
            return
        from nanstop.remedies.plan import atoms_of

        atoms = tuple(one for one in atoms_of(plan, self.view) if one not in self._in_force)
        if atoms and self.policy.on_failure == "repair":
            self.adopt(atoms)
            self.announce(f"resumed under {source}: {describe(atoms)}")

    def checkpoint_refused(self, path: str, bad_params: Sequence[str], last_good: str) -> Decision:
        names = ", ".join(bad_params[:3])
        kept = f"; the last good state is {last_good}" if last_good else ""
        refusal = f"checkpoint {path} was not written: {names} not finite{kept}"
        self.announce(refusal)
        kind = "stop" if self.policy.on_failure == "stop" else "proceed"
        return Decision(kind=kind, reason=refusal, on_stop=self.policy.on_stop)

    def finish(self, exit_code: int = 0) -> None:
        in_force, self._in_force, self._exit = self._in_force, (), exit_code
        ranges = self._looks.finish(ended_well=exit_code == 0)
        self.beat(None)
        try:
            self._adopted.close()
        except Exception as error:
            self.announce(f"a remedy could not be undone ({type(error).__name__}: {error})")
        self._write_summary()
        if self.store.keeps_series:
            self.store.write_series((*self.series.records(), *ranges))
        if self.reports and is_first():
            self._write_page(in_force, ranges)
        lost = self._failures.num_left_out if self._failures is not None else 0
        if (
            lost and self._steps >= lost
        ):  # one that an exception of the script ended the run in was not
            self.announce(f"{lost} of {self._steps} updates were left out")
        if in_force and exit_code == 0:
            self._say_how_it_ended(in_force)

    def _write_page(self, in_force: tuple[Atom, ...], ranges: tuple[Series, ...]) -> None:
        from nanstop.report.page_file import write_page

        plan = PrecisionPlan(remedies=in_force) if in_force else None
        write_page(self.store, lambda: (*self.series.recent(), *ranges), plan)

    def _say_how_it_ended(self, in_force: tuple[Atom, ...]) -> None:
        from nanstop.session.run_end import not_finite

        try:
            broken = not_finite(self.view, self.series)
        except Exception as error:  # what was trained may be gone by now
            said = f"in force to the end: {describe(in_force)} (the end could not be looked at: "
            self.announce(f"{said}{type(error).__name__})")
            return
        if not broken:
            needed = self._saves.at_the_end() if self._saves is not None else ""
            self.announce(f"this run was kept finite by: {describe(in_force)}{needed}")
            return
        names = ", ".join(f"`{name}`" for name in broken[:3])
        more = " and more" if len(broken) > 3 else ""
        self.announce(
            f"this run did not stay finite under: {describe(in_force)} (not finite at its end: "
            f"{names}{more})"
        )

    def report(self) -> RunReport:
        from nanstop.report.run_report import RunReport

        return RunReport(
            tuple(self.reports),
            tuple(self.findings),
            self._steps,
            self._clock() - self._began,
            stopped=self._exit == STOPPED,
        )

    def _examine_setup(self, **seen: Any) -> None:
        """``seen``: fields of ``Evidence`` that say where something was met."""
        known = Evidence(facts=self.facts, environment=self.environment, **seen)
        self._told.examine_setup(known)

    def _tell(self, finding: Diagnosis) -> None:
        self.announce(finding)
        self._write_summary()

    def _write_summary(self) -> None:
        self.store.write_summary(
            Summary(
                incidents=tuple(summary_row(report) for report in self.reports),
                findings=tuple(finding_row(one) for one in self.findings),
                exit=self._exit,
                steps=self._steps,
                seconds=self._clock() - self._began,
                ended="stopped" if self._exit == STOPPED else None,
            )
        )
