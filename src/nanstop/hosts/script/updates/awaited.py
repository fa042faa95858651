"""Updates of a script whose window is read once they were launched.

A script clips its gradients, and calls ``step`` then. Between the two it may do anything: read the
norm, skip the update, add to a gradient. So what it has clipped is settled at the latest with the
next thing that it does with a tensor, and the update itself is launched before that only where it
is the next thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.detect.sentinel import norm_here
from nanstop.hosts.loop import gated_update
from nanstop.hosts.loop.controller import LoopController
from nanstop.hosts.loop.gated_update import GatedUpdate, can_be_gated
from nanstop.hosts.loop.moved_weights import micros_moved
from nanstop.hosts.script.state import LoopState
from nanstop.hosts.script.steps import Steps
from nanstop.hosts.window.ending import Ending
from nanstop.numerics.tensors import tensors
from nanstop.numerics.trained import held_by
from nanstop.replay.function_modes import PassingMode


class WindowJudge(Protocol):
    """What is needed of ``hosts.script.judge.Judge``."""

    steps: Steps
    controller: LoopController

    @property
    def judge(self) -> Callable[..., Ending]: ...
    def is_settled(self, optimizer: Optimizer) -> bool: ...
    def looking(self, unless: str) -> AbstractContextManager[None]: ...


class Awaited(PassingMode):
    """The update of a script that has clipped its gradients and not called ``step`` yet.

    On the stack of function modes: whatever the script does with a tensor first (it reads the norm,
    it adds to a gradient) comes after the window was settled. ``measure``: returns the norm of the
    gradients of ``parameters`` anew; ``clip``: clips them by one.
    """

    def __init__(
        self,
        gated: GatedUpdate,
        parameters: Sequence[Tensor],
        norm: Tensor,
        measure: Callable[[], Tensor | None],
        clip: Callable[[Tensor], object],
        settle: Callable[[], None],
    ) -> None:
        super().__init__()
        self.gated, self.parameters, self.norm = gated, parameters, norm
        self._measure, self._clip, self._settle = measure, clip, settle
        self.is_settled = False

    def clip_anew(self, *, redone: bool) -> None:
        """Clip gradients that were not, for the window was bad; the script's norm is theirs."""
        norm = self._measure() if redone else self.norm
        if norm is not None:
            self._clip(norm)
            self.norm.copy_(norm)

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.is_settled and tensors((args, kwargs)):
            self._settle()
        return func(*args, **kwargs)


class AwaitedUpdates:
    """Those of one process. ``present``: the one between its clip and its update."""

    def __init__(self, state: LoopState, judge: WindowJudge) -> None:
        self._state = state
        self._judge = judge
        self.present: Awaited | None = None

    def clipped(
        self,
        parameters: Sequence[Tensor],
        norm: Tensor,
        measure: Callable[[], Tensor | None],
        clip: Callable[[Tensor], object],
    ) -> bool:
        """Clip gradients, those of a bad window by nothing, and await their update; return False,
        and do nothing, where the window is to be read first.
        """
        if norm.device.type not in gated_update.WAITED_FOR:
            return False
        gated = self._gated(parameters, norm, None)
        if gated is None:
            return False
        awaited = Awaited(gated, parameters, norm, measure, clip, self.settle)
        clip(gated.norm)
        self.present = awaited
        if not awaited.start():
            self.settle()
        return True

    def unclipped(
        self, parameters: Sequence[Tensor], norm: Tensor | None, optimizer: Optimizer
    ) -> Awaited | None:
        """Return an update that is about to be made of gradients as they are, None where the window
        is to be read first.
        """
        if norm is None or norm.device.type not in gated_update.WAITED_FOR:
            return None
        gated = self._gated(parameters, norm, optimizer)
        if gated is None:
            return None
        measure = partial(norm_here, parameters)
        return Awaited(gated, parameters, norm, measure, lambda _: None, self.settle)

    def of(self, optimizer: Optimizer, *, is_plain: bool) -> Awaited | None:
        """Return the update that is awaited if it is the one that an optimizer is about to make
        (``is_plain``: given nothing); else its window is settled first.
        """
        awaited = self.present
        if awaited is None:
            return None
        awaited.stop()
        seen = set(map(id, awaited.parameters))
        is_it = awaited.gated.step.view.optimizer is optimizer and not awaited.is_settled
        if not is_it or not is_plain or not seen.issuperset(map(id, held_by(optimizer))):
            self.settle()
            return None
        self.present = None
        return awaited

    def landed(self, awaited: Awaited, optimizer: Optimizer) -> None:
        """Settle the window of an update that was launched, and make it where it was left out and
        is not to be. Errors: ``TrainingStopped``.
        """
        awaited.gated.end()
        self._settle(awaited, optimizer)
        if self._state.window.vetoed or self._judge.is_settled(optimizer):
            return
        if awaited.gated.is_bad:
            with self._state.pause():
                optimizer.step()

    def settle(self) -> None:
        """Settle the window of an update that is awaited: something else comes first.
        Errors: ``TrainingStopped``.
        """
        awaited = self.present
        if awaited is None:
            return
        if awaited.stop() or not awaited.is_on:  # else it is asked inside a call that it handles
            self.present = None
        self._settle(awaited)

    def _settle(self, awaited: Awaited, optimizer: Optimizer | None = None) -> None:
        if awaited.is_settled:
            return
        awaited.is_settled, gated = True, awaited.gated
        ending = self._judge.judge(
            awaited.parameters, awaited.norm, optimizer=optimizer, gated=gated
        )
        if gated.is_bad:
            with self._judge.looking("gradients were not clipped again"), torch.no_grad():
                awaited.clip_anew(redone=ending.redone)

    def _gated(
        self, parameters: Sequence[Tensor], norm: Tensor, optimizer: Optimizer | None
    ) -> GatedUpdate | None:
        window, steps = self._state.window, self._judge.steps
        optimizer = optimizer or steps.optimizer_of(window, parameters)
        is_plain = not (window.judged or window.closed or window.failed or window.no_veto)
        if self._state.compiles_functions or not is_plain or not can_be_gated(optimizer, norm):
            return None
        with self._judge.looking("an update was waited for"), torch.no_grad():
            step = steps.step(window, optimizer, parameters)
            return None if micros_moved(step) else self._judge.controller.gated(step, norm)
        return None
