"""A window of a transformers or TRL trainer that can be run again: the ``Step`` of this host."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.errors import NanstopError
from nanstop.hosts import compat
from nanstop.hosts.replicas import Replicas, is_here
from nanstop.hosts.run_again import run_again
from nanstop.hosts.sharded.engine import needs_others
from nanstop.hosts.sharded.models import SharedModels, reduces
from nanstop.hosts.tape.loss_tape import LossTape, is_recorded
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.hosts.tape.taped_step import TapedStep
from nanstop.hosts.trainer.objective import has_own_loss
from nanstop.hosts.window.ending import Ending
from nanstop.hosts.window.remedies import WindowRemedies
from nanstop.records import RunFacts, StepId
from nanstop.replay import state_diff
from nanstop.replay.collectives import Collectives
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.copies.snapshot import Trainable, ready_scaler
from nanstop.replay.rng import RngNotes, RngState, restore_rng
from nanstop.replay.step import Batch, ModelView, Step, parameters_of, trainable_of, undone
from nanstop.replay.undo import attributes_kept
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


@dataclass(slots=True)
class TrainerMicro:
    """One call of ``training_step``.

    Noted between its ``_prepare_inputs`` and its loss: replays start there.

    ``before`` and ``after`` are notes of the trainer, ``after`` at the end of the call; ``batch``
    is a shallow copy of what ``_prepare_inputs`` returned, None where it raised (``rng`` is of its
    beginning then, in a trainer that makes its batches there). ``advanced``: it moved on to the
    next buffered slice as well. ``taped``: the calls of a loss of the script's own.
    """

    model: nn.Module
    raw: Any
    num_items: Any
    sync: bool
    batch: Any = None
    advanced: bool = False
    rng: RngState | None = None
    before: state_diff.Notes = state_diff.NOTHING
    after: state_diff.Notes = state_diff.NOTHING
    buffers: Any = ()
    loss: Tensor | None = None
    taped: TapedMicro | None = None
    reduced: bool = field(init=False)
    """See ``hosts.loop.step.Micro``."""

    def __post_init__(self) -> None:
        self.reduced = self.sync and reduces(self.model)


@dataclass(slots=True)
class TrainerWindow:
    """The micro-batches of one optimizer step.

    ``logged``: the trainer's running loss before the first of them.
    """

    index: int
    lrs: tuple[float, ...]
    logged: Tensor
    micros: list[TrainerMicro] = field(default_factory=list)
    remedies: WindowRemedies = field(default_factory=WindowRemedies)
    collectives: Collectives = field(default_factory=Collectives)
    ending: Ending = field(default_factory=Ending)

    @property
    def closed(self) -> bool:
        return bool(self.micros) and self.micros[-1].sync

    @property
    def replayable(self) -> bool:
        """Whether every micro-batch went through ``_prepare_inputs``: trainers with a loop of
        their own may not.
        """
        return all(m.batch is not None for m in self.micros)

    def touched(self) -> set[str]:
        """Return the trainer attributes that the steps themselves changed."""
        return set().union(*[state_diff.changed(m.before, m.after) for m in self.micros])

    def trim(self) -> None:
        """Let go of notes that no replay of this window needs."""
        names = self.touched()
        for micro in self.micros:
            micro.before, micro.after = micro.before.only(names), micro.after.only(names)


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
        self._makes_batches = compat.makes_batches(trainer)
        self._noted = state_diff.NOTHING
        """The last note of the trainer."""
        self._recording: TrainerMicro | None = None

    def attach(self) -> None:
        """Take the model that is there now: preparation may have moved or replaced it."""
        self.root = compat.unwrapped(self.trainer.model)
        self.buffers = BufferNotes(self.root)
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
        try:
            micro.loss = loss = self.training_step(micro.model, micro.raw, micro.num_items)
            return loss
        finally:
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
        if micro is not None and micro.batch is None and self._makes_batches:
            micro.rng = self._rng.note()
        prepared = self.prepare_inputs(inputs)
        if micro is not None and micro.batch is None:
            micro.batch = copy.copy(prepared)
            micro.advanced = compat.position(self.trainer) != position
            micro.before = state_diff.note(vars(self.trainer), self._noted)
            micro.buffers = self.buffers.note()
            micro.rng = self._rng.note()
            if self.may_tape and is_recorded(self.trainer.state.global_step):
                micro.taped = self.tape.begin(self.trainer.args.device.type, micro.rng)
        return prepared

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
            with deferred:
                return self.training_step(micro.model, copy.copy(micro.raw), micro.num_items)
        finally:
            self.replaying = outer
            state._set_sync_gradients(sync)


_UNPREPARED = "its micro-batches did not go through the trainer's `_prepare_inputs`"
_WHOLE = "inputs"
"""The entry that stands for a batch that is no mapping."""


def shown(batch: Any) -> Batch:
    return batch if isinstance(batch, Mapping) else {_WHOLE: batch}


def given_of(batch: Batch) -> Any:
    return batch[_WHOLE] if tuple(batch) == (_WHOLE,) else batch


@dataclass(slots=True)
class HfStep:
    """See ``replay.step.Step``.

    Two micro-batches run in order inside one ``isolated`` go on from each other.
    """

    id: StepId
    view: ModelView
    facts: RunFacts
    window: TrainerWindow
    host: Reentry
    past: str = ""
    rewritten_at: Callable[[], None] = lambda: None

    def learned(self, **facts: Any) -> None:
        self.facts = replace(self.facts, **facts)

    @property
    def batches(self) -> tuple[Batch, ...]:
        return tuple([shown(m.batch) for m in self.window.micros])

    @property
    def losses(self) -> tuple[Tensor | None, ...]:
        return tuple([m.loss for m in self.window.micros])

    @property
    def calls_script(self) -> bool:
        return has_own_loss(self.host.trainer)

    def for_looks(self) -> Step:
        """Return the step as looks run it: by what its losses called, where that was recorded."""
        micros = self.window.micros
        taped = [m.taped for m in micros if m.taped is not None and m.taped.tape.losses]
        if not taped or len(taped) < len(micros) or any(one.obstacle() for one in taped):
            return self
        notes = [micro.buffers for micro in micros]
        return TapedStep(self, taped, self.host.buffers, notes, self.host.tape.without_graph)

    @property
    def is_local(self) -> bool:
        if self.facts.world_size == 1:
            return True
        return self.facts.ranks_agree and is_here(self.host.root, self.replicas)

    @property
    def collectives(self) -> Collectives:
        return self.window.collectives

    @property
    def replicas(self) -> Replicas:
        """See ``hosts.window.host.HostStep``."""
        micros = self.window.micros
        return self.host.shared.of_window(micros, {m.model for m in micros}, self.view.optimizer)

    @property
    def rates(self) -> tuple[float, ...]:
        return self.window.lrs

    def run(self, micro: int, batch: Batch | None = None) -> Tensor:
        window, host = self.window, self.host
        noted, touched = window.micros[micro], window.touched()
        previous, attributes = host.position, vars(host.trainer)
        if previous is not None and previous[0] is window and previous[1] == micro - 1:
            state_diff.advance(
                vars(host.trainer), window.micros[micro - 1].after, noted.before, touched
            )
        else:
            state_diff.restore(attributes, noted.before, touched)
            host.buffers.restore(noted.buffers)
        host.position = (window, micro)
        state = host.trainer.state
        present, state.global_step = state.global_step, window.index
        try:
            with self.collectives.around(micro, world_size=self.facts.world_size):
                if micro in self.remedies.left_out:
                    return host.leave_out(noted)
                return self._replay(micro, noted, batch)
        finally:
            state.global_step = present

    def _replay(self, micro: int, noted: TrainerMicro, batch: Batch | None) -> Tensor:
        kept, leaves = state_diff.tensors(noted.before), parameters_of(self.view).values()
        with (
            self.remedies.under(self.view, micro),
            run_again(
                self.host.root,
                leaves,
                compiled=self.facts.compiled,
                own=kept,
                host=self.host.trainer,
            ),
            self.replicas.alone(),
        ):
            given = self.remedies.rebatched(self.batches[micro], micro)
            return self.host.replay(noted, given if batch is None else batch)

    @property
    def remedies(self) -> WindowRemedies:
        return self.window.remedies

    def obstacle(self) -> str:
        """Return why the window cannot be run again, or ""."""
        others = needs_others({micro.model for micro in self.window.micros}, self.replicas)
        return others if self.window.replayable else _UNPREPARED

    def set_rates(self) -> None:
        """Give the optimizer the learning rates that this window had."""
        self.host.set_learning_rates(self.window.lrs)

    def update(self) -> None:
        trainer = self.host.trainer
        optimizer = compat.unwrapped_optimizer(trainer.optimizer)
        assert optimizer is not None
        self.collectives.share(parameters_of(self.view), self.replicas.average)
        trainer.accelerator.unscale_gradients()
        limit = trainer.args.max_grad_norm
        if limit is not None and limit > 0:
            torch.nn.utils.clip_grad_norm_(list(self.host.root.parameters()), limit)
        present = tuple(float(group["lr"]) for group in optimizer.param_groups)
        # A rate that no window of this run had is a remedy's; it stays.
        rates = self.window.lrs if present in self.host.plain_lrs else present
        state = trainer.accelerator.gradient_state
        sync = state.sync_gradients
        try:
            state._set_sync_gradients(True)
            self.host.set_learning_rates(rates)
            trainer.optimizer.step()
        finally:
            state._set_sync_gradients(sync)
            self.host.set_learning_rates(present)

    @contextmanager
    def isolated(self, *, with_update: bool = False) -> Iterator[None]:
        if self.obstacle():
            raise NanstopError(f"not replayable: {self.obstacle()}", code="NS000")
        with isolation(self.host, self.view, (self.window,), with_update=with_update):
            yield


@contextmanager
def isolation(
    host: Reentry,
    view: ModelView,
    windows: Iterable[TrainerWindow] = (),
    *,
    with_update: bool,
    keep_scaler: bool = True,
) -> Iterator[None]:
    """Undo on exit what replays of ``windows`` change: see ``replay.step.Step.isolated``."""
    trainer, root = host.trainer, host.root
    scaler = view.scaler
    earlier = [micro.buffers for window in windows for micro in window.micros]
    scaled = Trainable({}, None, scaler if keep_scaler else None)
    changed = trainable_of(view) if with_update else scaled
    places = [(o, "_is_overflow") for o in _wrapped(trainer)]
    with (
        state_diff.kept((vars(trainer),)),
        undone(
            root, list(parameters_of(view).values()), changed, buffers=host.buffers, notes=earlier
        ),
        attributes_kept([*places, (host, "position")]),
    ):
        ready_scaler(scaler)
        host.position = None
        yield


def _wrapped(trainer: Any) -> list[Any]:
    return [o for o in compat.optimizers_of(trainer) if hasattr(o, "_is_overflow")]
