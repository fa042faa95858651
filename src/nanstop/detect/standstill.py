"""Whether gradients that are exactly 0, update after update, would be so whatever the weights are.

A loss that is at its least has none either, and gets one with the next batch that is not fitted: a
value network of zeros before the first reward. Advantages that are all 0, or a mask that is, take
the gradient away at every point. One experiment tells them apart: a micro-batch run again, undone,
with other weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import floats
from nanstop.replay.undo import attributes_kept

if TYPE_CHECKING:
    from nanstop.records import GradientPath, RunFacts
    from nanstop.replay.step import Step

ELSEWHERE = "grad_elsewhere"
"""The series that holds what was found: the largest gradient with other weights."""
GONE_FOR = 16
"""Updates without a gradient after which it is asked whether any can arrive, where some did: a
script may leave its loss out for a few.
"""
_MOST_ENTRIES = 4
MOST_MOVED = 1 << 24
"""Weights that are moved, the last ones first: those of the head are enough."""
_SHARE, _LEAST = 0.1, 0.02
"""By how much of their tensor's size they are moved, and by how much at least."""
_NEAR, _NEAR_IN_HALF = 5e-5, 5e-3
"""The same share for weights of zeros that are to stay next to 0, and where float16 would lose what
comes of that.
"""


class Standstill:
    """Counts updates without any gradient.
    The experiment is made after 4 in a row, after 16, 64, and so on.
    """

    def __init__(self) -> None:
        self.num_zero = 0
        """Updates in a row."""

    def note(self, norm: object) -> None:
        """Note the norm of a healthy window's gradients; None where it is not known."""
        self.num_zero = self.num_zero + 1 if norm == 0.0 else 0

    def due(self, facts: RunFacts) -> bool:
        """Return whether this window should be run again with other weights."""
        number = self.num_zero
        power_of_4 = number & (number - 1) == 0 and number.bit_length() % 2 == 1
        return number >= 4 and power_of_4 and facts.world_size == 1 and facts.veto == "yes"

    def take(self, step: Step) -> float:
        """Return the largest gradient of a micro-batch with other weights;
        NaN where none was moved.

        Undone bitwise: the weights' own storages are put back.
        Raises what the step raises. Synchronises the device.
        """
        trained = [p for p in step.view.root.parameters() if p.requires_grad]
        with step.isolated(), moved(trained) as num_moved, torch.enable_grad():
            step.run(0)
            found = [part for p in trained if p.grad is not None for part in floats(p.grad)]
            sizes = [max(-float(low), float(high)) for low, high in map(torch.aminmax, found)]
        return max(sizes, default=0.0) if num_moved else float("nan")


def none_arrives(
    step: Step, path: GradientPath, elsewhere: float, num_zero: int
) -> GradientPath | None:
    """Return with ``path`` why every gradient is 0, None where that is not known.
    ``elsewhere``: the largest one with other weights; ``num_zero``: updates in a row without any.

    Undone bitwise; raises what the step raises. Synchronises the device.
    """
    if elsewhere > 0.0:
        zeros = stuck(step)
        return replace(path, stuck=zeros) if zeros else None
    if step.calls_script or elsewhere != 0.0:
        return None
    from nanstop.detect.objective.flat_steps import passed_by
    from nanstop.detect.objective.times_zero import times_zero

    zeroed_at = times_zero(step)
    if zeroed_at is not None:
        return replace(path, zeroed_at=zeroed_at)
    trained = {n: p for n, p in step.view.root.named_parameters() if p.requires_grad}
    found = passed_by(step, tuple(trained.values()))
    if found is None:
        gone = _gone(step, path, num_zero) if num_zero >= GONE_FOR else None
        zeros = () if gone else _zeros(step)
        dropped = () if gone or zeros else _dropped(step)
        return replace(path, zeros=zeros, dropped=dropped) if zeros or dropped else gone
    behind = tuple(n for n, p in trained.items() if any(p is one for one in found.parameters))
    return replace(path, behind=behind, flat_at=found.line, is_own=found.is_own)


def _gone(step: Step, path: GradientPath, num_zero: int) -> GradientPath | None:
    """Return with ``path`` that a backward gives no trained tensor a gradient, not even zeros, as
    after adapters were merged; None where it gives one.
    """
    trained = {n: p for n, p in step.view.root.named_parameters() if p.requires_grad}
    with step.isolated(), torch.enable_grad():
        step.run(0)
        if any(p.grad is not None for p in trained.values()):
            return None
    missing, until = tuple(trained)[:8], step.id.step - num_zero
    return replace(
        path, num_tensors=len(trained), num_reached=0, unreached=missing, reached_until=until
    )


def _zeros(step: Step) -> tuple[str, ...]:
    """Return the entries of the first micro-batch that are all 0, if a gradient arrives with ones
    in them: masks, weights, advantages. Undone bitwise. Synchronises the device.

    Whole numbers are given as fractions: what looks something up by them refuses that, where a 1
    beyond a table of one row would end the process on a device.
    """
    batch, found = next(iter(step.batches), {}), list[str]()
    whole = {n: v for n, v in batch.items() if isinstance(v, Tensor) and v.numel()}
    for name in [name for name, values in whole.items() if not bool(values.any())][:_MOST_ENTRIES]:
        values = whole[name]
        kind = values.dtype if values.dtype.is_floating_point else torch.get_default_dtype()
        ones = torch.ones_like(values, dtype=torch.bool if values.dtype is torch.bool else kind)
        given = {**batch, name: ones}
        with suppress(Exception), step.isolated(), torch.enable_grad():
            step.run(0, given)
            trained = (p.grad for p in step.view.root.parameters() if p.requires_grad)
            if any(grad is not None and bool(grad.any()) for grad in trained):
                found.append(name)
    return tuple(found)


def _dropped(step: Step) -> tuple[str, ...]:
    """Return the dropouts that drop all they are given, if a gradient arrives once they drop half.

    Undone bitwise. Synchronises the device.
    """
    root = step.view.root
    found: dict[str, Any] = {
        n: m for n, m in root.named_modules() if getattr(m, "p", None) == 1.0 and m.training
    }
    with attributes_kept((one, "p") for one in found.values()):
        for one in found.values():
            one.p = 0.5
        if not found:
            return ()
        with step.isolated(), torch.enable_grad():
            step.run(0)
            trained = (p.grad for p in root.parameters() if p.requires_grad)
            arrives = any(grad is not None and bool(grad.any()) for grad in trained)
    return tuple(found)[:_MOST_ENTRIES] if arrives else ()


def stuck(step: Step) -> tuple[str, ...]:
    """Return the trained tensors that hold nothing but zeros, if a gradient arrives at what their
    modules compute, every parameter's is exactly 0 all the same, and theirs is not once these
    zeros are moved by next to nothing.

    So it is where two factors are both 0: the gradient of each is a multiple of the other, however
    small that is. A loss that is at its least sends no gradient to any output; units that are never
    above 0 stay so. Undone bitwise. Synchronises the device.
    """
    trained = {n: p for n, p in step.view.root.named_parameters() if p.requires_grad}
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


@contextmanager
@torch.no_grad()
def moved(parameters: Sequence[Tensor], share: float = _SHARE) -> Iterator[int]:
    """Have other weights inside, in storages of their own; yield how many.

    ``share``: by how much of their tensor's size they are moved.
    """
    num_moved = 0
    with attributes_kept((parameter, "data") for parameter in parameters):
        for parameter, noise in noises(parameters, share):
            parameter.data = parameter.data + noise
            num_moved += noise.numel()
        yield num_moved


def is_constant(step: Step) -> bool:
    """Return whether the loss of the first micro-batch is the same with other weights, and not 0 as
    that of a hinge that is content. Undone; runs it twice.
    """
    weights = [p for p in step.view.root.parameters() if p.requires_grad]
    losses: list[float] = []
    for share in (0.0, 1.0):
        with step.isolated(), moved(weights, share):
            losses.append(float(step.run(0).detach()))
    return losses[0] == losses[1] != 0.0


def noises(parameters: Sequence[Tensor], share: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights, the last ones first, each with normal noise to add to it, whose size is
    ``share`` of the root of the mean square of the weight; ``MOST_MOVED`` elements in all.
    """
    generator, left = torch.Generator().manual_seed(0), MOST_MOVED
    for parameter in reversed(parameters):
        if parameter.is_floating_point() and parameter.numel() <= left:
            left -= parameter.numel()
            data = parameter.data
            size = share * data.float().square().mean().sqrt().clamp(min=_LEAST / _SHARE)
            noise = torch.randn(data.shape, generator=generator).to(data.device)
            yield parameter, (size * noise).to(data.dtype)
