"""A forward and backward of a script that were run once, run again for nanstop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn

from nanstop.hosts import state_diff
from nanstop.replay.borrowed import Borrowed


@contextmanager
def run_again(
    root: nn.Module,
    leaves: Iterable[Tensor],
    *,
    compiled: bool,
    own: Iterable[Tensor] = (),
) -> Iterator[None]:
    """Undo on exit what a run does beside gradients of ``leaves`` and buffers.

    The script's own run has done it once.

    Attributes of modules, tensors that it writes but did not make, gradients of others, private
    generators; not the tensors ``own``, which the host keeps. Compiled code is not looked into.
    """
    modules = list(root.modules())
    buffers = [b for m in modules for b in m._buffers.values() if b is not None]
    with (
        state_diff.kept(modules, but=("_buffers", "training")),
        nullcontext() if compiled else Borrowed((*buffers, *own), leaves),
    ):
        yield
