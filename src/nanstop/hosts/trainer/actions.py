"""Carries out what was resolved about a window.

Redo, skip or rollback, with the host's books kept right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from nanstop.decide.agreement import on_every_rank
from nanstop.hosts import compat
from nanstop.hosts.trainer.steps.micros import TrainerWindow
from nanstop.hosts.trainer.steps.reentry import Reentry
from nanstop.hosts.trainer.steps.step import HfStep, isolation
from nanstop.hosts.window.remedies import under
from nanstop.numerics.tensors import nonfinite
from nanstop.records import Atom
from nanstop.replay.copies.snapshot import ready_scaler
from nanstop.replay.step import parameters_of
from nanstop.replay.untouched import versions_kept
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


class Carrier:
    """Acts on one trainer through its ``Reentry``."""

    def __init__(self, host: Reentry) -> None:
        self.host = host
        self.trainer = host.trainer
        self._overflow_set: list[Any] = []
        self._summed_anew: TrainerWindow | None = None
        self._until_update = ExitStack()
        self._sum_is_spoilt = False

    def redo(self, step: HfStep, atoms: Mapping[int, tuple[Atom, ...]]) -> None:
        """Run the window again from zero gradients, each micro-batch under its remedies.

        Afterwards gradients, losses, random state and the trainer's books are those of a run that
        met no fault. Remedies of an earlier redo of this window stay.
        """
        window = step.window
        notes = [micro.buffers for micro in window.micros]
        with (
            versions_kept(parameters_of(step.view).values()),
            self.host.buffers.rewritten(*notes),
        ):
            self._run_anew(step, atoms)
        self._summed_anew = window

    def _run_anew(self, step: HfStep, atoms: Mapping[int, tuple[Atom, ...]]) -> None:
        clear_gradients(parameters_of(step.view).values())
        ready_scaler(step.view.scaler)
        self.host.position = None
        replicas, ranks = step.replicas, step.replicas.ranks
        with ExitStack() as stack:

            def enter() -> bool:
                standing = step.remedies.add(atoms)
                stack.enter_context(under(step.view, standing))
                return bool(standing)

            stands = on_every_rank(ranks, "remedies", enter)
            replicas.begin()
            for index, micro in enumerate(step.window.micros):
                with step.collectives.together(ranks):
                    run = partial(step.run, index)
                    micro.loss = on_every_rank(ranks, f"micro-batch {index}", run)
                if micro.reduced:
                    replicas.average()
            if stands:
                self.after_update(stack.pop_all().close)

    def skip(self, step: HfStep) -> None:
        """Let the host take this step without an update.

        No moment, no weight and no learning rate moves.
        """
        scaler = compat.run_scaler(self.trainer)
        self._mend_buffers(step.window)
        if not self.trainer.args.logging_nan_inf_filter:
            self._sum_is_spoilt = True
        if scaler is None:
            clear_gradients(parameters_of(step.view).values())
            for optimizer in compat.optimizers_of(self.trainer):
                if getattr(optimizer, "_is_overflow", None) is False:
                    optimizer._is_overflow = True
                    self._overflow_set.append(optimizer)
        else:
            self._force_overflow(scaler)

    def update_anew(self, steps: Sequence[HfStep]) -> None:
        """Apply the updates of some windows again, for good."""
        view, windows = steps[-1].view, [step.window for step in steps]
        with isolation(self.host, view, windows, with_update=False, keep_scaler=False):
            for step in steps:
                for micro in range(len(step.batches)):
                    step.run(micro)
                step.update()
                clear_gradients(parameters_of(view).values())

    def begin_window(self) -> None:
        """Take back the overflow flag of a skipped step, or the learning rate would wait for
        good.
        """
        self._until_update = ExitStack()
        for optimizer in self._overflow_set:
            optimizer._is_overflow = False
        self._overflow_set.clear()
        self.host.position = None
        self._summed_anew = None

    def after_update(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the host's next optimizer step is over, or at ``close``
        if none comes.
        """
        self._until_update.callback(_once(self.trainer.optimizer, "step", callback))

    def mend_sum(self, total: Tensor) -> None:
        """Bring the loop's running sum of losses up to what was redone or skipped.

        In its order, by its rule for bad ones.

        ``total`` is what the loop is about to log from, once it has added every loss of the window.
        Changed in place.
        """
        window, self._summed_anew = self._summed_anew, None
        if window is None:
            return
        mended, is_filtered = window.logged.clone(), self.trainer.args.logging_nan_inf_filter
        since = 1 + window.index - self.trainer._globalstep_last_logged
        for micro in window.micros:
            assert micro.loss is not None
            if math.isfinite(micro.loss.item()):
                mended += micro.loss
            elif is_filtered:
                mended += mended / since
            else:
                mended += micro.loss
        total.copy_(mended)

    def mend_reset(self, total: Tensor) -> None:
        """Bring the sum that the host has just logged and reset to 0, where its own reset, ``x -=
        x``, has left NaN.

        A bad loss of a skipped step is logged as the host logs it;
        what is summed after that entry is without it.
        """
        if self._sum_is_spoilt:
            total.zero_()
            self._sum_is_spoilt = False

    def close(self) -> None:
        """Undo what was to last until an update that does not come any more.

        Training was broken off.
        """
        self._until_update.close()

    def _mend_buffers(self, window: TrainerWindow) -> None:
        if window.micros[0].buffers and nonfinite(dict(self.host.root.named_buffers())):
            notes = window.micros[0].buffers
            with self.host.buffers.rewritten(notes):
                self.host.buffers.restore(notes)

    def _force_overflow(self, scaler: Any) -> None:
        """Make the scaler skip this step, and leave its scale and growth tracker as they were."""
        device = self.trainer.args.device
        scaler.scale(torch.zeros((), device=device))  # makes the scale where no backward has yet
        for wrapped in compat.optimizers_of(self.trainer):
            state = scaler._per_optimizer_states[id(compat.unwrapped_optimizer(wrapped))]
            state["stage"] = OptState.UNSCALED
            state["found_inf_per_device"] = {device: torch.ones((), device=device)}
        kept = scaler.state_dict()
        self._until_update.callback(_once(scaler, "update", lambda: scaler.load_state_dict(kept)))


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Set every gradient to None: the state at the start of a window."""
    for parameter in parameters:
        parameter.grad = None


def _once(owner: Any, name: str, callback: Callable[[], None]) -> Callable[[], None]:
    """Replace a method on the instance for its next call.

    Afterwards put back what was there and call ``callback``.

    Returns what does both without that call, should it not come.
    """
    own = vars(owner)
    had, previous, method = name in own, own.get(name), getattr(owner, name)
    waiting = True

    def put_back() -> None:
        nonlocal waiting
        if waiting and had:
            own[name] = previous
        elif waiting:
            del own[name]
        waiting = False

    def call(*args: Any, **kwargs: Any) -> Any:
        put_back()
        try:
            return method(*args, **kwargs)
        finally:
            callback()

    def give_up() -> None:
        if waiting:
            put_back()
            callback()

    own[name] = call
    return give_up
