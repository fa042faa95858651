"""The windows of a trainer: how they are read, and what is done with one whose end was resolved."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanstop.decide.policy import RAISED
from nanstop.detect.numeric_errors import is_numeric, phase_of
from nanstop.detect.sentinel import Reading, read_window, total_norm
from nanstop.detect.signals import Alarm, alarm, alarm_of_exception, alarm_of_reading
from nanstop.hosts import compat
from nanstop.hosts.tape.pieces import accumulation_in
from nanstop.hosts.tape.taped_step import TapedStep
from nanstop.hosts.trainer.actions import clear_gradients
from nanstop.hosts.trainer.between import step_between
from nanstop.hosts.trainer.guards.evaluation import ForwardStep
from nanstop.hosts.trainer.steps.micros import TrainerMicro, TrainerWindow
from nanstop.hosts.trainer.steps.reentry import given_of, shown
from nanstop.hosts.trainer.steps.step import HfStep
from nanstop.hosts.trainer.watched import WatchedTrainer
from nanstop.hosts.window.anew import named
from nanstop.hosts.window.ends import WindowEnds
from nanstop.numerics.trained import held_by
from nanstop.records import RunFacts, Signal, StepId
from nanstop.replay.step import Batch, parameters_of
from nanstop.session.watched_run import Writers
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

_log = logging.getLogger("nanstop")
PATIENCE = 4
"""Overflows in a row that a loss scale is allowed before they are an incident:
it falls 16-fold meanwhile.
"""


class TrainerWindows:
    """See ``hosts.window.host.WindowHost``.

    ``applied``: whether the update of the last window was.
    """

    def __init__(self, watch: WatchedTrainer) -> None:
        self._watch = watch
        self._num_overflows = 0
        self.applied = True
        self._knows_sums = False
        self.redo, self.update_anew = watch.carrier.redo, watch.carrier.update_anew
        self.leave_out, self.stop = watch.carrier.skip, watch.stop
        self.ends = WindowEnds(self, lambda: watch.objective.signals(watch.step_id()))

    @property
    def session(self) -> Any:
        return self._watch.session

    @property
    def facts(self) -> RunFacts:
        return self._watch.facts

    def close(self, window: TrainerWindow, parameters: list[Tensor], norm_type: float) -> Tensor:
        """Settle a window and return the norm of its gradients.

        The host may clip and apply them, or skips the step.
        """
        self._watch.note_hook_writes()
        norm: Tensor | None = None

        def read() -> Reading:
            nonlocal norm
            compat.unscale(self._watch.trainer)
            norm = total_norm(parameters, norm_type)
            return self.read(window, norm)

        can_redo = window.replayable
        self.ends.close(self.step(window), read, window.ending, can_redo=can_redo)
        self.applied = window.ending.applied
        if self._watch.host.may_tape and self.applied:
            self._note_accumulation(self.step(window))
        if can_redo:
            window.trim()
        return torch.zeros((), device=self._watch.trainer.args.device) if norm is None else norm

    def raised(self, window: TrainerWindow, error: Exception) -> bool:
        """Return whether a micro-batch that raised was redone, or given up with its window's
        update. What the script raises itself, because of a number, and is not redone, goes on to
        it.
        """
        watch, micro = self._watch, window.micros[-1]
        at = watch.step_id(step=window.index, micro=len(window.micros) - 1)
        scored = self._was_scoring()
        if micro.whole and (scored or not micro.made):
            micro.batch = None
        phase = "generate" if micro.batch is None else phase_of(error)
        is_own = not is_numeric(error)
        if is_own and not self._is_answer(window, error):
            self._set_up_again(at, error)
            return False
        found = replace(alarm_of_exception(watch.view, at, error, phase), is_past=is_own)
        if micro.batch is None:
            self.ends.ask(None if scored else self._preparation(micro, at), found)
            return False
        if is_own and self.facts.world_size > 1:  # the others wait for this one
            self.ends.ask(self.step(window), replace(found, no_redo=RAISED))
            return False
        if not self.ends.carry(self.step(window), found, window.ending):
            return False
        if is_own and not window.ending.redone:
            return False
        if not window.ending.apply:
            micro.loss = watch.host.leave_out(micro)
        return True

    def raised_between(self, error: Exception) -> None:
        """Report what ends a training between its micro-batches because of a number, if a call of
        the model that it has left fails again.
        """
        if self._watch.session is None or self.ends.told == id(error) or not is_numeric(error):
            return
        from nanstop.replay.rerun import attempt  # a healthy run has no use for it

        try:
            step = step_between(self._watch, error)
            if step is None or not attempt(step, 0).failed:
                return
            found = alarm_of_exception(self._watch.view, step.id, error, "generate")
        except Exception as failure:  # nanstop is never the reason a run ends otherwise
            _log.warning("nanstop: the exception was not investigated (%s)", named(failure))
            return
        self.ends.ask(step, found)

    def _was_scoring(self) -> bool:
        """Return whether rewards were asked for where a micro-batch raised."""
        objective, within = self._watch.objective, self._watch.host.within
        scored = objective.is_scoring or within.is_scoring
        objective.is_scoring = within.is_scoring = False
        return scored

    def _preparation(self, micro: TrainerMicro, at: StepId) -> ForwardStep | None:
        """Return what generates for the batch of ``micro``, which raised, as a step; None where its
        beginning is not known.
        """
        watch = self._watch
        if micro.rng is None:
            return None
        raw = shown(copy.copy(micro.raw))

        def again(batch: Batch) -> Any:
            return watch.objective.generated(lambda: watch.host.generate(micro, given_of(batch)))

        return ForwardStep(
            at, watch.view, self.facts, (raw,), (None,), micro.rng, watch.host, again, training=True
        )

    def _is_answer(self, window: TrainerWindow, error: Exception) -> bool:
        from nanstop.localize.own_answer import answers_a_bad_number  # no use to a healthy run

        has_batch = window.micros[-1].batch is not None
        return has_batch and answers_a_bad_number(self.step(window), error)

    def _set_up_again(self, at: StepId, error: Exception) -> None:
        """Have the set-up looked at anew where a micro-batch raised what is no failure of
        numbers.
        """
        try:
            if self.session is not None:
                self.session.raised(at, error)
        except Exception as own:  # nanstop is never the reason a run dies
            _log.warning("the set-up was not read (%s: %s)", type(own).__name__, own)

    def _note_accumulation(self, step: HfStep) -> None:
        """Learn once how the losses of a window are made one, where the script makes them."""
        seen = step.for_looks()
        if self._knows_sums or not isinstance(seen, TapedStep):
            return
        self._knows_sums = True
        found = accumulation_in(seen.taped, held_by(step.view.optimizer))
        if found is not None and found.counts and self.session is not None:
            self.session.learned(at=step.id, accumulation=found)

    def read(self, window: TrainerWindow, norm: Tensor) -> Reading:
        """Return the window's values on the host: the one synchronisation of a healthy window."""
        scaler, found = compat.run_scaler(self._watch.trainer), ()
        if scaler is not None:
            states = scaler._per_optimizer_states.values()
            found = [flag for state in states for flag in state["found_inf_per_device"].values()]
        return read_window([m.loss for m in window.micros if m.loss is not None], norm, found)

    def note_norm(self, window: TrainerWindow) -> None:
        """Note a norm that is infinite although all gradients are finite."""
        watch, reading = self._watch, window.ending.reading
        is_odd = reading is not None and reading.norm == math.inf and not window.ending.failed
        if is_odd and self.session is not None and self.facts.infinite_norm_at is None:
            watch.facts = replace(self.facts, infinite_norm_at=window.index)
            at = watch.step_id(step=window.index)
            self.session.learned(at=at, infinite_norm_at=window.index)

    def last_look(self, window: TrainerWindow) -> None:
        """Look at an update whose gradients are final.

        One that ruins weights is made anew or left out.
        """
        watch, settled = self._watch, self.ends.last_look()
        if settled is None and watch.facts.world_size > 1 and window.ending.applied:
            called = {micro.model for micro in window.micros}
            watch.host.shared.updating(called, watch.view.optimizer, window.micros)
        if settled:
            clear_gradients(parameters_of(self._watch.view).values())
        elif settled is not None:
            window.ending.apply = self.applied = False

    def rewritten(self, window: TrainerWindow, by: Writers) -> None:
        """Leave out the update of a window to whose gradients something has written since they
        were read, where they are not finite any more. Synchronises the device.
        """
        window.rewritten_at = by
        if self.applied:
            norm = total_norm(list(window.micros[-1].model.parameters()), 2.0)
            step, read = self.step(window), partial(self.read, window, norm)
            self.ends.rewritten(step, read, window.ending)
            self.applied = window.ending.applied

    def step(self, window: TrainerWindow) -> HfStep:
        """Return a window as a step."""
        watch = self._watch
        at = watch.step_id(step=window.index)
        return HfStep(at, watch.view, watch.facts, window, watch.host)

    def alarm_of(self, step: HfStep, reading: Reading) -> Alarm | None:
        """Return what is wrong.

        A scaler's overflow with finite losses is everyday work, a row of them is not.
        """
        if reading.quiet:
            self._num_overflows = 0
            return None
        if reading.bad_losses or not reading.found_inf:
            return alarm_of_reading(step, reading, step.has_spoilt_buffers)
        self._num_overflows = (self._num_overflows + 1) % PATIENCE
        if self._num_overflows:
            return None
        scale = float(step.view.scaler.get_scale())
        signal = Signal(source="scaler", value=scale, threshold=PATIENCE, at=step.id)
        return alarm(step.view, step.id, (signal,), "backward")
