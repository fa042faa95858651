"""Faults of a device and of an exchange that come once, where a marked row of the data is met."""

import itertools
from functools import partial

import torch
import torch.distributed as dist


class SpoiledKernel:
    """This process's own float32 kernel of a linear layer is wrong in one element, ``left`` times,
    which no Python mode sees: it stands for a device that computes wrongly.
    """

    def __init__(self, factor, left):
        self.factor, self.left = factor, left
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("addmm", self._addmm, "CPU")

    def _addmm(self, bias, x, weight, *, beta=1, alpha=1):
        result = x.mm(weight) * alpha + bias * beta
        if self.left > 0 and x.dtype is torch.float32:
            self.left -= 1
            result.view(-1)[1] *= self.factor
        return result


class SpoiledExchange:
    """What this process brings to the next exchange of gradients is bad in one element, though
    every gradient is finite: it stands for a link, or for a buffer that is written too late.

    ``is_received``: this process alone receives the bad element instead.
    """

    def __init__(self, *, is_received=False):
        self._is_received, self._left, self._library = is_received, 0, None

    def begin(self):
        self._left, self._library = 1, torch.library.Library("c10d", "IMPL")
        self._library.impl("allreduce_", self._allreduce, "CPU")
        self._library.impl("reduce_", self._reduce, "CPU")
        self._library.impl("_reduce_scatter_base_", self._scatter, "CPU")

    def end(self):
        """Leave every other exchange alone: those below are of sums."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _allreduce(self, tensors, group, *_rest):
        work = self._sent(tensors[0], lambda: inside(group).allreduce(tensors))
        return tensors, work.boxed()

    def _reduce(self, tensors, group, _op, root, *_rest):
        options = dist.ReduceOptions()
        options.rootRank = root
        return self._sent(tensors[0], lambda: inside(group).reduce(tensors, options)).boxed()

    def _scatter(self, out, given, group, *_rest):
        options = dist.ReduceScatterOptions()
        return out, self._sent(
            given, lambda: inside(group)._reduce_scatter_base(out, given, options)
        ).boxed()

    def _sent(self, tensor, send):
        is_meant = self._left > 0 and tensor.numel() > 1 and tensor.is_floating_point()
        self._left -= is_meant
        if is_meant and not self._is_received:
            tensor.view(-1)[1] = float("nan")
        work = send()
        if is_meant and self._is_received:
            work.wait()
            tensor.view(-1)[1] = float("nan")
        return work


def inside(group):
    return dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu"))


def when_met(row, begin, after=lambda: None):
    """Return what calls ``begin`` when a row is met for the first time, and ``after`` in any other
    call.
    """
    met = (number for number in itertools.count())  # which nobody can put back

    def hook(x):
        is_met = x.dim() == 2 and bool((x.detach() == row.to(x.dtype)).all(-1).any())
        if is_met and next(met) == 0:
            begin()
        else:
            after()

    return hook


def planted(fault, row, *, here):
    """Return what a model does with its input: the ``fault`` comes with that row, if it is to come
    ``here``. All processes compute the same.
    """
    begin = after = lambda: None
    if fault == "once" and here:
        kernel = SpoiledKernel(float("nan"), 0)
        begin = partial(setattr, kernel, "left", 1)
    elif fault in ("exchange", "received") and here:
        exchange = SpoiledExchange(is_received=fault == "received")
        begin, after = exchange.begin, exchange.end
    elif fault not in ("once", "exchange", "received"):
        return lambda x: None
    return when_met(row, begin, after)
