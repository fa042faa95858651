"""The models of one host that several processes train together: as copies, or each a part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nanstop.hosts.replicas import ONE_COPY, Replicas
from nanstop.hosts.sharded.alike.drift import Drift
from nanstop.hosts.sharded.alike.past_wrapper import PastWrapper
from nanstop.hosts.sharded.alike.same_batches import SameBatches
from nanstop.hosts.sharded.alike.terms import Terms
from nanstop.hosts.sharded.board import Board
from nanstop.hosts.sharded.ddp import DdpReplicas, is_copied_to_all
from nanstop.hosts.sharded.engine import Engine, EngineReplicas, is_engine
from nanstop.hosts.sharded.flags import FailureFlags
from nanstop.hosts.sharded.fsdp import FsdpReplicas, is_shared_by_all, reduces_parts
from nanstop.hosts.sharded.fsdp_parts import state_of
from nanstop.hosts.sharded.store_ranks import StoreRanks, ranks_of_run
from nanstop.hosts.sharded.uneven import Uneven
from nanstop.hosts.sharded.unshared import unshared
from nanstop.own_code import is_class_of
from nanstop.records import SourceLine, StepId
from nanstop.replay.step import Batch
from nanstop.session.watched_run import WatchedRun


class _Micro(Protocol):
    @property
    def reduced(self) -> bool: ...


class SharedModels:
    """The models of one host (``name``) that several processes train together."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ranks: StoreRanks | None = None
        self._group: Any = None
        self._known: dict[int, Replicas] = {}
        self._drifts: WeakKeyDictionary[nn.Module, Drift] = WeakKeyDictionary()
        self._batches: WeakKeyDictionary[nn.Module, SameBatches] = WeakKeyDictionary()
        self._past: WeakKeyDictionary[nn.Module, PastWrapper] = WeakKeyDictionary()
        self._num_boards: Counter[str] = Counter()
        self._alone: dict[type, bool] = {}
        """Whether optimizers of a class make their updates without the other ranks."""
        self._flags: FailureFlags | None = None

    def of_window(
        self,
        micros: Sequence[_Micro],
        called: Iterable[nn.Module],
        optimizer: Optimizer | None,
    ) -> Replicas:
        """Return the copies of the models that a window has ``called``, as ``of`` does, if its last
        backward left every rank with the same gradients, of which each makes the update by itself.
        """
        models = list(called)
        shared = micros and micros[-1].reduced and self._updates_alone(optimizer)
        # Every backward of an engine exchanges something, but where it is told not to.
        if any(map(is_engine, models)):
            return self.of(models)
        found = self.of(models) if shared else ONE_COPY
        is_alone = found is ONE_COPY and distributed.is_available() and distributed.is_initialized()
        return unshared(optimizer) if is_alone else found

    def agree(self, called: Iterable[nn.Module]) -> bool:
        """Return whether the ranks that train the models can act as one."""
        models = list(called)
        return len(models) == 1 and can_agree(models[0])

    def of(self, called: Iterable[nn.Module]) -> Replicas:
        """Return the copies of the models that a window has ``called``; ``ONE_COPY`` where this
        process has them alone, or cannot agree with the others about them.
        """
        models: list[Any] = list(called)
        known = self._known.get(id(models[0])) if len(models) == 1 else None
        if known is not None and _group_of_run() is self._group:
            return known  # how its weights are laid out does not change
        if not self.agree(models):
            return ONE_COPY
        self._known = {id(models[0]): self._replicas(models[0])}
        return self._known[id(models[0])]

    def _updates_alone(self, optimizer: Optimizer | None) -> bool:
        kind = type(optimizer)
        if kind not in self._alone:
            self._alone[kind] = updates_alone(optimizer)
        return self._alone[kind]

    def _replicas(self, model: Any) -> Replicas:
        ranks = self._met()
        if isinstance(model, DistributedDataParallel):
            return DdpReplicas(
                model, ranks, self._drift(model), self._terms(), Uneven(self._away())
            )
        self._flags = self._flags or ranks.flags()
        if is_engine(model):
            return EngineReplicas(model, ranks, self._flags, self._terms())
        return FsdpReplicas(model, ranks, self._flags, self._terms())

    def _met(self) -> StoreRanks:
        group = _group_of_run()
        if self._ranks is not None and group is not self._group:
            self._ranks = None
            for known in (self._drifts, self._batches, self._past):
                known.clear()
        if self._ranks is None:
            # Now, while every process is there: one that is not cannot be connected to.
            self._ranks, self._group, self._flags = ranks_of_run(self._name), group, None
        return self._ranks

    def _away(self) -> Board | None:
        return self._ranks.board("uneven") if self._ranks is not None else None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Have the other ranks know inside that this one comes to no question."""
        with Uneven(self._away()).away():
            yield

    def _terms(self) -> Terms:
        return Terms(self._board("terms"), self._met().size)

    def _drift(self, model: nn.Module) -> Drift:
        if model not in self._drifts:
            ranks = self._met()
            self._drifts[model] = Drift(self._board("copies"), ranks.rank, ranks.size)
        return self._drifts[model]

    def _board(self, kind: str) -> Board | None:
        self._num_boards[kind] += 1  # every rank meets its models in the same order
        return self._met().board(f"{kind}/{self._num_boards[kind]}")

    def _same_batches(self, model: nn.Module) -> SameBatches:
        if model not in self._batches:
            self._batches[model] = SameBatches(self._board("batches"), self._met().size)
        return self._batches[model]

    def compare(
        self, called: Iterable[nn.Module], at: StepId, session: WatchedRun | None, batch: Batch
    ) -> None:
        """Compare the copies of what was called, and the ``batch`` that it was given, now that a
        backward has exchanged its gradients, and have the ``session`` learn what is odd.
        """
        for model in filter(reduces, called):
            replicas = self.of((model,))
            if replicas is ONE_COPY:
                continue
            found = replicas.compare(at.step, session.terms if session is not None else None)
            same = self._same_batches(model).compare(batch)
            if found is not None and session is not None:
                session.learned(at=at, replicas=found)
            if same and session is not None and self._met().rank == 0:
                session.learned(at=at, ranks_given_same=self._met().size)

    def leave(self, reason: str) -> None:
        """Take no part any more in what ranks decide together; the others learn why."""
        if self._ranks is not None:
            self._ranks.leave(f"rank {self._ranks.rank} is not watched any more ({reason})")
        if self._flags is not None:
            self._flags.close()

    def updating(
        self,
        called: Iterable[nn.Module],
        optimizer: Optimizer | None,
        micros: Sequence[_Micro],
        written_at: tuple[SourceLine, ...] = (),
    ) -> None:
        """Note that an update is about to be made of what was called in ``micros``; ``written_at``:
        lines of the script that have written to its gradients.
        """
        for model in called:
            if model in self._drifts and optimizer is not None:
                self.of((model,)).updating(optimizer, written_at, is_late=is_late(micros))

    def updating_past_wrapper(
        self,
        called: Iterable[nn.Module],
        at: StepId,
        session: WatchedRun | None,
        made_at: tuple[SourceLine, ...],
    ) -> None:
        """Compare the copies of what was called without a wrapper that exchanges gradients, before
        an update, and have the ``session`` learn how they differ. ``made_at``: the line that makes
        the loss.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        for model in called:
            if model not in self._past:
                self._past[model] = PastWrapper(model, lambda: self._board("past"))
            found = self._past[model].updating(at.step, made_at)
            if found is not None and session is not None:
                session.learned(at=at, replicas=found)


class Exchangers:
    """What exchanges the gradients of modules that a script calls: often they are wrapped in others
    (Fabric's) that have no weights of their own.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()

    def of(self, module: nn.Module) -> nn.Module:
        """Return the part of a module that exchanges all its gradients; itself where none does."""
        is_one = isinstance(module, DistributedDataParallel)
        if is_one or not (distributed.is_available() and distributed.is_initialized()):
            return module
        if module not in self._known:
            self._known[module] = _exchanger_in(module)
        return self._known[module]


def _exchanger_in(module: nn.Module) -> nn.Module:
    if state_of(module) is not None or is_engine(module):
        return module
    for part in module.modules():
        if "_orig_mod" in part._modules:
            return module  # compiled code holds on to what it was made of
        if isinstance(part, DistributedDataParallel) or state_of(part) is not None:
            inside = set(map(id, part.parameters()))
            has_all = all(id(p) in inside for p in module.parameters() if p.requires_grad)
            return part if has_all else module
    return module


def is_late(micros: Sequence[_Micro]) -> bool:
    """Return whether the last backward of a window exchanged nothing, and one before it did."""
    return any(micro.reduced for micro in micros) and not micros[-1].reduced


def can_agree(model: nn.Module) -> bool:
    """Return whether the ranks that train a model can act together: every process of the run has a
    copy, or a part of all that is trained, and its backward leaves all with the mean gradients.
    """
    if isinstance(model, DistributedDataParallel):
        return is_copied_to_all(model)
    if is_engine(model):
        return distributed.is_initialized() and Engine(model).trains_with_all
    return distributed.is_initialized() and is_shared_by_all(model, distributed.get_world_size())


def updates_alone(optimizer: Optimizer | None) -> bool:
    """Return whether an optimizer makes an update without the other ranks."""
    return not any(is_class_of(kind, "torch.distributed") for kind in type(optimizer).__mro__)


def reduces(model: nn.Module) -> bool:
    """Return whether a backward of a call of the model now ends with every rank's gradients."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    if isinstance(model, DistributedDataParallel):
        return model.require_backward_grad_sync
    if is_engine(model):
        return Engine(model).exchanges()
    return reduces_parts(model)


def _group_of_run() -> Any:
    return distributed.GroupMember.WORLD
