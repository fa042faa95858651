"""A window of a transformers or TRL trainer that can be run again: the ``Step`` of this host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanstop.errors import NanstopError
from nanstop.hosts import compat
from nanstop.hosts.replicas import Replicas, is_here
from nanstop.hosts.run_again import run_again
from nanstop.hosts.sharded.engine import needs_others
from nanstop.hosts.tape.taped_step import TapedStep
from nanstop.hosts.trainer.objective import has_own_loss
from nanstop.hosts.trainer.steps.micros import TrainerMicro, TrainerWindow
from nanstop.hosts.trainer.steps.reentry import Reentry, shown
from nanstop.hosts.window.remedies import WindowRemedies
from nanstop.records import RunFacts, SourceLine, StepId
from nanstop.replay import state_diff
from nanstop.replay.collectives import Collectives
from nanstop.replay.copies.snapshot import Trainable, ready_scaler
from nanstop.replay.step import Batch, ModelView, Step, parameters_of, trainable_of, undone
from nanstop.replay.undo import attributes_kept
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


_UNPREPARED = "its micro-batches did not go through the trainer's `_prepare_inputs`"


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

    def has_spoilt_buffers(self) -> bool:
        """Return whether it has left in a buffer what is not finite and was before."""
        notes = self.window.micros[0].buffers
        return bool(notes) and self.host.buffers.spoilt(notes)

    def rewritten_at(self) -> tuple[SourceLine, ...] | None:
        return self.window.rewritten_at

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
            self.host.remembered.restore(noted.remembered)
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

    def update_of(self, names: Collection[str]) -> HfStep:
        """See ``replay.step.Step``: one optimizer makes it."""
        del names
        return self

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
