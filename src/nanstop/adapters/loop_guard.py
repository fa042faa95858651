"""What every kind of raw loop shares: read a window's flag, ask the session, carry its resolution out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanstop.adapters.loop_step import LoopStep
from nanstop.adapters.plain_view import PlainView, read_facts
from nanstop.adapters.signatures import phase_of
from nanstop.core.sentinel import Reading, nonfinite, read_window
from nanstop.errors import NanstopError
from nanstop.records import RunFacts, Signal, StepId

OpenSession = Callable[[PlainView, RunFacts], Any]
"""Called once with (view, facts) when the first update is near; returns a session."""

_log = logging.getLogger("nanstop")


@dataclass(frozen=True, slots=True)
class Verdict:
    """``apply``: whether the update may be applied. ``redone``: whether the gradients were made anew."""

    apply: bool = True
    redone: bool = False


class Guard:
    """One session of raw loops: opens it late, numbers the updates, turns readings into signals."""

    def __init__(self, open_session: OpenSession) -> None:
        self.session: Any = None
        self.facts = RunFacts(host="loop")
        self.num_updates = 0
        self._open_session = open_session
        self._finished = False
        self._until_update = ExitStack()

    def open(self, view: PlainView, **known: Any) -> None:
        """Open the session once; ``known`` are further fields of ``RunFacts``."""
        if self.session is None:
            self.facts = read_facts(view, **({"world_size": world_size()} | known))
            self.session = self._open_session(view, self.facts)
            self.session.start()

    def step_id(self, micro: int | None = None) -> StepId:
        rank = int(os.environ.get("RANK", "0"))
        return StepId(run="loop", step=self.num_updates, micro=micro, rank=rank)

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
        """
        losses = [m.loss for m in step.micros if m.loss is not None]
        if norm is None:
            norm = torch.zeros((), device=next((t.device for t in (*found_inf, *losses)), None))
        reading = read_window(losses, norm, found_inf)
        self._note(reading)
        signals = () if reading.quiet else self._signals(step, reading)
        if not signals:
            return Verdict()
        bad = nonfinite({n: p for n, p in step.view.root.named_parameters() if p.requires_grad})
        resolution = self._ask(step, signals, bad_params=bad)
        if resolution is None or resolution.kind == "proceed":
            return Verdict()
        if resolution.kind == "stop":
            raise NanstopError(f"training stopped: {resolution.reason}", code="NS000")
        if resolution.kind != "redo" or not can_redo:
            return Verdict(apply=False)
        problem = step.obstacle() or step.redo(resolution.atoms, self._until_update)
        if problem:
            _log.warning("the window could not be redone, its update is left out: %s", problem)
            return Verdict(apply=False)
        return Verdict(apply=self._is_clean(step), redone=True)

    def raised(self, step: LoopStep, error: Exception) -> None:
        """Report an exception that says that a number was bad; the caller raises it again unchanged."""
        at = self.step_id(len(step.micros) - 1)
        name = type(error).__name__
        signal = Signal(source="exception", name=name, message=str(error)[:500], at=at)
        self._ask(step, (signal,), phase=phase_of(error), error=error)

    def completed(self, *, applied: bool = True) -> None:
        """Note that the window is over."""
        self._until_update.close()
        if applied and self.session is not None:
            self.session.completed(self.num_updates)
        self.num_updates += 1

    def finish(self, exit_code: int = 0) -> None:
        """Finish the session, once."""
        if self.session is not None and not self._finished:
            self._finished = True
            self.session.finish(exit_code)

    def _ask(self, step: LoopStep, signals: Sequence[Signal], **about: Any) -> Any:
        """Return the session's resolution; None if it could not give one or nothing may be changed here."""
        try:
            return self.session.failed(step, signals, **about)
        except NanstopError:
            raise
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("the failure was not investigated (%s: %s)", type(error).__name__, error)
            return None

    def _note(self, reading: Reading) -> None:
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
            found += (Signal(source="grad", name=bad[0], value=reading.norm, message=more, at=at),)
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
