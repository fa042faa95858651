"""Where a trainer's gradients end: its clip, and the call of its callbacks before an update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanstop.hosts import compat
from nanstop.hosts.trainer.accounts import TrainerAccounts
from nanstop.hosts.trainer.callbacks import CallbackWrites
from nanstop.hosts.trainer.steps.micros import TrainerWindow
from nanstop.hosts.trainer.watched import WatchedTrainer
from nanstop.hosts.trainer.windows import TrainerWindows
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


class TrainerSinks:
    """Reads each window where its gradients end, and has what was resolved carried out.

    ``window``: the present one, None once it was read. ``pending``: the number of one that was
    read, until its step is over. ``norm_anew``: of gradients that the trainer's own method has
    clipped again, for its log.
    """

    def __init__(
        self,
        watch: WatchedTrainer,
        windows: TrainerWindows,
        accounts: TrainerAccounts,
        writes: CallbackWrites,
    ) -> None:
        self._watch, self._windows, self._accounts = watch, windows, accounts
        self._writes = writes
        self._clip: Any = None
        self._awaiting: TrainerWindow | None = None
        """One that is read, and not yet updated."""
        self.window: TrainerWindow | None = None
        self.pending: int | None = None
        self.norm_anew: Any = None

    def install(self) -> None:
        """Stand in for what the trainer calls, until its patches are undone."""
        patches, trainer = self._watch.patches, self._watch.trainer
        accelerator, callbacks = trainer.accelerator, trainer.callback_handler
        self._clip = accelerator.clip_grad_norm_
        patches.set(accelerator, "clip_grad_norm_", self._on_clip)
        hear = partial(self._on_update, callbacks.on_pre_optimizer_step)
        patches.set(callbacks, "on_pre_optimizer_step", hear)

    def _on_clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        window, windows = self.window, self._windows
        if window is None or self._watch.host.replaying is not None or not window.closed:
            return self._clip(parameters, max_norm, norm_type)
        parameters = list(parameters)
        self._settling(window)
        if not self._is_read_here:
            norm = self._clip(parameters, max_norm, norm_type)
            if norm is not None:
                step, read = windows.step(window), partial(windows.read, window, norm)
                windows.ends.observe(step, read)
            return norm
        norm = windows.close(window, parameters, norm_type)
        self._forget_failed(window)
        # Where clipping is off transformers clips to infinity to get the norm: inf / inf would be
        # NaN, for every gradient.
        if not math.isfinite(max_norm):
            self._clip_as_the_host(window)
            windows.note_norm(window)
        elif window.ending.apply:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        windows.last_look(window)
        self._awaiting = window
        return norm

    def _on_update(self, tell: Any, *args: Any) -> Any:
        window, writes = self.window, self._writes
        unseen = window is not None and window.closed and self._watch.host.replaying is None
        if window is not None and unseen and self._is_read_here:
            self._settling(window)
            self._windows.close(window, list(window.micros[-1].model.parameters()), 2.0)
            self._forget_failed(window)
            self._clip_as_the_host(window)
            self._windows.last_look(window)
            self._awaiting = window
        writes.updating()
        result = tell(*args)
        window, self._awaiting = self._awaiting, None
        if writes.rewritten_at:
            if window is not None:
                self._windows.rewritten(window, writes.rewritten_at)
                self._forget_failed(window)
            writes.rewritten_at = ()
        return result

    def _settling(self, window: TrainerWindow) -> None:
        self.window, self.pending = None, window.index
        window.rewritten_at = self._writes.rewritten_at or None

    @property
    def _is_read_here(self) -> bool:
        """Whether what gradients this process has are read and clipped by torch itself."""
        return self._watch.facts.ranks_agree or compat.is_plain(self._watch.trainer)

    def _forget_failed(self, window: TrainerWindow) -> None:
        if window.ending.failed or not self._windows.applied:
            self._accounts.drop()

    def _clip_as_the_host(self, window: TrainerWindow) -> None:
        """Clip the gradients of a window that was redone by the trainer's own means, where it
        has such.
        """
        clip = compat.own_clip(self._watch.trainer)
        if clip is not None and window.ending.redone and window.ending.apply:
            # Reading the new gradients has unscaled them, which the trainer's own method does as
            # well, and may do once.
            self._watch.carrier.redo(self._windows.step(window), {})
            self.norm_anew = clip(window.micros[-1].model)
