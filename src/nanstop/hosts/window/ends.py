"""The end of a window, the same for every host:
from its reading to an update that is applied, made anew or left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim import Optimizer

from nanstop.decide.agreement import ONE_RANK, Ranks
from nanstop.decide.decision import Decision
from nanstop.decide.policy import IN_USE, REWRITTEN
from nanstop.detect.numeric_errors import is_numeric
from nanstop.detect.sentinel import Reading
from nanstop.detect.signals import Alarm, alarm_of_exception, alarm_of_weights, arrived
from nanstop.errors import NanstopError
from nanstop.hosts import compat
from nanstop.hosts.replicas import ONE_COPY
from nanstop.hosts.window.anew import go_back, made_anew, named
from nanstop.hosts.window.ending import Ending, Redone, shown
from nanstop.hosts.window.host import HostStep, WindowHost
from nanstop.numerics import host_memory
from nanstop.numerics.weights import odd_weights
from nanstop.records import Signal, StepId, TensorStats
from nanstop.records.facts import BY_HAND
from nanstop.replay.copies.rewind import Rewind, SnapshotKeeper
from nanstop.replay.step import ModelView, Step, trainable_of
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

_MAX_ROUNDS = 3
"""How often a window is run again: a redo that fails again is a new incident."""
_AGAIN = "failed: the window fails again"
_log = logging.getLogger("nanstop")


class WindowEnds:
    """Ends the windows of one host, in the order in which they come.
    ``beside``: what the host has noticed by itself.
    """

    def __init__(self, host: WindowHost, beside: Callable[[], tuple[Signal, ...]] = tuple) -> None:
        self._host = host
        self._beside = beside
        self._redone: Redone | None = None
        self.told = 0
        """The identity of the exception that the latest report is of, if it is of one."""
        self.begin()

    def begin(self) -> None:
        """Forget what belongs to an earlier training: its snapshot is of another optimizer."""
        self.keeper = SnapshotKeeper(host_memory.free_bytes)
        self._expected: HostStep | None = None
        self._reported: tuple[str, ...] = ()
        """Weights that are bad, as a report has said."""
        self._together: Ranks = ONE_RANK
        """Those that have met over the present window."""

    def close(
        self,
        step: HostStep,
        read: Callable[[], Reading],
        ending: Ending,
        *,
        can_redo: bool = True,
        rest: bool = False,
        late: bool = False,
    ) -> None:
        """Settle a window, or the ``rest`` of one: what is left of its gradients for another
        optimizer.

        ``read`` gives its values, anew after each redo; what it raises may be a numeric failure.
        ``late``: the device has its update by now, and leaves it out where they are bad.

        Without ``can_redo`` the update is left out where it would be made anew. Errors: the
        exception of ``read`` where nothing is done about it; what the host's ``stop`` raises.
        """
        part, self._expected = self._part_of(step) if self._expected else None, None
        try:
            self._settle(
                step, read, ending, can_redo=can_redo, is_new=part is None, rest=rest, late=late
            )
        finally:
            self._together = ONE_RANK
        size, replicas = self._host.facts.world_size, step.replicas
        if not ending.apply:
            if part is not None:
                self.keeper.take_out(part)
            self._host.leave_out(step)
        elif part is not None:
            self._expected = part if ending.applied else None
        elif rest and self.keeper.holds(step.view.optimizer):
            pass  # the window is kept, and is made again with all updates that were made of it
        elif not can_redo or not (replicas.goes_back or (size == 1 and replicas is ONE_COPY)):
            self.keeper.forget()
        else:
            self.keeper.among(size)
            self.keeper.of(step.view.optimizer)
            trainable = partial(trainable_of, step.view)
            self.keeper.before_update(trainable, step, may_take=not late)
            self._expected = step if ending.applied and not ending.redone else None

    def may_read_late(self, step: HostStep) -> bool:
        """Return whether the values of a window may be read once its update was launched."""
        is_alone = self._host.facts.world_size == 1 and step.replicas is ONE_COPY
        waits = self._redone is not None or self._expected is not None
        if not is_alone or waits or self.keeper.is_due():
            return False
        return self._host.session.may_read_late(step)

    def _part_of(self, step: HostStep) -> HostStep | None:
        """Return the window that is to be updated next if a part of its gradients was settled
        already, and ``step`` is the rest.
        """
        other = self._expected
        if other is None or other.id != step.id or other.view.optimizer is not step.view.optimizer:
            return None
        return other

    def _settle(
        self,
        step: HostStep,
        read: Callable[[], Reading],
        ending: Ending,
        *,
        can_redo: bool,
        is_new: bool,
        rest: bool,
        late: bool,
    ) -> None:
        for num_redone in range(_MAX_ROUNDS + 1):
            if not ending.apply:
                return
            alarm = self._look(step, read, ending, is_new=is_new and not rest)
            if alarm is None:
                self._reported = ()
                if not is_new:
                    return
                seen, session = step.for_looks(), self._host.session
                decision = session.before_update(seen)
                if decision is not None:
                    self._host.stop(decision)
                to_come = not late and (can_redo or self._host.facts.veto == BY_HAND)
                if to_come and session.gauge_due(step.id.step) and not step.obstacle():
                    session.gauge(seen)
                session.audit(seen, lambda: step.replicas.ranks)
                return
            if num_redone == _MAX_ROUNDS:
                ending.apply = False
                return
            with step.replicas.whole(self._together):
                carried = self.carry(step, alarm, ending, can_redo=can_redo)
            if not carried:
                if alarm.error is not None:
                    raise alarm.error
                return

    def rewritten(self, step: HostStep, read: Callable[[], Reading], ending: Ending) -> None:
        """Settle once more a window whose gradients were written to since it was closed, which
        gradients made anew would lack: its update is left out where they are bad.
        """
        alarm = self._look(step, read, ending)
        if alarm is not None and self.carry(step, alarm, ending) and not ending.apply:
            self.keeper.take_out(step)
            self._host.leave_out(step)

    def observe(self, step: HostStep, read: Callable[[], Reading]) -> None:
        """Report a window whose end nothing can be done about."""
        alarm = self._look(step, read, Ending())
        if alarm is not None:
            self.ask(step, replace(alarm, rewritten_at=step.rewritten_at()))

    def carry(self, step: HostStep, alarm: Alarm, ending: Ending, *, can_redo: bool = True) -> bool:
        """Report, carry out what is resolved, and return whether anything was; a skip is left to
        ``close``.
        """
        self._tell_redone(_AGAIN)
        ending.failed, rewind = True, self.way_back()
        written = step.rewritten_at()
        no_redo = step.replicas.obstacle() if can_redo else IN_USE
        no_redo = REWRITTEN if written is not None else no_redo
        decision = self.ask(step, replace(alarm, rewritten_at=written, no_redo=no_redo))
        if decision is None or decision.kind == "proceed":
            return False
        at = alarm.signals[0].at
        micro = at.micro if at is not None else None
        before = type(alarm.error).__name__ if alarm.error else shown(step, ending.reading, micro)
        if decision.kind in ("redo", "rollback") and written is not None:
            ending.apply = False
            self._tell(decision, f"skipped: {REWRITTEN}", before)
            return True
        if decision.kind in ("redo", "rollback"):
            given = "" if can_redo else IN_USE
            problem = made_anew(self._host, self._together, step, decision, rewind, given)
            ending.redone = not problem
            ending.apply = ending.redone and self._leaves_some(step)
            if ending.apply:
                self._redone = Redone(decision, micro, before)
            else:
                self._tell(decision, f"failed: {problem}" if problem else "done", before)
            return True
        if decision.kind == "stop" and alarm.error is not None:
            return False  # the script ends as it would have: by its own exception
        ending.apply = False
        if decision.kind == "skip":
            self._tell(decision, step.past or "done", before)
        return True

    def ask(self, step: Step | None, alarm: Alarm, *, goes_back: bool = True) -> Decision | None:
        """Tell the session; return what it resolves, None where nothing can be carried out.

        A stop is made known at once. Without ``goes_back`` no earlier window is run again.
        """
        self._reported, session = alarm.broken, self._host.session
        self.told = id(alarm.error) if alarm.error is not None else 0
        try:
            told = replace(alarm, signals=(*alarm.signals, *self._beside()))
            rewind = self.way_back() if goes_back else None
            decision = session.failed(step, told, rewind=rewind, ranks=self._together)
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: the failure was not investigated (%s)", named(error))
            if self._together.size == 1:
                return None
            self._together.leave(f"rank {self._together.rank} could not do as the others")
            return Decision(kind="skip")  # what all others come to, one of them having left
        if alarm.interrupt is not None:
            raise alarm.interrupt
        if decision.kind == "stop" and alarm.error is None:
            self._tell(decision, "done")
            self._host.stop(decision)
        facts = self._host.facts
        alone = facts.world_size > self._together.size and not told.by_itself
        return None if step is None or alone or facts.veto != "yes" else decision

    def way_back(self) -> Rewind | None:
        """Return the way back, if every window since its snapshot can be run again."""
        rewind = self.keeper.rewind()
        steps: Any = rewind.steps if rewind is not None else ()
        if rewind is None or any(one.obstacle() or one.rewritten_at() is not None for one in steps):
            return None
        # The state of an optimizer that takes turns with the snapshot's is not in it:
        # its updates cannot be undone.
        held = rewind.snapshot.trainable.optimizers
        return rewind if all(step.view.optimizer in held for step in steps) else None

    def last_look(self, optimizer: Optimizer | None = None) -> bool | None:
        """Look at an update whose gradients are final (of this ``optimizer``, where it is one of
        several).

        None: it may be applied. Else the host must not apply it: True where it has been by now,
        made anew with what saves it; False where it is left out.
        """
        step = self._expected
        if step is None or optimizer not in (None, step.view.optimizer):
            return None
        self._expected, decision = None, None
        try:
            decision = self._host.session.foresee(step, self.way_back)
            if decision is None or decision.kind == "proceed":
                return None
            if decision.kind == "rollback" and step.rewritten_at() is not None:
                self._host.session.adopt(decision.adopt)
                self._tell(decision, "done from this update on")
                return None
            if decision.kind == "rollback":
                rewind = self.way_back()
                steps = rewind.steps if rewind is not None else (step,)
                go_back(self._host, self._together, decision, rewind, steps)
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: an update was not settled (%s)", named(error))
            if decision is None:
                return None
            self._tell(decision, f"failed: {named(error)}")
        else:
            self._tell(decision, "done")
            if decision.kind == "rollback":
                return True
        self.keeper.take_out(step)
        self._host.leave_out(step)
        if decision.kind == "stop":
            self._host.stop(decision)
        return False

    def end(self, view: ModelView, at: StepId, *, is_well: bool) -> tuple[TensorStats, ...]:
        """Report weights that an update has broken; which one is looked for where the training has
        ended well.

        Return all that are not finite or far too large.

        What was so when it was loaded, and let the training be finite, is not this run's doing.
        """
        self._tell_redone("done")
        before = {stats.name or "" for stats in self._host.facts.odd_weights if not stats.finite}
        before.update(self._reported)
        try:
            odd = odd_weights(trainable_of(view).parameters.items())
            alarm = alarm_of_weights(view, at, odd, before)
        except Exception:  # after some errors a device answers nothing any more
            return ()
        if alarm is not None:
            self.ask(None, alarm, goes_back=is_well)
        return odd

    def _look(
        self,
        step: HostStep,
        read: Callable[[], Reading],
        ending: Ending,
        *,
        is_new: bool = True,
    ) -> Alarm | None:
        """Return what is wrong with a window now, after its values were noted in place of those
        before a redo.
        """
        reading: Reading | None = None
        try:
            reading = read()
        except Exception as error:
            if not is_numeric(error):
                raise
            alarm: Alarm | None = alarm_of_exception(step.view, step.id, error, "optimizer")
        else:
            if is_new:
                self._note(step, ending, reading)
            alarm = self._host.alarm_of(step, reading)
        if self._host.facts.world_size > 1:
            alarm = self._agreed(step, alarm, mine=reading is None or not reading.quiet)
        if self._redone is not None:
            after = shown(step, reading, self._redone.micro)
            self._tell_redone("done" if alarm is None else _AGAIN, after)
        return alarm

    def _note(self, step: HostStep, ending: Ending, reading: Reading) -> None:
        """Add a window's values to the histories, which keep of a window that is redone what the
        run goes on with.
        """
        series = self._host.session.series
        if ending.reading is not None:
            series.take_back("loss_raw", len(ending.reading.losses))
            series.take_back("grad_norm", 1)
        ending.reading, again = reading, ending.reading is not None
        for loss in reading.losses:
            series.add("loss_raw", step.id.step, loss)
        series.add("grad_norm", step.id.step, reading.norm)
        if again:
            return
        rates, scaler = step.rates, step.view.scaler
        if rates and isinstance(rates[0], float):
            series.add("lr", step.id.step, rates[0])
        scale = compat.present_scale(scaler) if scaler is not None else None
        if scale is not None:
            series.add("scale", step.id.step, scale)

    def _agreed(self, step: HostStep, alarm: Alarm | None, *, mine: bool) -> Alarm | None:
        """Return what is wrong with a window whose gradients, or parts of them, other ranks have:
        what one of them raises is raised by all. ``mine``: whether this one has met a failure.
        """
        replicas, self._together, raised = step.replicas, ONE_RANK, ()
        asked = replicas.failed(mine=mine)
        if asked:
            with suppress(NanstopError):  # else each does what it can by itself
                raised = replicas.ranks.gather("alarm", "raised" if alarm is not None else "")
                self._together = replicas.ranks
        found = alarm or (arrived(step) if any(raised) else None)
        return found and replace(found, by_itself=replicas.by_itself(asked=asked))

    def _leaves_some(self, step: HostStep) -> bool:
        """Return whether a micro-batch is left of a window, on any of its ranks."""
        left = "some" if len(step.remedies.left_out) < len(step.batches) else ""
        with suppress(NanstopError):
            return any(self._together.gather("left", left))
        return False

    def _tell_redone(self, outcome: str, after: str = "") -> None:
        redone, self._redone = self._redone, None
        if redone is not None:
            self._tell(redone.decision, outcome, redone.before, after)

    def _tell(self, decision: Decision, outcome: str, before: str = "", after: str = "") -> None:
        try:
            self._host.session.carried_out(decision, outcome, before=before, after=after)
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: what was done was not recorded (%s)", named(error))
