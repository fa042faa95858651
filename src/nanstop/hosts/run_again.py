"""A forward and backward of a script that were run once, run again for nanstop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from nanstop.hosts.fabric import without_fabrics_hooks
from nanstop.hosts.put_into_libraries import put_into_libraries
from nanstop.replay import state_diff
from nanstop.replay.borrowed import Borrowed
from nanstop.replay.conditions import frames_ended, unspoken
from nanstop.replay.script_objects import script_objects_kept


@contextmanager
def run_again(
    root: nn.Module,
    leaves: Iterable[Tensor],
    *,
    compiled: bool,
    own: Iterable[Tensor] = (),
    host: Any = None,
) -> Iterator[None]:
    """Undo on exit what a run does beside gradients of ``leaves`` and buffers; what it prints and
    logs is dropped.

    The script's own run has done it once.

    Attributes of modules and parameters, what the script's own objects count and hold, those that
    the methods of ``host`` come to among them, tensors that it writes but did not make, gradients
    of others, private generators; not the tensors ``own``, which the host keeps. Compiled code is
    not looked into.
    """
    modules, leaves = list(root.modules()), list(leaves)
    holders = {id(one): one for one in (*modules, *root.parameters(), *leaves)}.values()
    roots = modules if host is None else [*modules, host]
    buffers = [b for m in modules for b in m._buffers.values() if b is not None]
    with (
        unspoken(),
        script_objects_kept(roots, put_into_libraries(modules)),
        state_diff.kept(map(vars, holders), but=("_buffers", "training")),
        nullcontext() if compiled else Borrowed((*buffers, *own), leaves),
        frames_ended(),
        without_fabrics_hooks(),
    ):
        yield
