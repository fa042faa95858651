"""One failure, stage by stage. A stage that cannot be completed becomes a line of the report;
the others still count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from nanstop.diagnose.diagnose import examine
from nanstop.errors import NanstopError, brief
from nanstop.localize.intervention import intervene
from nanstop.localize.localize import localize
from nanstop.localize.memory.unwritten import of_unwritten
from nanstop.numerics.room import let_go
from nanstop.numerics.weights import odd_weights
from nanstop.prove.bad_samples import bad_places
from nanstop.prove.course import Course
from nanstop.prove.failing_step import FailingStep, WayBack, update_at_fault
from nanstop.prove.failing_within import failing_within
from nanstop.prove.forms.made_again import with_maker
from nanstop.prove.window_apart import window_apart
from nanstop.records import (
    AuditEntry,
    BatchFact,
    BatchRows,
    Change,
    CommandFacts,
    Diagnosis,
    Environment,
    Evidence,
    Experiment,
    FailureKey,
    Finiteness,
    Incident,
    Localization,
    Phase,
    Proof,
    Replay,
    Report,
    RunFacts,
    Signal,
    SourceLine,
    StateRow,
    StepId,
    TensorStats,
    WindowApart,
)
from nanstop.replay.batches import batch_facts
from nanstop.replay.rerun import communicates, rerun
from nanstop.replay.step import Step
from nanstop.session.history import History
from nanstop.session.machine import command, environment
from nanstop.session.run_state import RunState
from nanstop.session.shown_text import text_around
from nanstop.session.telling.live import Live
from nanstop.tracing.record_step import given_in_objects
from nanstop.tracing.source.warned import lines_without_value

T = TypeVar("T")

_MAX_FACTS = 9
"""Micro-batches whose facts are noted: the failing one, and others that it is compared with."""
_MAX_WEIGHTS = 8
_UNKNOWN = Environment(nanstop="unknown", python="unknown")


@dataclass(slots=True, kw_only=True)
class Investigation:
    """What is known of a failure so far.
    ``failures``: stages that did not complete, with the reason.
    """

    facts: RunFacts
    at: StepId
    phase: Phase
    signals: tuple[Signal, ...]
    command: CommandFacts | None = None
    raised: bool = False
    bad_params: tuple[str, ...] = ()
    bad_state: tuple[str, ...] = ()
    born_on: tuple[int, ...] | None = None
    rewritten_at: tuple[SourceLine, ...] | None = None
    remade_finite: int | None = None
    is_broken_within: bool = False
    written_by: tuple[SourceLine, ...] = ()
    put_right: tuple[str, ...] = ()
    batch: tuple[BatchFact, ...] = ()
    rows: BatchRows | None = None
    text: tuple[str, ...] = ()
    odd_weights: tuple[TensorStats, ...] = ()
    lost_moments: tuple[StateRow, ...] = ()
    apart: WindowApart | None = None
    incident: Incident | None = None
    replay: Replay | None = None
    localization: Localization | None = None
    diagnoses: tuple[Diagnosis, ...] = ()
    experiments: tuple[Experiment, ...] = ()
    open_questions: tuple[tuple[str, Change], ...] = ()
    proof: Proof | None = None
    failures: list[str] = field(default_factory=list)
    live: Live

    @property
    def key(self) -> FailureKey:
        """The key of the failure, as far as it was localized."""
        if self.localization is not None:
            return self.localization.key
        return FailureKey(kind="exception" if self.raised else "nan", phase=self.phase)

    def stage(self, name: str, work: Callable[[], T]) -> T | None:
        """Return what a stage gives, or None with its error noted:
        nanstop is never the reason a run dies.
        """
        self.live.stage(name, self.at.step)
        try:
            return work()
        except NanstopError as error:
            let_go(error)
            self.failures.append(f"{name}: {error.message}")
        except Exception as error:
            let_go(error)
            self.failures.append(f"{name}: {brief(error)}")
        return None

    def broken_by(
        self, step: Step | None, rewind: WayBack | None, names: tuple[str, ...]
    ) -> FailingStep | None:
        """Return the failing step of the update that broke weights, or this one where it breaks
        them before its update; None where neither is known.
        """
        broken = self.stage("rewind", lambda: update_at_fault(step, rewind, names))
        if isinstance(broken, FailingStep):
            return broken
        if broken is None or broken != self.at.step - 1:
            return None
        is_own = self.rewritten_at is None
        within = self.stage("rewind", lambda: failing_within(step, rewind)) if is_own else None
        if within is None:
            self.remade_finite = broken
        else:
            self.is_broken_within, self.bad_params = True, ()
        return within

    def runs_alone(self, step: Step) -> bool:
        """Return whether one rank can run a step again without the others; if not, why is noted."""
        if not step.is_local:
            return False
        if met := self.stage("alone", lambda: communicates(step)):
            self.failures.append(f"replay: `{met}` needs the other processes")
        return met == ""

    def look(self, failing: FailingStep) -> None:
        """Replay the failing step without instruments, then localize it.
        Call inside ``failing.in_place()``.
        """
        self.at = replace(failing.step.id, micro=failing.micro)
        self.put_right = failing.put_right
        self.batch = self.stage("batch", lambda: _facts_around(failing)) or ()
        self.odd_weights = self.stage("weights", lambda: _large_weights(failing)) or ()
        self.replay = self.stage(
            "replay",
            lambda: rerun(
                failing.step,
                failing.micro,
                incident="",
                first_loss=failing.step.losses[failing.micro],
                raised=self.raised,
                update=failing.update,
                in_float32=failing.in_float32,
            ),
        )
        is_clean = self.replay is not None and self.replay.fidelity == "not_reproduced"
        step, micro, phase = failing.step, failing.micro, failing.phase
        if not is_clean:
            self.localization = self.stage(
                "localization", lambda: localize(step, micro, update=failing.update, phase=phase)
            )
        if not failing.update:
            unwritten = partial(of_unwritten, step, micro, self.localization, phase)
            self.localization = self.stage("memory", unwritten) or self.localization
        if is_clean:
            return
        if failing.broken and (self.localization is None or not self.localization.reaches):
            self.localization = _too_long(failing)
        if self.localization is not None and self.localization.positions is None:
            samples = self.stage("samples", lambda: bad_places(failing))
            self.localization = replace(self.localization, positions=samples)
        if self.localization is not None:
            again = self.stage("variable", partial(with_maker, self.localization))
            self.localization = again or self.localization
        if not failing.update:
            self._measure_updates(failing)
            self.apart = self.stage("updates", partial(window_apart, failing))

    def _measure_updates(self, failing: FailingStep) -> None:
        """Note how far the updates before the failure have moved weights where that follows from no
        setting of the optimizer.
        """
        optimizer, way_back = self.facts.optimizer, failing.way_back
        if optimizer is None or optimizer.step is not None or way_back is None:
            return
        if way_back.steps and optimizer.rate is not None:
            course, rate = Course(way_back, failing), optimizer.rate
            step = self.stage("updates", lambda: course.taken_step(rate))
            self.facts = replace(self.facts, optimizer=replace(optimizer, step=step))

    def trace_rows(self, failing: FailingStep, run: RunState) -> None:
        """Note which rows of its data the failing micro-batch was made of, and the text around the
        places of the failure where the policy is to show it. Call after ``look``.
        """
        batch = failing.step.batches[failing.micro]
        self.rows = self.stage("rows", lambda: _rows_of(failing.step, failing.micro, run))
        if self.apart is not None:
            found = self.stage("rows", partial(_with_rows, self.apart, failing, run))
            self.apart = found or self.apart
        places = self.localization.positions if self.localization is not None else None
        if run.policy.show_text and places:
            shown = self.stage("text", lambda: text_around(batch, places, run.decode))
            self.text = shown or ()

    @property
    def is_steady(self) -> bool:
        """Whether every replay without a remedy fails, with NaN in memory that nobody writes where
        that is what it comes of.
        """
        fails = self.replay is not None and self.replay.fidelity in ("bitwise", "same_failure")
        return fails or self.reads_unwritten

    @property
    def reads_unwritten(self) -> bool:
        event = self.localization.first_bad if self.localization is not None else None
        return event is not None and event.unwritten is not None

    @property
    def may_pass(self) -> bool:
        """Whether the step as it is was seen to pass, so that it may do so when it is run again."""
        return self.replay is not None and not self.is_steady

    def explain(self, series: History) -> None:
        """Make the incident's record, yet without an id, and diagnose it. Synchronises the
        device as ``series`` is read.
        """
        self._record(series)
        if self.replay is not None:
            self.replay = replace(self.replay, key=self.localization and self.localization.key)
        self.diagnose()

    def state(self, cause: Diagnosis, series: History) -> None:
        """Make the incident's record, yet without an id, of what is diagnosed already. As
        ``explain``.
        """
        self._record(series)
        self.diagnoses = (cause,)

    def _record(self, series: History) -> None:
        self.incident = Incident(
            id="",
            at=self.at,
            phase=self.phase,
            signals=self.signals,
            facts=self.facts,
            environment=self.stage("environment", self._environment) or _UNKNOWN,
            batch=self.batch,
            rows=self.rows,
            without_value=self.stage("warnings", lines_without_value) or (),
            text=self.text,
            bad_params=self.bad_params,
            bad_state=self.bad_state,
            born_on=self.born_on,
            rewritten_at=self.rewritten_at,
            remade_finite=self.remade_finite,
            written_by=self.written_by,
            put_right=self.put_right,
            odd_weights=self.odd_weights,
            lost_moments=self.lost_moments,
            apart=self.apart,
            # On a device whose context is gone, not even a number can be read any more.
            history=self.stage("history", series.records) or (),
            time=time.time(),
        )

    def confirm(self, failing: FailingStep) -> None:
        """Make the experiments that the diagnoses name, and diagnose anew with what came of them.

        Call inside ``failing.in_place()``.
        """
        event = self.localization.first_bad if self.localization is not None else None
        if event is None or not self.is_steady or not self.open_questions:
            return
        for code, change in self.open_questions:
            run = partial(
                intervene, failing.step, failing.micro, event, change, update=failing.update
            )
            outcome: Finiteness = self.stage("experiment", run) or "unknown"
            made = Experiment(code=code, change=change, outcome=outcome)
            self.experiments = (*self.experiments, made)
        self.diagnose()

    def _environment(self) -> Environment:
        return replace(environment(), command=self.command or command())

    def evidence(self) -> Evidence:
        """Return all that is known so far."""
        return Evidence(
            facts=self.facts,
            incident=self.incident,
            replay=self.replay,
            localization=self.localization,
            series=self.incident.history if self.incident is not None else (),
            experiments=self.experiments,
            trials=self.proof.tried if self.proof is not None else (),
        )

    def diagnose(self) -> None:
        """Explain the failure by what is known so far."""
        examined = examine(self.evidence(), "incident")
        self.diagnoses = examined.diagnoses
        self.open_questions = examined.open
        self.failures += examined.failures

    def report(self, audit: AuditEntry) -> Report:
        """Return the report. Call after ``explain``."""
        assert self.incident is not None
        return Report(
            incident=self.incident,
            replay=self.replay,
            localization=self.localization,
            experiments=self.experiments,
            diagnoses=self.diagnoses,
            proof=self.proof,
            audit=(audit,),
            failures=tuple(self.failures),
        )


def _rows_of(step: Step, micro: int, run: RunState) -> BatchRows | None:
    """Return which rows of a script's data a micro-batch was made of, None where unknown."""
    taken = getattr(step, "rows_taken", lambda _: None)
    return run.rows_of(step.batches[micro]) or taken(micro)


def _with_rows(apart: WindowApart, failing: FailingStep, run: RunState) -> WindowApart:
    """Return a window with the rows that its batch was made of, as far as they are known."""
    steps = failing.way_back.steps if failing.way_back is not None else ()
    step = next((one for one in steps if one.id.step == apart.step), None)
    if step is None or apart.fact is None:
        return apart
    return replace(apart, rows=_rows_of(step, apart.fact.micro, run))


def _facts_around(failing: FailingStep) -> tuple[BatchFact, ...]:
    """Return what the failing micro-batch holds, then what the ones nearest to it in its window
    do.
    """
    batches = failing.step.batches
    nearest = sorted(range(len(batches)), key=lambda micro: abs(micro - failing.micro))
    near = nearest[:_MAX_FACTS]
    whole = {m: {**batches[m], **_only_given(failing.step, m)} for m in near}
    return tuple(fact for m, batch in whole.items() for fact in batch_facts(batch, m))


def _only_given(step: Step, micro: int) -> dict[str, Tensor]:
    """Return what objects hold that a model is given, but for what the step itself has put there:
    its errors, which a replay buffer weighs samples by, say.
    """
    made = getattr(step, "put_in_objects", lambda _: ())(micro)
    held = given_in_objects(step, micro)
    return {name: one for name, one in held.items() if name not in made}


def _large_weights(failing: FailingStep) -> tuple[TensorStats, ...]:
    found = odd_weights(failing.step.view.root.named_parameters())
    return tuple(stats for stats in found if stats.finite)[:_MAX_WEIGHTS]


def _too_long(failing: FailingStep) -> Localization:
    """Return where an update fails of which every number is finite:
    in the length of what it does to parameters.
    """
    return Localization(
        key=FailureKey(kind="length", phase="optimizer"),
        first_bad=None,
        origin="unknown",
        reaches=tuple(signal.name for signal in failing.broken),
        positions=(),
    )
