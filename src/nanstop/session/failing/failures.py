"""The only file that knows the order: capture, replay, localize, diagnose, prove, decide.

Nothing here has an effect: what is to be told, written and put in force is the session's, which
imports this with the first failure of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nanstop.decide.agreement import Ranks
from nanstop.decide.repeats import Repeats, goes_on_alone, is_one_more, names_samples
from nanstop.errors import NanstopError
from nanstop.localize.met_before import BadTensors, is_at_same_line
from nanstop.numerics.room import let_go
from nanstop.prove.failing_step import (
    FailingStep,
    FailurePoint,
    WayBack,
    failing_step,
    pending_update,
)
from nanstop.prove.reference.ladder import bounded
from nanstop.records import Action, Report, Signal, StateRow
from nanstop.remedies.apply import applied
from nanstop.replay.rerun import note_compiled
from nanstop.replay.step import room_made
from nanstop.session.failing.investigation import Investigation
from nanstop.session.failing.outcomes import NOTHING_HELPS, Outcomes
from nanstop.session.failing.proving import Proving
from nanstop.session.run_state import RunState, present_facts
from nanstop.session.shared.conclusion import Conclusion
from nanstop.session.shared.meeting import ALONE, Meeting

if TYPE_CHECKING:
    from nanstop.detect.signals import Alarm
    from nanstop.replay.step import Step

_MAX_NAMED = 8


class Failures:
    """The failures of one run. ``known``: their reports."""

    def __init__(self, run: RunState) -> None:
        self.known = Repeats()
        self._bad = BadTensors()
        self._run = run
        self._outcomes = Outcomes(run, self.known)
        self._last_signature: tuple[object, ...] | None = None
        self._last_optimizer, self._harmless_at = 0, -1
        self._others_passed = False

    @property
    def lost(self) -> dict[int, int]:
        """How many updates of each optimizer were left out in the present training."""
        return self._outcomes.lost

    def passed(self, step: int, optimizer: int | None) -> None:
        """Note that an update of an optimizer (None: the only one) was applied: no row of failures
        goes on, but one of losses alone.
        """
        self._outcomes.passed(optimizer)
        if step != self._harmless_at and (
            optimizer is None or self._last_optimizer in (0, optimizer)
        ):
            self._last_signature = None
        self._others_passed = True

    def begun(self) -> None:
        """Note that a training begins: what was lost in an earlier one is no reason to stop it."""
        self._outcomes.begun()
        self._last_signature = None

    def concluded(
        self,
        named: Callable[[Conclusion], Conclusion],
        ranks: Ranks,
        step: Step | None,
        alarm: Alarm,
        *,
        rewind: WayBack | None,
        can_skip: bool,
    ) -> Conclusion | None:
        """Return what a failure comes to, on each of the ``ranks`` that have met over it: one of
        them investigates it, and gives it a name where it is new. None: see ``met``.
        """
        meeting = Meeting.over(ranks, step, self._run.policy, rewind if alarm.bad_params else None)
        mine: list[Conclusion] = []

        def own() -> Conclusion | None:
            end = self.met(step, alarm, rewind=rewind, can_skip=can_skip, meeting=meeting)
            mine[:] = [named(end)] if end is not None else []
            return mine[0] if mine else None

        if not meeting.agreed:
            return own()
        try:
            return meeting.conclusion(own, lambda told: self._follow(told, step))
        except NanstopError:  # the ranks came apart
            if not mine:
                meeting = ALONE
                return own()
            now = FailurePoint.of(step, (), can_skip=True, by_itself=alarm.by_itself)
            return mine[0].instead(self._outcomes.choose(mine[0].key, now, None, None))

    def _follow(self, end: Conclusion, step: Step | None) -> None:
        """Remember what another rank has come to, for ``step`` as this one has it."""
        self._outcomes.follow(end, FailurePoint.of(step, (), can_skip=True).optimizer)
        self._last_signature = None

    def met(
        self,
        step: Step | None,
        alarm: Alarm,
        *,
        rewind: WayBack | None,
        can_skip: bool,
        meeting: Meeting = ALONE,
    ) -> Conclusion | None:
        """Investigate a failure, as ``WatchedRun.failed`` says.

        None: it is explained, and there is nothing left to decide.
        """
        first = alarm.signals[0]
        now = FailurePoint.of(
            step,
            alarm.signals,
            can_skip=can_skip,
            agreed=meeting.agreed,
            harmless=alarm.harmless,
            no_redo=alarm.no_redo,
            is_past=alarm.is_past,
            by_itself=alarm.by_itself,
        )
        known = self.known.explaining(alarm.bad_params, at_step=now.at.step, over=not now.can_skip)
        if known is not None:
            return self._outcomes.again(known, now) if now.can_skip else None
        if alarm.phase in ("evaluate", "generate") and self._stands_still():
            return None
        self._harmless_at = now.at.step if now.harmless else -1
        kind = (alarm.phase, bool(alarm.bad_params), type(alarm.error))
        signature = (*kind, first.source, now.harmless)
        goes_on = now.optimizer == self._last_optimizer or not self._others_passed
        if signature == self._last_signature and goes_on and self.known.reports:
            latest = self.known.reports[-1]
            if goes_on_alone(latest, is_harmless=now.harmless):
                return replace(self._outcomes.again(latest, now), like_the_last=True)
            if is_one_more(latest, self._outcomes.in_a_row(now.optimizer)):
                return self._outcomes.again(latest, now, proof=latest.proof)
        self._last_signature, self._last_optimizer = signature, now.optimizer
        self._others_passed = False
        found = Investigation(
            facts=replace(self._run.facts, devices=meeting.devices),
            at=first.at or now.at,
            phase=alarm.phase,
            signals=alarm.signals,
            raised=alarm.error is not None,
            bad_params=alarm.bad_params,
            bad_state=alarm.bad_state,
            rewritten_at=alarm.rewritten_at,
            born_on=meeting.born_on,
            live=self._run.live,
        )
        captured = partial(self._captured, found, step, rewind, meeting)
        return self._settled(found, now, captured, alarm.interrupt)

    def foreseen(
        self,
        step: Step,
        rewind: WayBack | None,
        expected: Sequence[Signal],
        lost_moments: tuple[StateRow, ...] = (),
    ) -> Conclusion | tuple[str, ...]:
        """Investigate an update that a rehearsal says will ruin weights.

        ``lost_moments``: those of the rehearsal. Where the update cannot be run, what is
        ``expected`` counts as far as it is not finite. Otherwise returns why it could not be
        judged, () where the whole of it ruins nothing.
        """
        found = Investigation(
            facts=self._run.facts, at=step.id, phase="optimizer", signals=(), live=self._run.live
        )
        found.lost_moments = lost_moments
        failing = found.stage("capture", lambda: pending_update(step, rewind))
        unseen = [one for one in expected if not math.isfinite(one.value or 0.0)]
        if failing is None and not (found.failures and unseen):
            return tuple(found.failures)
        found.signals = failing.broken[:_MAX_NAMED] if failing is not None else tuple(unseen)
        now = FailurePoint(step.id, step, can_skip=True)
        return self._settled(found, now, lambda: failing)

    def _settled(
        self,
        found: Investigation,
        now: FailurePoint,
        capture: Callable[[], FailingStep | None],
        interrupt: KeyboardInterrupt | None = None,
    ) -> Conclusion:
        found.command = self._run.environment.command
        try:
            if interrupt is not None:
                raise interrupt
            with room_made(now.step) as takes:
                return self._investigate(found, now, capture(), takes)
        except KeyboardInterrupt as stopped:
            found.failures.append("investigation: interrupted by the user")
            action = Action(kind="continue", reason="the investigation was interrupted")
            return replace(self._outcomes.new(found, action, now), interrupt=stopped)
        except Exception as failure:  # nanstop is never the reason a run dies
            let_go(failure)
            found.failures.append(f"investigation: {type(failure).__name__}: {failure}")
            return self._outcomes.of(found, now, None)
        finally:
            self._run.live.stage("", now.at.step)

    def _stands_still(self) -> bool:
        """Return whether weights are still those that the latest failure was told to come of."""
        led_here = bool(self.known.reports) and self.known.reports[-1].led_here
        return led_here and self._outcomes.in_a_row(self._last_optimizer) > 0

    def _investigate(
        self, found: Investigation, now: FailurePoint, failing: FailingStep | None, takes: int
    ) -> Conclusion:
        step = failing.step if failing is not None else now.step
        found.facts = present_facts(found.facts, step, self._run.view.optimizer)
        if failing is None:
            known = self.known.like(found.key)
            if known is not None and bool(known.incident.bad_params) == bool(found.bad_params):
                return self._outcomes.again(known, now)
            return self._outcomes.of(found, now, None)
        with failing.in_place():
            failing = bounded(failing, takes)
            found.look(failing)
            found.trace_rows(failing, self._run)
            alike, place = self.known.all_like(found.key), (failing.step, failing.micro)
            first = partial(self._bad.first_told, *place, found.localization, alike)
            known = found.stage("repeat", first)
            if known is not None:
                return self._outcomes.again(known, now, failing, proof=NOTHING_HELPS)
            others = (one for one in alike[1:] if is_at_same_line(one, found.localization))
            for known in (*alike[:1], *others):
                if found.stage("repeat", partial(self._passes, failing, known)):
                    found.stage("repeat", partial(self._bad.note, *place, known.incident.at))
                    return self._outcomes.again(known, now, failing)
            found.stage("repeat", partial(self._bad.note, *place, found.at))
            found.explain(self._run.series)
            found.confirm(failing)
            acts = self._outcomes.num_apart(now) == 1 or now.by_itself == "own"
            if acts:  # else nothing would come of it
                Proving(found, failing, self._run.policy).prove()
            if alike and names_samples(alike[0]):
                # The samples are new, the failure is not.
                return self._outcomes.again(alike[0], now, failing, proof=found.proof)
        return self._outcomes.of(found, now, failing)

    def _captured(
        self, found: Investigation, step: Step | None, rewind: WayBack | None, meeting: Meeting
    ) -> FailingStep | None:
        several, rewritten = self._run.facts.world_size > 1, found.rewritten_at is not None
        if several:
            # An update of one rank's own gradients is none that the run has made.
            rewind = None
            if meeting.broken_by is not None or step is None or not found.runs_alone(step):
                return meeting.broken_by if step is not None else None
        if found.bad_params:
            found.written_by = self._run.written_by(found.bad_params)
            names = () if several or rewritten else found.bad_params
            if (broken := found.broken_by(step, rewind, names)) is not None:
                return broken
        if step is None:
            return None
        found.stage("compiled", lambda: note_compiled(step))
        before, raised = rewind.steps if rewind is not None else (), found.raised
        failing = found.stage(
            "capture", lambda: failing_step(step, phase=found.phase, raised=raised, before=before)
        )
        return failing and replace(failing, rewritten=rewritten, way_back=rewind)

    def _passes(self, failing: FailingStep, known: Report) -> bool:
        """Return whether the remedy proven for the earlier failure passes here too (True where
        none was found then).
        """
        if names_samples(known):
            return failing.phase != "forward"
        atoms = known.proof.minimal if known.proof else ()
        new = tuple(atom for atom in atoms if atom not in self._run.in_force)
        if known.led_here:
            return bool(new)  # the weights are as those updates have left them
        return not atoms or not any(
            failing.attempt(micro, under=lambda: applied(failing.step.view, new)).failed
            for micro in failing.micros
        )
