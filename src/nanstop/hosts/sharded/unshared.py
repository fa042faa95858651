"""Models that several processes train and no wrapper exchanges the gradients of: a script averages
them by itself, or weights, or each process trains its own.
"""

from __future__ import annotations

from torch import distributed
from torch.optim import Optimizer

from nanstop.decide.apart import ByItself
from nanstop.hosts.replicas import ONE_COPY, OneCopy, Replicas
from nanstop.numerics.tensors import nonfinite
from nanstop.own_code import is_class_of


class Unshared(OneCopy):
    """See ``Replicas``. What an ``optimizer`` takes here may be bad on this rank alone; its update
    waits for no other, so leaving it out holds up none.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def by_itself(self, *, asked: bool) -> ByItself:  # noqa: ARG002
        groups = self._optimizer.param_groups
        gradients = (p.grad for group in groups for p in group["params"])
        return "own" if nonfinite({str(n): grad for n, grad in enumerate(gradients)}) else ""


def unshared(optimizer: Optimizer | None) -> Replicas:
    """Return what the other processes that train have of a window that no wrapper exchanges the
    gradients of.
    """
    if optimizer is None or distributed.get_world_size() == 1:
        return ONE_COPY
    return Unshared(optimizer) if _is_torchs(type(optimizer)) else ONE_COPY


def _is_torchs(kind: type) -> bool:
    """Return whether an optimizer's update is torch's own: that of a script may exchange what it
    has computed.
    """
    return all(is_class_of(one, "torch.optim") for one in kind.__mro__[:-1])
