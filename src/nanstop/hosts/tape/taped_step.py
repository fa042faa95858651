"""A window of a host whose micro-batches were recorded, run again by what they called."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.hosts.run_again import run_again
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.records import RunFacts, StepId
from nanstop.replay.collectives import Collectives
from nanstop.replay.copies.buffers import Buffers
from nanstop.replay.step import Batch, Measure, ModelView, Step, parameters_of
from nanstop.tracing.places import Line


@dataclass(frozen=True, slots=True)
class TapedStep:
    """See ``replay.step.Step``: ``inner``, whose loss function is not called again.

    ``buffers`` go back to what ``notes`` say of the start of each micro-batch. ``without_graph``:
    see ``hosts.loop.step.LoopStep``.
    """

    inner: Step
    taped: Sequence[TapedMicro]
    buffers: Buffers
    notes: Sequence[Any]
    without_graph: Mapping[nn.Module, tuple[int, Line]]

    @property
    def id(self) -> StepId:
        return self.inner.id

    @property
    def view(self) -> ModelView:
        return self.inner.view

    @property
    def facts(self) -> RunFacts:
        return self.inner.facts

    def learned(self, **facts: Any) -> None:
        self.inner.learned(**facts)

    @property
    def batches(self) -> tuple[Batch, ...]:
        return tuple(micro.batch for micro in self.taped)

    @property
    def losses(self) -> tuple[Tensor | None, ...]:
        return self.inner.losses

    @property
    def is_local(self) -> bool:
        return self.inner.is_local

    @property
    def collectives(self) -> Collectives:
        return self.inner.collectives

    @property
    def calls_script(self) -> bool:
        return any(micro.calls_script for micro in self.taped)

    @property
    def rates(self) -> tuple[Any, ...]:
        return self.inner.rates

    def run(self, micro: int, batch: Batch | None = None) -> Tensor:
        self.buffers.restore(self.notes[micro])
        with self._run_again():
            return self.taped[micro].rerun(batch)

    @contextmanager
    def _run_again(self) -> Iterator[None]:
        leaves = parameters_of(self.view).values()
        with torch.enable_grad(), run_again(self.view.root, leaves, compiled=False):
            yield

    def update_of(self, names: Collection[str]) -> Step:
        return replace(self, inner=self.inner.update_of(names))

    def update(self) -> None:
        self.inner.update()

    def isolated(self, *, with_update: bool = False) -> AbstractContextManager[None]:
        return self.inner.isolated(with_update=with_update)

    def cuts(self) -> list[Line]:
        """See ``hosts.loop.step.LoopStep``."""
        with self.isolated(), self._run_again():
            self.buffers.restore(self.notes[0])
            return self.taped[0].cuts()

    def makers(self, measure: Measure, micro: int = 0) -> list[Line]:
        """See ``hosts.loop.step.LoopStep``."""
        with self.isolated(), self._run_again():
            self.buffers.restore(self.notes[micro])
            return self.taped[micro].makers(measure)
