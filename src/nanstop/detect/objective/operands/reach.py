"""Whether outputs can come to the targets that they are compared with.

What ends a model in a tanh, a sigmoid or a ReLU keeps its outputs between bounds. Of targets beyond
them the loss is finite, and stays at their distance to the bound. Three experiments, each the first
micro-batch run again, undone: what is compared under weights that are far off; what it becomes
where the product behind it is far off; and how the loss answers to the targets themselves in its
place, and to what of them lies within the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.objective.operands.products import product
from nanstop.detect.other_weights import moved
from nanstop.frozen import frozen
from nanstop.localize.slicing import writers
from nanstop.records import ObjectiveRow, op_kind
from nanstop.tracing.op_patches import LookOfSome, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, record, run_under

if TYPE_CHECKING:
    from nanstop.replay.step import Step
    from nanstop.tracing.recorder import Trace, Value

LEAST_TARGETS = 8
BEYOND = 0.05
"""Of the targets, how many are to lie beyond the bounds."""
FAR = 1e3
"""By how many times their size weights are moved, and a number behind what is bounded."""
LOST = 0.1
"""Of what the loss can fall by, which is to be out of reach."""
SAME = 1e-3
"""Of the bounds' distance, or of a bound, by which what is the same may differ."""
MOST_TRIED = 4


@frozen
class _Met:
    """Outputs, the operand ``place`` of an op, and the targets beside them."""

    place: int
    low: float
    high: float
    targets: Tensor

    def num_beyond(self) -> int:
        beyond = (self.targets < self.low) | (self.targets > self.high)
        return int(beyond.sum())

    def is_short(self) -> bool:
        return self.num_beyond() >= BEYOND * self.targets.numel()


class Met(LookOfSome):
    """Keeps of the ops that take outputs from targets of their shape, by index, those whose targets
    lie beyond them.
    """

    ops = frozenset({"sub", "mse_loss", "smooth_l1_loss", "huber_loss"})

    def __init__(self) -> None:
        self.found: dict[int, _Met] = {}

    def __call__(
        self, index: int, _func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if not all(isinstance(one, Tensor) and one.shape == args[0].shape for one in args[:2]):
            return None
        outputs, targets = args[:2] if args[0].requires_grad else (args[1], args[0])
        if targets.requires_grad or not outputs.requires_grad or targets.numel() < LEAST_TARGETS:
            return None
        with torch.no_grad():
            low, high = (float(end) for end in torch.aminmax(outputs))
            met = _Met(int(outputs is args[1]), low, high, targets.detach())
            if met.is_short():
                self.found[index] = _Met(met.place, low, high, targets.detach().clone())
        return None


def unreached(step: Step, met: Met) -> tuple[ObjectiveRow, ...]:
    """Return the comparisons of the first micro-batch whose outputs are kept from their targets.

    Undone bitwise; runs the micro-batch once where targets lie beyond outputs, up to fifteen times
    for each that may be bounded. Synchronises the device.
    """
    if not met.found:
        return ()
    weights = [p for p in step.view.root.parameters() if p.requires_grad]
    for share in (FAR, -FAR):
        seen = Ends(met.found)
        with moved(weights, share):
            run_under(step, 0, seen)
        met.found = {at: one for at, one in seen.wider.items() if one.is_short()}
        if not met.found:
            return ()
    trace = record(step, 0).whole_trace()
    tried = list(met.found.items())[-MOST_TRIED:]
    rows = (_row(step, trace, at, one) for at, one in tried)
    return tuple(row for row in rows if row is not None)


def _row(step: Step, trace: Trace, index: int, met: _Met) -> ObjectiveRow | None:
    op = trace.ops[index]
    value = op.inputs[min(met.place, len(op.inputs) - 1)]
    behind, newest = product(trace, value), _maker(trace, value)
    if behind is None or newest is None or behind == newest:
        return None
    bounds = _bounds(step, index, met, behind)
    if bounds is None or not _is_distance(step, index, met, bounds):
        return None
    made, line = (line_text(one.line) for one in (trace.ops[newest], op))
    return ObjectiveRow(
        op=op.name,
        module=trace.ops[newest].module,
        given="out_of_reach",
        width=_Met(met.place, *bounds, met.targets).num_beyond(),
        line=line,
        made_at=(made,) if made and made != line else (),
    )


def _maker(trace: Trace, value: Value) -> int | None:
    """Return the op that made a value, in whatever format."""
    newest = next(iter(writers(trace, value)), None)
    while newest is not None and op_kind(trace.ops[newest].name) == "_to_copy":
        newest = next(iter(writers(trace, trace.ops[newest].inputs[0])), None)
    return newest


def _bounds(step: Step, index: int, met: _Met, behind: int) -> tuple[float, float] | None:
    """Return between what numbers outputs are kept, infinite where they are not; None where they
    are no function of the single number that a product gives, or come to others.
    """
    ends: list[float] = []
    for number in (-FAR, FAR):
        near, far = (_filled(step, index, met, behind, number * by) for by in (1.0, 2.0))
        if near is None or far is None:
            return None
        stays = abs(far - near) <= SAME * max(1.0, abs(near))
        ends.append(near if stays else math.copysign(math.inf, far))
    low, high = min(ends), max(ends)
    room = SAME * (high - low) if math.isfinite(high - low) else SAME
    is_within = low < high and low - room <= met.low and met.high <= high + room
    is_kept = math.isfinite(low) or math.isfinite(high)
    return (low, high) if is_within and is_kept else None


def _filled(step: Step, index: int, met: _Met, behind: int, number: float) -> float | None:
    """Return the one number that all outputs become where a product gives one."""
    run = Ends({index: met}, fill=(behind, number))
    run_under(step, 0, run)
    low, high = run.seen.get(index, (math.nan, math.nan))
    return low if high - low <= SAME * max(1.0, abs(low)) else None


def _is_distance(step: Step, index: int, met: _Met, bounds: tuple[float, float]) -> bool:
    """Return whether the loss is least at the targets, and what lies beyond the bounds is a part of
    what it can fall by.
    """
    aims = met.targets.double()
    away = float(aims.std()) + 1.0
    within = aims.clamp(*bounds)
    plain = first_loss(step, SecondRun())
    least, kept, above, below = (
        first_loss(step, _Given(index, met.place, numbers))
        for numbers in (aims, within, aims + away, aims - away)
    )
    return least < min(above, below) and kept - least > LOST * (plain - least) > 0.0


class Ends(SecondRun):
    """Notes between what numbers outputs are. ``fill``: the op that is to give one number.

    The run ends there: a solver that comes to no end with other weights is not waited for.
    """

    def __init__(self, met: Mapping[int, _Met], fill: tuple[int, float] = (-1, 0.0)) -> None:
        super().__init__(until=max(met))
        self.seen: dict[int, tuple[float, float]] = {}
        self.wider: dict[int, _Met] = {}
        self._met, self._fill = met, fill

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        met = self._met.get(index)
        if met is not None and args[met.place].shape == met.targets.shape:
            low, high = (float(end) for end in torch.aminmax(args[met.place].detach()))
            self.seen[index] = low, high
            if math.isfinite(low) and math.isfinite(high):
                wider = _Met(met.place, min(low, met.low), max(high, met.high), met.targets)
                self.wider[index] = wider
        result = func(*args, **kwargs)
        return result.fill_(self._fill[1]) if index == self._fill[0] else result


class _Given(SecondRun):
    """Has one op read other outputs."""

    def __init__(self, index: int, place: int, numbers: Tensor) -> None:
        super().__init__()
        self._index, self._place, self._numbers = index, place, numbers

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index == self._index:
            args = list(args)
            args[self._place] = self._numbers.to(args[self._place].dtype)
        return func(*args, **kwargs)
