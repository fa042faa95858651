"""Models of which every process has a copy, kept alike by ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nanstop.decide.agreement import Ranks
from nanstop.errors import NanstopError
from nanstop.hosts.replicas import ONE_COPY, Replicas
from nanstop.hosts.sharded.copies import has_hook
from nanstop.hosts.sharded.drift import Drift
from nanstop.hosts.sharded.store_ranks import StoreRanks, ranks_of_run
from nanstop.numerics.tensors import nonfinite
from nanstop.own_code import is_class_of
from nanstop.ranks import patience_seconds
from nanstop.records import ReplicaFacts, SourceLine, StepId
from nanstop.replay.conditions import unrecorded
from nanstop.session.watched_run import WatchedRun


class DdpReplicas:
    """See ``Replicas``. ``wrapped``: the model as the script calls it."""

    def __init__(self, wrapped: DistributedDataParallel, ranks: Ranks, drift: Drift) -> None:
        self.ranks = ranks
        self._wrapped = wrapped
        self._drift = drift

    def failed(self) -> bool:
        return bool(nonfinite({name: p.grad for name, p in self._shared()}))

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
            first = distributed.get_global_rank(self._group, 0)
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

    def compare(self, step: int) -> ReplicaFacts | None:
        with torch.no_grad(), unrecorded():
            return self._drift.compare(self._wrapped, step)

    def updating(self, optimizer: Any, written_at: tuple[SourceLine, ...]) -> None:
        with torch.no_grad(), unrecorded():
            self._drift.updating(self._wrapped, optimizer, written_at)

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


class _Micro(Protocol):
    @property
    def reduced(self) -> bool: ...


class SharedModels:
    """The models of one host (``name``) that several processes train together."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ranks: StoreRanks | None = None
        self._group: Any = None
        self._known: dict[int, DdpReplicas] = {}
        self._drifts: WeakKeyDictionary[nn.Module, Drift] = WeakKeyDictionary()
        self._num_drifts = 0

    def of_window(
        self,
        micros: Sequence[_Micro],
        called: Iterable[nn.Module],
        optimizer: Optimizer | None,
    ) -> Replicas:
        """Return the copies of the models that a window has ``called``, as ``of`` does, if its last
        backward left every rank with the same gradients, of which each makes the update by itself.
        """
        shared = micros and micros[-1].reduced and updates_alone(optimizer)
        return self.of(called) if shared else ONE_COPY

    def agree(self, called: Iterable[nn.Module]) -> bool:
        """Return whether the ranks that train the models can act as one."""
        models = list(called)
        return len(models) == 1 and can_agree(models[0])

    def of(self, called: Iterable[nn.Module]) -> Replicas:
        """Return the copies of the models that a window has ``called``; ``ONE_COPY`` where this
        process has them alone, or cannot agree with the others about them.
        """
        models: list[Any] = list(called)
        if not self.agree(models):
            return ONE_COPY
        model = models[0]
        if id(model) not in self._known:
            group = distributed.distributed_c10d._get_default_group()
            if self._ranks is None or group is not self._group:
                # Now, while every process is there: one that is not cannot be connected to.
                self._ranks, self._group = ranks_of_run(self._name), group
                self._drifts.clear()
            self._known = {id(model): DdpReplicas(model, self._ranks, self._drift(model))}
        return self._known[id(model)]

    def _drift(self, model: nn.Module) -> Drift:
        assert self._ranks is not None
        if model not in self._drifts:
            self._num_drifts += 1  # every rank meets its models in the same order
            board = self._ranks.board(f"copies/{self._num_drifts}")
            self._drifts[model] = Drift(board, self._ranks.rank, self._ranks.size)
        return self._drifts[model]

    def compare(self, called: Iterable[nn.Module], at: StepId, session: WatchedRun | None) -> None:
        """Compare the copies of what was called, now that a backward has exchanged its gradients,
        and have the ``session`` learn how they differ.
        """
        for model in filter(reduces, called):
            found = self.of((model,)).compare(at.step)
            if found is not None and session is not None:
                session.learned(at=at, replicas=found)

    def updating(
        self,
        called: Iterable[nn.Module],
        optimizer: Optimizer | None,
        written_at: tuple[SourceLine, ...] = (),
    ) -> None:
        """Note that an update is about to be made of what was called; ``written_at``: lines of the
        script that have written to its gradients.
        """
        for model in called:
            if model in self._drifts and optimizer is not None:
                self.of((model,)).updating(optimizer, written_at)


def can_agree(model: nn.Module) -> bool:
    """Return whether the ranks that train a model can act together: every process of the run has a
    copy, and its backward leaves all with the same gradients.
    """
    if not isinstance(model, DistributedDataParallel):
        return False
    group: Any = model.process_group
    return (
        group.size() == distributed.get_world_size()
        and model.mixed_precision is None
        and not model._join_config.enable
        and not model._delay_all_reduce_params
        and not model._use_python_reducer
    )


def updates_alone(optimizer: Optimizer | None) -> bool:
    """Return whether an optimizer makes an update without the other ranks."""
    return not any(is_class_of(kind, "torch.distributed") for kind in type(optimizer).__mro__)


def reduces(model: nn.Module) -> bool:
    """Return whether a backward of a call of the model now ends with every rank's gradients."""
    return isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
