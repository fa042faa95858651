"""What every kind of raw loop shares: read a window's flag, ask the session, carry its decision out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.decide.decision import STOPPED
from nanstop.detect.numeric_errors import phase_of
from nanstop.detect.sentinel import Reading, read_window, tally_gradients
from nanstop.errors import TrainingStopped
from nanstop.hosts.compat import free_host_bytes
from nanstop.hosts.loop.facts import facts_of_loop
from nanstop.hosts.loop.step import LoopStep, learning_rates
from nanstop.hosts.model.left_weights import LEFT
from nanstop.hosts.model.view import PlainView
from nanstop.numerics.tensors import nonfinite
from nanstop.numerics.weights import odd_weights
from nanstop.ranks import rank
from nanstop.records import RunFacts, Signal, StepId, TensorStats
from nanstop.replay.rewind import Rewind, SnapshotKeeper
from nanstop.replay.untouched import versions_kept
from nanstop.session.watched_run import OpenSession, WatchedRun

_MAX_NAMED = 8
_log = logging.getLogger("nanstop")


@dataclass(frozen=True, slots=True)
class Verdict:
    """``apply``: whether the update may be applied. ``redone``: whether the gradients were made anew.

    ``failed``: whether the window was found bad, whatever was done about it.
    """

    apply: bool = True
    redone: bool = False
    failed: bool = False


class Guard:
    """One session of raw loops: opens it late, numbers the updates, turns readings into signals."""

    def __init__(self, open_session: OpenSession) -> None:
        self.session = cast("WatchedRun", None)  # until a training has begun
        self.facts = RunFacts(host="loop")
        self.num_updates = 0
        self._open_session = open_session
        self._finished = False
        self._stopped = False
        self.usual_rates: deque[tuple[Any, ...]] = deque(maxlen=512)
        self._until_update = ExitStack()
        self._keeper = SnapshotKeeper(free_host_bytes)
        self._view: PlainView | None = None
        self._bad_params: tuple[str, ...] = ()
        self._expected: LoopStep | None = None
        """A healthy window whose update is to be looked at when its gradients are final."""

    def open(self, view: PlainView, **known: Any) -> None:
        """Open the session once; ``known`` are further fields of ``RunFacts``."""
        if self.session is None:
            self.facts = facts_of_loop(view, **({"world_size": world_size()} | known))
            self.session = self._open_session(view, self.facts)
            self.session.present = self.step_id
            self.session.start()

    def step_id(self, micro: int | None = None) -> StepId:
        return StepId(run="loop", step=self.num_updates, micro=micro, rank=rank())

    def note_rates(self, optimizer: Optimizer | None) -> tuple[Any, ...]:
        """Return the present learning rates and remember them as the run's own."""
        rates = learning_rates(optimizer)
        if not self.usual_rates or self.usual_rates[-1] != rates:
            self.usual_rates.append(rates)
        return rates

    def judge(
        self,
        step: LoopStep,
        norm: Tensor | None,
        found_inf: Sequence[Tensor] = (),
        *,
        can_redo: bool = True,
    ) -> Verdict:
        """Read the window's flag and carry out what the session resolves. One device synchronisation.

        Without ``can_redo`` the update is left out where it would be redone: its gradients are already in use.
        Errors: ``TrainingStopped`` where that is resolved; the update may not be applied then.
        """
        losses = [m.loss for m in step.micros if m.loss is not None]
        if norm is None:
            norm = torch.zeros((), device=next((t.device for t in (*found_inf, *losses)), None))
        reading = read_window(losses, norm, found_inf)
        self._note(reading, step.view.scaler)
        signals = () if reading.quiet else self._signals(step, reading)
        if not signals:
            self._healthy(step, whole=can_redo)
            return Verdict()
        rewind = self._rewind()
        self._bad_params = _bad_weights(step.view)
        decision = self._ask(
            step,
            signals,
            rewind=rewind,
            bad_params=self._bad_params,
            bad_state=nonfinite(step.trainable().state_tensors()),
        )
        if decision is None or decision.kind == "proceed":
            return Verdict(failed=True)
        self._stop_if_told(decision)
        if decision.kind == "skip" or not can_redo:
            _mend_buffers(step)
            return Verdict(apply=False, failed=True)
        return self._make_anew(step, decision, rewind)

    def _healthy(self, step: LoopStep, *, whole: bool) -> None:
        """Use a window that did not fail: for the way back from weights that an update breaks, and for the gauge."""
        self._view = step.view
        self._expected = None
        self.session.before_update(step)
        if not whole:
            self._keeper.forget()
            return
        self._keeper.before_update(step.trainable, step)
        self._expected = step
        if self.session.gauge_due(self.num_updates) and not step.obstacle():
            self.session.gauge(step)

    def _rewind(self) -> Rewind | None:
        """Return the way back, if every window since the snapshot can be run again, with what the snapshot holds."""
        rewind = self._keeper.rewind()
        if rewind is None or any(s.obstacle() for s in rewind.steps):
            return None
        # The state of an optimizer that takes turns with the snapshot's is not in it: its updates cannot be undone.
        held = rewind.snapshot.trainable.optimizer
        return rewind if all(s.view.optimizer is held for s in rewind.steps) else None

    def _make_anew(self, step: LoopStep, decision: Any, rewind: Rewind | None) -> Verdict:
        """Redo the window; before it, where that was resolved, every update since the snapshot."""
        if decision.kind == "rollback" and rewind is not None:
            with versions_kept(rewind.snapshot.trainable.tensors()):
                rewind.restore()
                self._update_anew(decision, rewind.steps)
            step.set_rates()
        problem = step.obstacle() or step.redo(decision.atoms, self._until_update)
        if problem:
            _log.warning(
                "nanstop: the window could not be redone, its update is left out: %s", problem
            )
            return Verdict(apply=False, failed=True)
        return Verdict(apply=self._is_clean(step), redone=True, failed=True)

    def last_look(self, optimizer: Optimizer) -> bool | None:
        """Look at the next update of an optimizer, its gradients being final: None, or whether it has been applied by now.

        Where it has been, or is to be left out, the caller must not apply it.
        """
        step = self._expected
        if step is None or step.view.optimizer is not optimizer:
            return None
        self._expected, decision = None, None
        try:
            decision = self.session.foresee(step, self._rewind)
            if decision is None or decision.kind == "proceed":
                return None
            if decision.kind == "rollback":
                self._settle_anew(step, decision)
                return True
        except Exception as error:  # nanstop is never the reason a run dies
            name = type(error).__name__
            _log.warning("nanstop: an update was not settled (%s: %s)", name, error)
            return None if decision is None else False
        self._stop_if_told(decision)
        return False

    def _settle_anew(self, step: LoopStep, decision: Any) -> None:
        """Apply the update of ``step`` as resolved, and before it every update since the snapshot, where there is one."""
        rewind = self._rewind()
        trainable = step.trainable() if rewind is None else rewind.snapshot.trainable
        with versions_kept(trainable.tensors()):
            if rewind is not None:
                rewind.restore()
            self._update_anew(decision, rewind.steps if rewind is not None else (step,))

    def _update_anew(self, decision: Any, steps: Sequence[Any]) -> None:
        """Apply the updates of some windows again, the cure being on for the rest of the run."""
        # All that an investigation needs comes with it, which a healthy run has no use for.
        from nanstop.prove.failing_step import apply_update

        self.session.adopt(decision.adopt)
        for step in steps:
            apply_update(step)

    def raised(self, step: LoopStep, error: Exception) -> None:
        """Report an exception that says that a number was bad; the caller raises it again unchanged."""
        at = self.step_id(len(step.micros) - 1)
        name = type(error).__name__
        signal = Signal(source="exception", name=name, message=str(error)[:500], at=at)
        self._ask(step, (signal,), phase=phase_of(error), error=error)

    def given_up(self, step: LoopStep) -> None:
        """Report a micro-batch, the last of ``step``, that the script left out because its loss is not finite.

        Errors: ``TrainingStopped`` where that is resolved.
        """
        at, loss = self.step_id(len(step.micros) - 1), step.micros[-1].loss
        value = float(loss) if loss is not None else None
        signal = Signal(
            source="loss", name="loss", value=value, message="left out by the script", at=at
        )
        decision = self._ask(step, (signal,), bad_params=_bad_weights(step.view))
        if decision is not None:
            self._stop_if_told(decision)

    def _stop_if_told(self, decision: Any) -> None:
        if decision.kind == "stop":
            self._stopped = True
            reason = f"training stopped: {decision.reason}"
            raise TrainingStopped(reason, incident=decision.incident)

    def completed(self, *, applied: bool = True) -> None:
        """Note that the window is over."""
        self._until_update.close()
        self._stopped = False  # the script goes on all the same
        if self.session is not None:
            (self.session.completed if applied else self.session.left_out)(self.num_updates)
        self.num_updates += 1

    def finish(self, exit_code: int = 0) -> None:
        """Finish the session, once."""
        if self.session is None or self._finished:
            return
        self._finished = True
        bad = _bad_weights(self._view) if self._view is not None else ()
        if self._view is not None:
            LEFT.note(_odd_weights(self._view), loaded=self.facts.odd_weights)
        if bad and not self._bad_params:  # the last update broke them
            at = self.step_id()
            signals = tuple(Signal(source="param", name=name, at=at) for name in bad[:_MAX_NAMED])
            self._ask(None, signals, phase="optimizer", bad_params=bad, rewind=self._rewind())
        self.session.finish(STOPPED if self._stopped else exit_code)

    def _ask(self, step: LoopStep | None, signals: Sequence[Signal], **about: Any) -> Any:
        """Return the session's decision; None if it could not give one or nothing may be changed here."""
        try:
            return self.session.failed(step, signals, **about)
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning(
                "nanstop: the failure was not investigated (%s: %s)", type(error).__name__, error
            )
            return None

    def _note(self, reading: Reading, scaler: Any) -> None:
        if scaler is not None:
            self.session.series.add("scale", self.num_updates, scaler.get_scale())
        for loss in reading.losses:
            self.session.series.add("loss_raw", self.num_updates, loss)
        self.session.series.add("grad_norm", self.num_updates, reading.norm)

    def _signals(self, step: LoopStep, reading: Reading) -> tuple[Signal, ...]:
        """Return what is wrong; nothing for an infinite norm of finite gradients and for a scaler's ordinary skip."""
        having = [i for i, m in enumerate(step.micros) if m.loss is not None]
        found = tuple(
            Signal(source="loss", name="loss", value=reading.losses[i], at=self.step_id(having[i]))
            for i in reading.bad_losses
        )
        bad = _bad_gradients(step)
        if not found and (not bad or _is_scalers_own(step)):
            return ()
        if bad:
            more = f"{len(bad)} gradients are not finite" if len(bad) > 1 else ""
            at = self.step_id()
            tally = tally_gradients(p.grad for p in step.parameters())
            found += (
                Signal(
                    source="grad",
                    name=bad[0],
                    value=reading.norm,
                    message=more,
                    at=at,
                    gradients=tally,
                ),
            )
        return found

    def _is_clean(self, step: LoopStep) -> bool:
        losses = {str(i): m.loss for i, m in enumerate(step.micros)}
        if nonfinite(losses):
            return False
        return not _bad_gradients(step) or _is_scalers_own(step)


def world_size() -> int:
    """Return the number of processes that train together."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def _odd_weights(view: PlainView) -> tuple[TensorStats, ...]:
    try:
        return odd_weights((n, p) for n, p in view.root.named_parameters() if p.requires_grad)
    except Exception:  # after some errors a device answers nothing any more
        return ()


def _bad_weights(view: PlainView) -> tuple[str, ...]:
    return nonfinite({n: p for n, p in view.root.named_parameters() if p.requires_grad})


def _mend_buffers(step: LoopStep) -> None:
    """Put buffers back where a bad forward has left NaN in them: running statistics would keep it for good."""
    if nonfinite(dict(step.view.root.named_buffers())):
        with step.buffers.rewritten(step.start):
            step.buffers.restore(step.start)


def _bad_gradients(step: LoopStep) -> tuple[str, ...]:
    names = {id(p): name for name, p in step.view.root.named_parameters()}
    parameters = enumerate(step.parameters())
    return nonfinite({names.get(id(p), f"parameter {i}"): p.grad for i, p in parameters})


def _is_scalers_own(step: LoopStep) -> bool:
    """Return whether gradients overflow only because of the loss scale, which the scaler then lowers by itself.

    The window is run again at scale 1, undone. Where it cannot be, a scale above 1 is taken as the cause.
    """
    scaler = step.view.scaler
    if scaler is None or not scaler.is_enabled():
        return False
    if step.obstacle() or world_size() > 1:
        return scaler.get_scale() > 1
    try:
        with step.isolated(), _unit_scale(scaler):
            for place in range(len(step.micros)):
                step.run(place)
            return not _bad_gradients(step)
    except Exception:  # the script's own code, run once more: whatever it raises is no answer
        return scaler.get_scale() > 1


@contextmanager
def _unit_scale(scaler: Any) -> Iterator[None]:
    scale = scaler._scale
    scaler._scale = torch.ones_like(scale)
    try:
        yield
    finally:
        scaler._scale = scale
