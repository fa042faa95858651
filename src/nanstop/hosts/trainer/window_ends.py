"""The end of a window of a trainer: from the flag that is read there to the update that is applied, redone or left out."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from nanstop.detect.numeric_errors import is_numeric
from nanstop.detect.sentinel import Reading, total_norm
from nanstop.hosts import compat
from nanstop.hosts.trainer.signals import Verdict
from nanstop.hosts.trainer.step import HfStep, Window, clear_gradients
from nanstop.hosts.trainer.watched import WatchedTrainer
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


_MAX_ROUNDS = 3
_log = logging.getLogger("nanstop")


class WindowEnds:
    """Ends the windows of one watched trainer. ``applied``: whether the update of the last one was."""

    def __init__(self, watch: WatchedTrainer) -> None:
        self._watch = watch
        self.applied = True
        self._expected: HfStep | None = None

    def close(self, window: Window, parameters: list[Tensor], norm_type: float) -> Tensor:
        """Settle a window and return the norm of its gradients: the host may clip and apply them, or skips the step."""
        norm, reading = self._settle(window, parameters, norm_type)
        self._note(window, reading)
        overflow = reading is not None and reading.found_inf
        self.applied = not window.skip and not overflow  # the scaler leaves that update out itself
        if window.skip:
            self._watch.carrier.skip(window)
        elif window.replayable:
            window.trim()
            step = self.step(window)
            self._watch.keeper.before_update(self._watch.host.trainable, step)
            self._expected = step if not window.redone and not overflow else None
        return norm

    def last_look(self, window: Window) -> None:
        """Look at an update whose gradients are final: one that ruins weights is made anew or left out."""
        step, self._expected = self._expected, None
        if step is None:
            return
        decision = None
        try:
            decision = self._watch.session.foresee(step, self._watch.keeper.rewind)
            if decision is None or decision.kind == "proceed":
                return
            if decision.kind == "rollback":
                rewind = self._watch.keeper.rewind()
                if rewind is not None:
                    rewind.restore()
                self._watch.session.adopt(decision.adopt)
                self._watch.carrier.update_anew(rewind.steps if rewind is not None else (step,))
                clear_gradients(self._watch.host.parameters())
                return
        except Exception as error:
            # A remedy that fails must not end the run that it was to save.
            _log.warning("the update could not be made anew (%s: %s)", type(error).__name__, error)
            if decision is None:
                return
        window.skip, self.applied = True, False
        self._watch.carrier.skip(window)
        if decision.kind == "stop":
            self._watch.stop(decision)

    def carry(self, window: Window, verdict: Verdict) -> bool:
        """Report, carry out the decision, and return whether there was one; a skip is left to the window's end."""
        step = self.step(window)
        rewind = self._watch.keeper.rewind()
        again = step if window.replayable else None
        decision = self._watch.report(again, verdict, can_skip=again is None)
        if decision is None or decision.kind == "proceed":
            return False
        window.redone = again is not None and decision.kind in ("redo", "rollback")
        try:
            if window.redone and decision.kind == "redo":
                self._watch.carrier.redo(step, decision.atoms)
                return True
            if window.redone and rewind is not None:
                self._watch.carrier.rollback(
                    step, rewind, lambda: self._watch.session.adopt(decision.adopt)
                )
                return True
        except Exception as error:
            # A remedy that fails must not end the run that it was to save.
            _log.warning("the window could not be redone (%s: %s)", type(error).__name__, error)
        if decision.kind == "stop" and verdict.error is not None:
            return False  # the script ends as it would have: by its own exception
        window.skip = True
        return True

    def _settle(
        self, window: Window, parameters: list[Tensor], norm_type: float
    ) -> tuple[Tensor, Reading | None]:
        """Return norm and reading of the gradients that the host may apply; ``window.skip`` says that it may not."""
        norm, reading = torch.zeros((), device=self._watch.trainer.args.device), None
        for _ in range(_MAX_ROUNDS):
            if window.skip:
                return norm, reading
            verdict = None
            try:
                compat.unscale(self._watch.trainer)
                norm = total_norm(parameters, norm_type)
            except Exception as error:
                if not is_numeric(error):
                    raise
                verdict = self._watch.judge.of_exception(error, "optimizer")
            else:
                reading = self._watch.judge.read(window, norm)
                verdict = self._watch.judge.of_reading(reading)
            if verdict is None:
                self._watch.session.before_update(self.step(window))
                if window.replayable and self._watch.session.gauge_due(window.index):
                    self._watch.session.gauge(self.step(window))
                return norm, reading
            if not self.carry(window, verdict):
                if verdict.error is not None:
                    raise verdict.error
                return norm, reading
        window.skip = True
        return norm, reading

    def _note(self, window: Window, reading: Reading | None) -> None:
        """Add what the host goes on with to the histories: losses of a window that was redone are the good ones."""
        if reading is None:
            return
        series = self._watch.session.series
        for loss in reading.losses:
            series.add("loss_raw", window.index, loss)
        series.add("grad_norm", window.index, reading.norm)
        series.add("lr", window.index, window.lrs[0] if window.lrs else 0.0)
        scale = compat.present_scale(self._watch.trainer)
        if scale is not None:
            series.add("scale", window.index, scale)

    def step(self, window: Window) -> HfStep:
        return HfStep(
            self._watch.step_id(step=window.index),
            self._watch.view,
            self._watch.facts,
            window,
            self._watch.host,
        )
