"""Whether an infinity that turned finite again has changed anything: an experiment.

``exp(-Inf)`` is 0, as is the exponential of every number beyond the end of a format: a mask of -1e9
in float16 loses nothing by being -Inf. ``1 / Inf`` is 0, and the right number is not. What is
beyond the end of a format lies between large finite numbers of it and infinity. So the step is run
again with large finite numbers, each another, where infinities stood: where loss and gradients stay
what they were to the bit, they are what the right numbers would give.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanstop.localize import slicing
from nanstop.localize.slicing import range_of
from nanstop.numerics.tensors import is_measurable, ramp
from nanstop.records import Phase
from nanstop.replay.step import Step
from nanstop.tracing.operators import outputs_of
from nanstop.tracing.record_step import outcome
from nanstop.tracing.recorder import Trace

_MOST_TRIED = 6
"""Births that are tried one by one, where all of them together changed something."""
_PHASES: tuple[Phase, ...] = ("forward", "loss")


def those_that_matter(
    step: Step, micro: int, trace: Trace, births: Sequence[int]
) -> tuple[int, ...]:
    """Return of the ops that bore infinities, by their indices, those whose infinities change loss
    or gradients; all of them where that cannot be told.

    One undone run, and where something changes one more for each of the first few. Synchronises the
    device.
    """
    carriers = _carriers(trace, births)
    plain = outcome(step, micro)
    if plain is None:
        return tuple(births)

    def changes(chosen: Iterable[int]) -> bool:
        bounded = _Bounded({op: str(trace.ops[op].name) for one in chosen for op in carriers[one]})
        return outcome(step, micro, bounded) != plain or bounded.missed

    if not changes(births):
        return ()
    idle = [one for one in births[:_MOST_TRIED] if not changes((one,))]
    return tuple(one for one in births if one not in idle) or tuple(births)


def _carriers(trace: Trace, births: Collection[int]) -> Mapping[int, frozenset[int]]:
    """Return of each birth the ops that hand its infinities on, itself among them, and those that
    do so again where a checkpoint computes them anew.
    """
    found: dict[int, set[int]] = {birth: {birth} for birth in births}
    places: dict[Hashable, set[int]] = {}
    for op in trace.ops[min(births) :]:
        bad = [o for o in op.outputs if range_of(trace, o).has_inf]
        place = (op.name, op.module, op.line)
        if not bad or op.phase not in (*_PHASES, "recompute"):
            continue
        again = places.get(place, ()) if op.phase == "recompute" else ()
        for birth in again or slicing.trace_back(trace, bad).inf:
            if birth in found:
                found[birth].add(op.index)
                places.setdefault(place, set()).add(birth)
    return {birth: frozenset(ops) for birth, ops in found.items()}


class _Bounded:
    """Puts large finite numbers in the place of the infinities that chosen ops return."""

    def __init__(self, ops: Mapping[int, str]) -> None:
        self.missed = False
        self._ops = ops

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        name = self._ops.get(index)
        if name is None:
            return None
        if name != str(func):
            self.missed = True
            return None

        def done(result: Any) -> None:
            try:
                for output in outputs_of(func, args, kwargs, result):
                    _bound(output)
            except RuntimeError:  # memory that cannot be written to
                self.missed = True

        return done


@torch.no_grad()
def _bound(output: Tensor) -> None:
    """Write numbers between a half of the largest and the largest, in place: each another, for what
    compares them.
    """
    if not is_measurable(output) or not output.is_floating_point():
        return
    infinite = output.isinf()
    if bool(infinite.any()):
        largest = torch.finfo(output.dtype).max
        wide = torch.promote_types(output.dtype, torch.float32)
        size = (largest * (0.5 + 0.49 * ramp(output).to(wide))).to(output.dtype)
        output.copy_(torch.where(infinite, size.copysign(output), output))
