"""The gradients of a trainer, accounted for from its backward to its update."""

from __future__ import annotations

import sys
from functools import partial
from types import CodeType, FrameType
from typing import Any
from weakref import ref

from torch import Tensor

from nanstop.hosts.gradient_writes import GradientWrites
from nanstop.hosts.trainer.watched import WatchedTrainer
from nanstop.measure.accounts.gradient_accounts import GradientAccounts, Line
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
        if self._accounts.is_looking:
            self._accounts.guarded(self._accounts.forward)

    def end(self) -> None:
        """Note no lines any more: the training is over."""
        self._writes.stop()

    def drop(self) -> None:
        """Forget the window: nanstop itself changes its gradients."""
        self._accounts.drop()

    def _preparing(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        if self._writes.num_stacks:
            self._writes.stop()  # what follows is a model's forward
        if self._accounts.is_looking:
            self._compare(tensors((args, kwargs)))
        else:
            self._is_again, self._given = False, []
        return prepare(*args, **kwargs)

    def _compare(self, given: list[Tensor]) -> None:
        """Note whether a micro-batch is given the very tensors of the one before."""
        pairs = zip(given, self._given, strict=False)
        alike = len(given) == len(self._given) and all(one is known() for one, known in pairs)
        self._is_again = bool(given) and alike
        self._given = [ref(one) for one in given]

    def _backward(self, backward: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if self._watch.host.replaying is not None:
            return backward(loss, *args, **kwargs)
        optimizer, accounts = self._watch.view.optimizer, self._accounts
        if optimizer is not None and self._watch.facts.veto == "yes":
            accounts.made(optimizer)  # none follows that is made inside of a backward
        if self._writes.num_stacks:
            self._writes.stop()
        if accounts.is_looking:
            look = partial(accounts.before_backward, is_again=self._is_again)
            accounts.guarded(look, [loss])
        try:
            result = self._watch.host.tape.backward(backward, loss, *args, **kwargs)
        except BaseException:
            accounts.drop()
            raise
        if accounts.is_looking:
            accounts.guarded(accounts.after_backward, self._own_line())
            self._look_for_lines()
        return result

    def _updating(self, tell: Any, *args: Any) -> Any:
        result = tell(*args)  # a callback of the user's may write to gradients
        self._writes.stop()
        watch, accounts = self._watch, self._accounts
        optimizer = watch.view.optimizer if accounts.is_looking else None
        if optimizer is not None and watch.host.replaying is None:
            accounts.guarded(accounts.updating, optimizer)
        return result

    def _updated(self, tell: Any, *args: Any) -> Any:
        optimizer, session = self._watch.view.optimizer, self._watch.session
        if optimizer is not None and session is not None and self._watch.host.replaying is None:
            norm = session.series.last("grad_norm")
            account = self._accounts.updated(optimizer, self._watch.step_id, norm)
            if account is not None:
                session.accounted(account)
            if self._accounts.is_looking:
                self._look_for_lines()
        return tell(*args)

    def _look_for_lines(self) -> None:
        if not self._watch.facts.compiled:
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
