"""The way back into a trainer's own training step."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.hosts import compat
from nanstop.hosts.sharded.models import SharedModels
from nanstop.hosts.tape.loss_tape import LossTape, is_recorded
from nanstop.hosts.trainer.steps.made_within import MadeWithin
from nanstop.hosts.trainer.steps.micros import TrainerMicro, TrainerWindow
from nanstop.hosts.trainer.steps.remembered import Remembered
from nanstop.replay import state_diff
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.rng import RngNotes, restore_rng
from nanstop.replay.step import Batch
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


class Reentry:
    """The way back into a trainer's own ``training_step``, inputs and random state as they were."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.training_step = trainer.training_step
        self.prepare_inputs = trainer._prepare_inputs
        self.root: nn.Module = compat.unwrapped(trainer.model)
        self.buffers = BufferNotes(self.root)
        self.shared = SharedModels("trainer")
        self.plain_lrs: deque[tuple[float, ...]] = deque(maxlen=512)
        self.position: tuple[TrainerWindow, int] | None = None
        self.tape = LossTape()
        self.may_tape = False
        """Whether micro-batches are recorded where looks would have to call the script's loss."""
        self.replaying: tuple[TrainerMicro, Any] | None = None
        """What is run again, of which batch: what the trainer calls then is no doing of the run."""
        self._rng = RngNotes()
        self.remembered = Remembered(trainer)
        self.within = MadeWithin(trainer, self._rng.note)
        self._prepares: bool | None = None
        """Whether the trainer's steps go through ``_prepare_inputs``, once it is known."""
        self._makes_batches = compat.makes_batches(trainer)
        self._noted = state_diff.NOTHING
        """The last note of the trainer."""
        self._recording: TrainerMicro | None = None

    def attach(self) -> None:
        """Take the model that is there now: preparation may have moved or replaced it."""
        self.root = compat.unwrapped(self.trainer.model)
        self.buffers = BufferNotes(self.root)
        self.remembered = Remembered(self.trainer)
        self._noted = state_diff.NOTHING

    def learning_rates(self) -> tuple[float, ...]:
        """Return the rate of each parameter group, and remember that the host had it."""
        rates = tuple(float(group["lr"]) for group in self._groups)
        self.plain_lrs.append(rates)
        return rates

    def set_learning_rates(self, rates: tuple[float, ...]) -> None:
        """Give each parameter group its rate; those that were added since keep theirs."""
        for group, rate in zip(self._groups, rates, strict=False):
            group["lr"] = rate

    @property
    def _groups(self) -> list[dict[str, Any]]:
        optimizer = compat.unwrapped_optimizer(self.trainer.optimizer)
        return optimizer.param_groups if optimizer is not None else []

    def record(self, micro: TrainerMicro) -> Tensor:
        """Run a micro-batch for the first time, as the host asked, and note what a replay needs."""
        self._recording = micro
        begun = None
        if self.within.generates and not self._prepares:  # what else such a step does is known
            self._note(begun := replace(micro), micro.raw)
        self.within.holding = micro.made
        try:
            micro.loss = loss = self.training_step(micro.model, micro.raw, micro.num_items)
            return loss
        finally:
            self.within.holding = None
            if begun is not None and not self._prepares:
                micro.whole, micro.batch, micro.rng = True, begun.batch, begun.rng
                micro.before, micro.buffers = begun.before, begun.buffers
                micro.remembered = begun.remembered
                self._prepares = False
            if micro.taped is not None:
                self.tape.end()
            self._recording = None
            micro.after = self._noted = state_diff.note(vars(self.trainer), micro.before)

    def prepare(self, inputs: Any) -> Any:
        """Stand in for the trainer's ``_prepare_inputs``."""
        if self.replaying is not None:
            micro, batch = self.replaying
            assert micro.rng is not None
            restore_rng(micro.rng)
            return copy.copy(batch)
        position = compat.position(self.trainer)
        micro = self._recording
        self._prepares = self._prepares or micro is not None
        if micro is not None and micro.batch is None and self._makes_batches:
            micro.rng = self._rng.note()
        prepared = self.prepare_inputs(inputs)
        if micro is not None and micro.batch is None:
            self._note(micro, prepared)
            micro.advanced = compat.position(self.trainer) != position
            if self.may_tape and is_recorded(self.trainer.state.global_step):
                assert micro.rng is not None
                micro.taped = self.tape.begin(self.trainer.args.device.type, micro.rng)
        return prepared

    def _note(self, micro: TrainerMicro, batch: Any) -> None:
        """Note where a run of a micro-batch again starts from."""
        micro.batch = copy.copy(batch)
        micro.before = state_diff.note(vars(self.trainer), self._noted)
        micro.remembered = self.remembered.note(self.root)
        micro.buffers = self.buffers.note()
        micro.rng = self._rng.note()

    def generate(self, micro: TrainerMicro, inputs: Any) -> Any:
        """Run again what generates for the batch of a micro-batch."""
        return self.replay(micro, shown(inputs)) if micro.whole else self.prepare_inputs(inputs)

    def leave_out(self, micro: TrainerMicro) -> Tensor:
        """Return the loss of a micro-batch that is not run, or not to its end.

        The next one has its own inputs.
        """
        if not micro.advanced:
            compat.advance_position(self.trainer)
        return torch.zeros((), device=self.trainer.args.device)

    def replay(self, micro: TrainerMicro, batch: Batch | None) -> Tensor:
        """Run a recorded micro-batch again.

        Gradients are added; bookkeeping of the trainer goes on from where it is.
        """
        state = self.trainer.accelerator.gradient_state
        sync = state.sync_gradients
        given = micro.batch if batch is None else given_of(batch)
        outer, self.replaying = self.replaying, (micro, given)
        deferred = (
            nullcontext() if micro.sync else self.trainer.accelerator.no_sync(model=micro.model)
        )
        try:
            state._set_sync_gradients(micro.sync)
            if micro.whole and micro.rng is not None:
                restore_rng(micro.rng)
            raw = copy.copy(given if micro.whole else micro.raw)
            with deferred, self.within.given(micro.made):
                return self.training_step(micro.model, raw, micro.num_items)
        finally:
            self.replaying = outer
            state._set_sync_gradients(sync)


_WHOLE = "inputs"
"""The entry that stands for a batch that is no mapping."""


def shown(batch: Any) -> Batch:
    return batch if isinstance(batch, Mapping) else {_WHOLE: batch}


def given_of(batch: Batch) -> Any:
    return batch[_WHOLE] if tuple(batch) == (_WHOLE,) else batch
