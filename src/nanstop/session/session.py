"""One watched run: what a healthy one needs is here, what failures need is imported with the first of them.

Adapters call a session when the sentinel fires, before the update, and carry out the ``Resolution`` it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanstop.decide.decision import STOPPED, Resolution
from nanstop.decide.policy import Policy
from nanstop.detect.early_steps import EarlySteps
from nanstop.detect.foresight import Foresight
from nanstop.detect.gauge import Gauge
from nanstop.detect.standstill import ELSEWHERE, Standstill
from nanstop.diagnose.diagnose import examine
from nanstop.diagnose.evidence.candidates import updated_in_half
from nanstop.records import (
    Atom,
    Diagnosis,
    Evidence,
    GradientPath,
    Phase,
    PrecisionPlan,
    Probe,
    Report,
    ResumeFacts,
    RunFacts,
    Signal,
    StepId,
)
from nanstop.records.remedies import describe
from nanstop.session.findings import Findings
from nanstop.session.history import WHOLE, History
from nanstop.session.machine import environment
from nanstop.session.sampled_ranges import SampledRanges
from nanstop.store.incidents import Store
from nanstop.store.summary import Summary, finding_row, summary_row

if TYPE_CHECKING:
    from nanstop.prove.failing_step import Rewind
    from nanstop.replay.step import ModelView, Step
    from nanstop.report.run_report import RunReport
    from nanstop.session.failures import Failures

Announce = Callable[[Report | Diagnosis | str], None]


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
        plan: PrecisionPlan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.store = store
        self.view = view
        self.facts = facts
        self.environment = environment()
        self.series = History(WHOLE) if store.keeps_series else History()
        self._told = Findings(self)
        self.beat: Callable[[int | None], None] = lambda _: None
        """Told each completed step, and None when a training is over."""
        self.present: Callable[[], StepId | None] = lambda: None
        """Asks the host which step the run is in."""
        self.opened: Callable[[Session], None] = lambda _: None
        """Told of a training that begins, when its facts are known."""
        self._failures: Failures | None = None
        self.announce = announce
        self._plan = plan
        self._clock = clock
        self._began = clock()
        self._gauge = Gauge(view, clock)
        self._looks = EarlySteps(view)
        self._standstill = Standstill()
        self._foresight = Foresight()
        self._adopted = ExitStack()
        self._in_force: tuple[Atom, ...] = ()
        self._steps = 0
        self._window: StepId | None = None
        """The last window that was healthy before its update."""
        self._ranges = SampledRanges(wanted=store.keeps_series and facts.world_size == 1)
        self._exit: int | None = None

    @property
    def reports(self) -> list[Report]:
        """The incidents so far, the one that was last seen at the end."""
        return self._failures.reports if self._failures is not None else []

    @property
    def findings(self) -> list[Diagnosis]:
        """What was found in the run so far beside its failures, weightiest first."""
        return self._told.all

    def prepare(self) -> None:
        """Put the plan that the user gave in force, before the facts of the run are taken. Errors: ``NanstopError``."""
        if self._plan is None:
            return
        from nanstop.remedies.plan import atoms_of

        self.adopt(atoms_of(self._plan, self.view))

    def start(self) -> None:
        """Begin a training (again): announce standing findings and what cannot be done in it. No device work."""
        self._exit = None
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
        if self.facts.veto != "yes":
            self.announce(f"the update cannot be held back here: {self.facts.veto}")
        self.write_summary()

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
        failures = self._met_failures()
        if failures is None:
            return Resolution(kind="proceed")
        return failures.met(
            step,
            signals,
            phase=phase,
            error=error,
            rewind=rewind,
            bad_params=bad_params,
            bad_state=bad_state,
            can_skip=can_skip,
        )

    def _met_failures(self) -> Failures | None:
        self._gauge.drop()
        try:
            from nanstop.session.failures import Failures
        except Exception as missing:  # a nanstop that was replaced on the disk since this run began
            self.announce(f"a failure could not be looked at ({missing})")
            return None
        if self._failures is None:
            self._failures = Failures(self)
        return self._failures

    def completed(self, step: int) -> None:
        """Note that an update was applied. Synchronises the device where the gauge has looked at the step."""
        self._steps = max(self._steps, step + 1)
        self.beat(step)
        self._passed()
        self._arrived(self._looks.unheld(), self._window)
        self._look(lambda: self._looks.updated(step))
        if step & (step + 1) == 0:  # a loop has no logs at which its series are looked at
            self._look(self.logged)
        self._follow(step)

    def left_out(self, step: int) -> None:
        """Note that the run went on without this update: the scaler, or a resolution, had it left out."""
        self._steps = max(self._steps, step + 1)
        self.beat(step)

    def learned(self, *, at: StepId | None = None, **facts: Any) -> None:
        """Look at the set-up once more: these fields of ``RunFacts`` were read anew in step ``at``, now by default."""
        self.facts = replace(self.facts, **facts)
        self._examine_setup(at=at or self.present(), learned=tuple(facts))

    def raised(self, at: StepId, error: BaseException) -> None:
        """Look at the set-up once more: the run's own code raised what is no failure of numbers, in this step."""
        self._examine_setup(at=at, refusal=str(error)[:500])

    def before_update(self, step: Step) -> None:
        """Look at a healthy window whose update is near: whether gradients arrived, and what they are about to move."""
        self._window = step.id
        self._standstill.note(self.series.last("grad_norm"))
        self._arrived(self._looks.arrived(self.facts, step), step.id)
        share = self._looks.replaced(step.view)
        if share > 0.0:
            self.learned(resume=replace(self.facts.resume or ResumeFacts(), replaced=share))
        self._look(lambda: self._looks.before_update(step, self.facts))

    def foresee(self, step: Step, rewind: Callable[[], Rewind | None]) -> Resolution | None:
        """Return what to do about an update of a healthy window that will ruin weights, None for any other.

        Asked once an update, when its gradients are final. ``rewind`` gives the way back, this step the last of it.
        Synchronises the device where the update is one of those that are rehearsed.
        """
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
        resolution = failures.foreseen(step, rewind(), expected)
        if resolution is not None and resolution.kind == "skip":
            self._foresight.left_out()
        else:  # cured, left alone, or no more than a sample's: not asked again
            self._foresight.over = True
        return resolution

    def _arrived(self, path: GradientPath | None, at: StepId | None) -> None:
        if path is not None:
            self.learned(at=at, gradient_path=path)

    def gauge_due(self, step: int) -> bool:
        """Return whether a healthy micro-batch should be run once more for a closer look."""
        due = self._ranges.due(step) or self._gauge.wide_due(self.facts)
        due = due or self._standstill.due(self.facts)
        return due or self._looks.due(step, self.facts)

    def gauge(self, step: Step) -> None:
        """Run one micro-batch of a healthy window again, undone; report overflow that was absorbed."""
        place = None
        try:
            if self._ranges.due(step.id.step):
                self._ranges.take(step)
            if self._gauge.wide_due(self.facts):
                place = self._gauge.wide(step)
            if self._standstill.due(self.facts):
                self.series.add(ELSEWHERE, step.id.step, self._standstill.take(step))
            if self._looks.due(step.id.step, self.facts):
                self._look(lambda: self._looks.again(step, self.facts))
        except Exception as error:  # an instrument must not end a healthy run
            self.announce(f"the gauge could not run ({type(error).__name__}: {error})")
        if place is not None:
            self._told.examine_healthy(
                Evidence(
                    facts=self.facts,
                    localization=place,
                    series=self.series.recent(),
                    at=replace(step.id, micro=0),
                )
            )

    def logged(self) -> None:
        """Look at what was just logged: a number may be an artefact of the log filter. Synchronises the device.

        Costs as much at each log: the rules are shown the end of each series (0.3 ms with its 512 values).
        """
        self._told.examine_healthy(Evidence(facts=self.facts, series=self.series.recent()))

    def adopt(self, atoms: tuple[Atom, ...]) -> None:
        """Switch remedies on until the run ends, and save them as the run's plan."""
        new = tuple(atom for atom in atoms if atom not in self._in_force)
        if new:
            from nanstop.remedies.lasting import lasting

            self._adopted.enter_context(lasting(self.view, new))
            self._in_force += new
            self.store.save_plan(self._in_force)

    @property
    def in_force(self) -> tuple[Atom, ...]:
        """The remedies that are on for the rest of the run."""
        return self._in_force

    def resume(self, plan: PrecisionPlan, source: str) -> None:
        """Adopt the plan that a checkpoint was saved under, before the first step after it."""
        if plan == PrecisionPlan():
            return
        from nanstop.remedies.plan import atoms_of

        atoms = tuple(one for one in atoms_of(plan, self.view) if one not in self._in_force)
        if atoms and self.policy.on_failure == "repair":
            self.adopt(atoms)
            self.announce(f"resumed under {source}: {describe(atoms)}")

    def checkpoint_refused(
        self, path: str, bad_params: Sequence[str], last_good: str
    ) -> Resolution:
        """Report a checkpoint that would have held non-finite values; return whether training is to stop."""
        names = ", ".join(bad_params[:3])
        kept = f"; the last good state is {last_good}" if last_good else ""
        refusal = f"checkpoint {path} was not written: {names} not finite{kept}"
        self.announce(refusal)
        kind = "stop" if self.policy.on_failure == "stop" else "proceed"
        return Resolution(kind=kind, reason=refusal, on_stop=self.policy.on_stop)

    def finish(self, exit_code: int = 0) -> None:
        """Undo what was adopted and write the last summary. ``exit_code``: ``STOPPED`` after a resolution to stop."""
        in_force, self._in_force, self._exit = self._in_force, (), exit_code
        self._look(self.logged)
        self._gauge.drop()
        self.beat(None)
        try:
            self._adopted.close()
        except Exception as error:
            self.announce(f"a remedy could not be undone ({type(error).__name__}: {error})")
        self.write_summary()
        if self.store.keeps_series:
            self.store.write_series((*self.series.records(), *self._ranges.records()))
        lost = self._failures.num_left_out if self._failures is not None else 0
        if (
            lost and self._steps >= lost
        ):  # one that an exception of the script ended the run in was not
            self.announce(f"{lost} of {self._steps} updates were left out")
        if in_force and exit_code == 0:
            self.announce(f"this run was kept finite by: {describe(in_force)}")

    def report(self) -> RunReport:
        """Return everything that happened so far."""
        from nanstop.report.run_report import RunReport

        return RunReport(
            tuple(self.reports),
            tuple(self.findings),
            self._steps,
            self._clock() - self._began,
            stopped=self._exit == STOPPED,
        )

    def _look(self, look: Callable[[], Probe | None]) -> None:
        """Take a look that may fail, and say what it found."""
        try:
            found = look()
        except Exception as error:  # an instrument must not end a healthy run
            self.announce(f"a look was left out ({type(error).__name__}: {error})")
            return
        if found is not None:
            evidence = Evidence(facts=self.facts, probe=found, at=found.at)
            for finding in examine(evidence, "gauge").diagnoses:
                self._told.measured(finding)

    def _follow(self, step: int) -> None:
        """Follow the ranges of the model's modules; say once that one is about to leave its format."""
        if self.facts.world_size > 1 or self.facts.compiled:
            return
        try:
            row = self._gauge.stepped(step)
        except Exception as error:  # an instrument must not end a healthy run
            self._gauge.close()
            self.announce(f"ranges are no longer followed ({type(error).__name__}: {error})")
            return
        if row is not None:
            self._told.examine_healthy(
                Evidence(facts=self.facts, ranges=(row,), series=self.series.recent())
            )

    def _passed(self) -> None:
        if self._failures is not None:
            self._failures.passed()

    def _examine_setup(self, **seen: Any) -> None:
        """``seen``: fields of ``Evidence`` that say where something was met."""
        known = Evidence(facts=self.facts, environment=self.environment, **seen)
        self._told.examine_setup(known)

    def write_summary(self) -> None:
        """Write down where the run stands."""
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
