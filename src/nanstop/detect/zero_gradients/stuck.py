"""Weights of zeros that keep each other's gradients at 0."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.other_weights import moved

if TYPE_CHECKING:
    from nanstop.replay.step import Step

_NEAR, _NEAR_IN_HALF = 5e-5, 5e-3
"""By how much of their tensor's size weights of zeros are moved that are to stay next to 0, and
where float16 would lose what comes of that.
"""


def stuck(step: Step, among: Sequence[Tensor] | None = None) -> tuple[str, ...]:
    """Return the trained tensors that hold nothing but zeros, if a gradient arrives at what their
    modules compute, every parameter's is exactly 0 all the same (of those ``among`` which they are
    looked for), and theirs is not once these zeros are moved by next to nothing.

    So it is where two factors are both 0: the gradient of each is a multiple of the other, however
    small that is. A loss that is at its least sends no gradient to any output; units that are never
    above 0 stay so. Undone bitwise. Synchronises the device.
    """
    own = None if among is None else set(map(id, among))
    named = step.view.root.named_parameters()
    trained = {n: p for n, p in named if p.requires_grad and (own is None or id(p) in own)}
    zeros = {name: p for name, p in trained.items() if not bool(p.any())}
    if len(zeros) < 2:
        return ()
    inside = {name: _around(name) for name in zeros}
    arrived: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks, step.isolated(), torch.enable_grad():
        for owner in {one for around in inside.values() for one in around}:
            module, sizes = step.view.root.get_submodule(owner), arrived.setdefault(owner, [])
            hooks.callback(module.register_forward_hook(_Arrivals(sizes)).remove)
        step.run(0)
        if any(p.grad is not None and bool(p.grad.any()) for p in trained.values()):
            return ()
    narrow = any(p.dtype == torch.float16 for p in zeros.values())
    near = _NEAR_IN_HALF if narrow else _NEAR
    with step.isolated(), moved([*zeros.values()], near), torch.enable_grad():
        step.run(0)
        found = tuple(n for n, p in zeros.items() if p.grad is not None and bool(p.grad.any()))
    nearest = [next((arrived[one] for one in inside[name] if arrived[one]), []) for name in found]
    is_reached = any(float(size) > 0.0 for sizes in nearest for size in sizes)
    return found if is_reached and len(found) > 1 else ()


def _around(name: str) -> tuple[str, ...]:
    """Return the modules that a parameter lies in, the innermost first."""
    parts = name.split(".")[:-1]
    return tuple(".".join(parts[:size]) for size in range(len(parts), -1, -1))


class _Arrivals:
    """A hook that keeps the size of each gradient which arrives at what a module computes."""

    def __init__(self, sizes: list[Tensor]) -> None:
        self._sizes = sizes

    def __call__(self, _module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad and output.dim():
            output.register_hook(lambda one: self._sizes.append(one.detach().abs().amax()))
