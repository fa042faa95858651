"""The gradients of a trainer, accounted for from its backward to its update."""

from __future__ import annotations

import sys
from functools import partial
from types import CodeType, FrameType
from typing import Any
from weakref import ref

from nanstop.hosts import compat
from nanstop.hosts.gradient_writes import GradientWrites
from nanstop.hosts.trainer.watched import WatchedTrainer
from nanstop.measure.gradient_accounts import GradientAccounts, Line
from nanstop.numerics.tensors import tensors
from nanstop.own_code import is_library
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


class TrainerAccounts:
    """Looks where every trainer passes: its accelerator's backward and the calls around an update.

    A backward that a trainer of the user's makes by itself is not seen: then there is no account.
    ``beginning``: of the call in which the trainer trains; who asked for that asked for no
    backward.
    """

    def __init__(self, watch: WatchedTrainer, beginning: CodeType) -> None:
        self._watch = watch
        self._beginning = beginning
        self._accounts = GradientAccounts()
        self._writes = GradientWrites(self._accounts, is_shown=lambda file: not is_library(file))
        self._given: list[ref[Any]] = []
        self._is_again = False

    def install(self) -> None:
        """Stand in for what the trainer calls, until its patches are undone."""
        patches, accelerator = self._watch.patches, self._watch.trainer.accelerator
        patches.set(accelerator, "backward", partial(self._backward, accelerator.backward))
        trainer = self._watch.trainer
        patches.set(trainer, "_prepare_inputs", partial(self._preparing, trainer._prepare_inputs))
        callbacks = trainer.callback_handler
        updating = partial(self._updating, callbacks.on_pre_optimizer_step)
        patches.set(callbacks, "on_pre_optimizer_step", updating)
        updated = partial(self._updated, callbacks.on_optimizer_step)
        patches.set(callbacks, "on_optimizer_step", updated)

    def forward(self) -> None:
        """Look at the weights that the first forward after an update finds."""
        self._accounts.guarded(self._accounts.forward)

    def end(self) -> None:
        """Note no lines any more: the training is over."""
        self._writes.stop()

    def drop(self) -> None:
        """Forget the window: nanstop itself changes its gradients."""
        self._accounts.drop()

    def _preparing(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        self._writes.stop()  # what follows is a model's forward
        given = tensors((args, kwargs)) if self._accounts.is_looking else []
        pairs = zip(given, self._given, strict=False)
        alike = len(given) == len(self._given) and all(one is known() for one, known in pairs)
        self._is_again = bool(given) and alike
        self._given = [ref(one) for one in given]
        return prepare(*args, **kwargs)

    def _backward(self, backward: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if self._watch.host.busy:
            return backward(loss, *args, **kwargs)
        optimizer = compat.unwrapped_optimizer(self._watch.trainer.optimizer)
        if optimizer is not None:
            self._accounts.made(optimizer)
        self._writes.stop()
        look = partial(self._accounts.before_backward, is_again=self._is_again)
        self._accounts.guarded(look, [loss])
        try:
            result = self._watch.host.tape.backward(backward, loss, *args, **kwargs)
        except BaseException:
            self._accounts.drop()
            raise
        self._accounts.guarded(self._accounts.after_backward, self._own_line())
        self._look_for_lines()
        return result

    def _updating(self, tell: Any, *args: Any) -> Any:
        result = tell(*args)  # a callback of the user's may write to gradients
        self._writes.stop()
        optimizer = compat.unwrapped_optimizer(self._watch.trainer.optimizer)
        if optimizer is not None and not self._watch.host.busy:
            self._accounts.guarded(self._accounts.updating, optimizer)
        return result

    def _updated(self, tell: Any, *args: Any) -> Any:
        optimizer, session = (
            compat.unwrapped_optimizer(self._watch.trainer.optimizer),
            self._watch.session,
        )
        if optimizer is not None and session is not None and not self._watch.host.busy:
            at = self._watch.step_id()
            account = self._accounts.updated(optimizer, at)
            if account is not None:
                session.accounted(account)
            self._look_for_lines()
        return tell(*args)

    def _look_for_lines(self) -> None:
        if self._accounts.wants_lines and not self._watch.facts.compiled:
            self._writes.start()

    def _own_line(self) -> Line:
        """Return the line of the user's that is at work in a training, None where only the
        library's are.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._beginning:
            if not is_library(frame.f_code.co_filename):
                return frame.f_code, frame.f_lineno
            frame = frame.f_back
        return None
