"""Models of which every process has a copy, kept alike by ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from nanstop.decide.agreement import Ranks
from nanstop.decide.apart import ByItself
from nanstop.errors import NanstopError
from nanstop.hosts.sharded.alike.copies import has_hook
from nanstop.hosts.sharded.alike.drift import Drift
from nanstop.hosts.sharded.alike.terms import Terms
from nanstop.hosts.sharded.uneven import Incomplete, Uneven
from nanstop.numerics.tensors import nonfinite
from nanstop.ranks import patience_seconds
from nanstop.records import ReplicaFacts, SourceLine


class DdpReplicas:
    """See ``Replicas``. ``wrapped``: the model as the script calls it."""

    def __init__(
        self,
        wrapped: DistributedDataParallel,
        ranks: Ranks,
        drift: Drift,
        terms: Terms,
        uneven: Uneven,
    ) -> None:
        self.ranks: Ranks = ranks
        self._all = ranks
        self._uneven = uneven
        self._wrapped = wrapped
        self._drift = drift
        self._terms = terms

    is_whole, goes_back = False, True

    def failed(self, *, mine: bool) -> bool:
        failed = mine and bool(nonfinite({name: p.grad for name, p in self._shared()}))
        if failed and may_be_uneven(self._wrapped):
            away = self._uneven.any_away()
            self.ranks = Incomplete(self._all.rank, self._all.size) if away else self._all
        return failed

    def by_itself(self, *, asked: bool) -> ByItself:
        # What was exchanged is the same on every rank.
        return "skip" if asked and self._terms.are_alike else ""

    def anywhere(self, *, mine: bool) -> bool:
        return mine

    def parts(self) -> dict[str, Tensor]:
        return {}

    def whole(self, ranks: Ranks) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def obstacle(self) -> str:
        if has_hook(self._wrapped):
            return "DistributedDataParallel has a communication hook"
        if any(p.grad is not None and p.grad.is_sparse for _, p in self._shared()):
            return "gradients that the ranks share are sparse"
        return ""

    @contextmanager
    def alone(self) -> Iterator[None]:
        held = vars(self._wrapped)
        had, before = "forward" in held, held.get("forward")
        held["forward"] = self._wrapped.module.__call__
        try:
            yield
        finally:
            if had:
                held["forward"] = before
            else:
                del held["forward"]

    def begin(self) -> None:
        if self._wrapped.broadcast_buffers:
            source = self.ranks.size - 1 if may_be_uneven(self._wrapped) else 0
            first = distributed.get_global_rank(self._group, source)
            for buffer in self._wrapped.modules_buffers:
                self._done(distributed.broadcast(buffer, first, group=self._group, async_op=True))

    def average(self) -> None:
        shared = list(self._shared())
        mine = "".join(str(int(p.grad is not None)) for _, p in shared)
        answers = self.ranks.gather("gradients", mine)
        for (_, parameter), *has in zip(shared, *answers, strict=True):
            if "1" not in has:
                continue  # no rank's window has reached it
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad.mul_(1.0 / self.ranks.size)
            self._done(distributed.all_reduce(gradient, group=self._group, async_op=True))

    def compare(self, step: int, terms: str | None) -> ReplicaFacts | None:
        self._terms.compare(terms)
        if may_be_uneven(self._wrapped):
            return None  # ranks have made other numbers of backwards
        return self._drift.compare(self._wrapped, step)

    def updating(
        self, optimizer: Any, written_at: tuple[SourceLine, ...], *, is_late: bool
    ) -> None:
        self._drift.updating(self._wrapped, optimizer, written_at, is_late=is_late)

    @property
    def _group(self) -> Any:
        return self._wrapped.process_group

    def _shared(self) -> Iterator[tuple[str, Tensor]]:
        ignored = self._wrapped.parameters_to_ignore
        for name, parameter in self._wrapped.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                yield name, parameter

    def _done(self, work: Any) -> None:
        """Wait for a collective. Errors: ``NanstopError`` where another rank does not come."""
        try:
            work.wait(timedelta(seconds=patience_seconds()))
        except RuntimeError as error:
            reason = f"the ranks did not exchange their gradients ({error})"
            self.ranks.leave(reason)
            raise NanstopError(reason) from error


def may_be_uneven(model: DistributedDataParallel) -> bool:
    """Return whether ranks may have other numbers of batches, under torch's ``Join``: it stays on
    a model that was once under it.
    """
    return model._join_config.enable


def is_copied_to_all(model: DistributedDataParallel) -> bool:
    """Return whether every process of the run has a copy of a model, and its backward leaves all
    with the same gradients.
    """
    group: Any = model.process_group
    return (
        group.size() == distributed.get_world_size()
        and model.mixed_precision is None
        and not model._delay_all_reduce_params
        and not model._use_python_reducer
    )
