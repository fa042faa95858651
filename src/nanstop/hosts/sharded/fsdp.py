"""Models of which every process has a part of each weight, by ``fully_shard`` (FSDP2)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.decide.agreement import Ranks, on_every_rank
from nanstop.decide.apart import ByItself
from nanstop.errors import NanstopError
from nanstop.hosts.sharded.alike.terms import Terms
from nanstop.hosts.sharded.flags import ByFlags, FailureFlags
from nanstop.hosts.sharded.fsdp_parts import FsdpParts, groups_of, state_of, states_in, whole_of
from nanstop.hosts.sharded.store_ranks import StoreRanks
from nanstop.numerics.host_memory import free_bytes
from nanstop.numerics.tensors import nonfinite
from nanstop.records import ReplicaFacts, SourceLine

_log = logging.getLogger("nanstop")


class FsdpReplicas(ByFlags):
    """See ``Replicas``. ``root``: the model that the script calls.

    While a failure is looked into each rank has the whole model, and runs it without the others.
    """

    goes_back = False

    def __init__(
        self, root: nn.Module, ranks: StoreRanks, flags: FailureFlags | None, terms: Terms
    ) -> None:
        super().__init__(ranks, flags)
        self.is_whole = False
        self._terms = terms
        self._parts = FsdpParts(root)

    def by_itself(self, *, asked: bool) -> ByItself:
        if asked or not self._terms.are_alike:
            return "skip" if self._terms.are_alike else ""  # which all know of
        # Where only some leave an update out, the optimizers of the others may wait for them.
        mine = (one.sharded_param for one in self._parts.parameters)
        return "stop" if nonfinite({str(at): one.grad for at, one in enumerate(mine)}) else ""

    def parts(self) -> dict[str, Tensor]:
        return {}

    def obstacle(self) -> str:
        if any(getattr(group, "_all_reduce_hook", None) for group in self._parts.groups):
            return "gradients are exchanged by a hook of the script"
        if any(not group.all_reduce_grads for group in self._parts.groups):
            return "gradients are not exchanged among all ranks"
        return ""

    @contextmanager
    def whole(self, ranks: Ranks) -> Iterator[None]:
        with ExitStack() as stack:
            if ranks.size > 1 and not self.is_whole:
                self._gather(ranks, stack)
            yield

    def _gather(self, ranks: Ranks, stack: ExitStack) -> None:
        """Have the whole model until the ``stack`` is left, if every rank has the room for it."""
        try:
            on_every_rank(ranks, "weights", self._require_room)
            stack.enter_context(self._parts.gathered())
            stack.enter_context(self._parts.settled())
        except NanstopError as error:
            _log.warning("nanstop: the failing step is not run again (%s)", error.message)
            return
        except Exception as error:  # nanstop is never the reason a run dies
            ranks.leave(f"the ranks did not exchange their weights ({error})")
            return
        self.is_whole = True
        stack.callback(setattr, self, "is_whole", False)

    def _require_room(self) -> None:
        needed, device = self._parts.num_bytes(), self._parts.groups[0].device
        tells = getattr(torch.get_device_module(device), "mem_get_info", None)
        free = tells(device)[0] if tells is not None else free_bytes()
        if needed > free:
            raise NanstopError(
                f"the whole model does not fit on one device: {needed >> 20} MiB, {free >> 20} free"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._parts.settled():
            yield

    def begin(self) -> None:
        for one in self._parts.parameters:
            one.sharded_param.grad = None
            self._parts.clear(one)

    def average(self) -> None:
        trained = [one for one in self._parts.parameters if one.sharded_param.requires_grad]
        mine = "".join(str(int(whole_of(one).grad is not None)) for one in trained)
        answers = self.ranks.gather("gradients", mine)
        for one, *has in zip(trained, *answers, strict=True):
            if "1" in has and whole_of(one).grad is None:
                whole_of(one).grad = torch.zeros_like(whole_of(one))
        self.exchange_or_leave(self._parts.reduce)

    def compare(self, step: int, terms: str | None) -> ReplicaFacts | None:  # noqa: ARG002
        self._terms.compare(terms)
        return None  # no rank has what another has

    def updating(
        self, optimizer: Any, written_at: tuple[SourceLine, ...], *, is_late: bool
    ) -> None:
        pass


def is_shared_by_all(root: nn.Module, size: int) -> bool:
    """Return whether ``fully_shard`` has laid all that is trained of a model on all ``size`` ranks
    of a run, and a backward leaves each with its part of the mean gradient.
    """
    if state_of(root) is None:
        return False
    parts = FsdpParts(root)
    held = {id(one.sharded_param) for one in parts.parameters}
    held |= {id(getattr(one, "_unsharded_param", None)) for one in parts.parameters}
    return (
        bool(parts.parameters)
        and all(group.mesh_info.mesh.size() == size for group in parts.groups)
        and not any(getattr(one, "is_dtensor", False) for one in parts.parameters)
        and all(id(p) in held for p in root.parameters() if p.requires_grad)
    )


def reduces_parts(module: nn.Module) -> bool:
    """Return whether a backward of a call of the model now ends with the mean gradients."""
    return state_of(module) is not None and all(
        group.reduce_grads for state in states_in(module) for group in groups_of(state)
    )
