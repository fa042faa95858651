"""What an objective reads: logits, log-probabilities, or something that only looks like them.

A cross entropy of probabilities is finite, falls a little and teaches little. That rows sum to 1 is
seen in the numbers; that they do so whatever the weights are, by an experiment: the micro-batch run
again, undone, with other weights. How a softmax was spelled, and where, plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from nanstop.detect.objective.labels import LIKELIHOODS
from nanstop.detect.standstill import moved
from nanstop.localize.provenance import KEEPS
from nanstop.localize.slicing import writers
from nanstop.records import ObjectiveRow, RatioRow, op_kind, op_name
from nanstop.tracing.op_patches import Look, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops, look_again, record

if TYPE_CHECKING:
    from nanstop.replay.step import Step
    from nanstop.tracing.recorder import Op, Trace, Value

Given = Literal["probabilities", "between_0_and_1", "scores", "one_class"]

MOST_ROWS = 64
"""Rows of an operand that are read: all of them are to be alike."""
TOLERANCE = 1e-2
"""Of a sum of probabilities: those of bfloat16 sum to 1 within it."""
MOST_TRIED = 4
LARGE_RATIO = 1e6
"""Of the probabilities that two models give to one token: 14 nats apart. Clipping is at 1.2."""
FAR, NEAR = 10.0, 1.0
"""Sizes by which weights are moved: nothing stays between 0 and 1 by accident."""
_NORMALISE = frozenset({"_log_softmax", "log_softmax", "logsumexp"})
_ALIGNMENTS = frozenset({"_ctc_loss", "_cudnn_ctc_loss"})
_BINARY = "binary_cross_entropy_with_logits"
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "linear"})
_PASSES = KEEPS | {"add", "sub", "mul", "div"}


def objective_rows(step: Step, micro: int = 0, *looks: Look) -> tuple[ObjectiveRow, ...]:
    """Return what the objective of a micro-batch reads that is not what it expects.

    ``looks``: others that see the same run. Undone bitwise; raises what the step raises. Costs one
    run and, where something is odd, three. Synchronises the device at operations that end an
    objective.
    """
    first = _Operands()
    _, error = look_again(step, micro, first, *looks)
    if error is not None:
        raise error
    if not first.odd:
        return ()
    again = _with_other_weights(step, micro, FAR, set(first.odd))
    if again.overflowed:  # a softmax that is spelled out leaves its format before torch's does
        nearer = _with_other_weights(step, micro, NEAR, again.overflowed)
        again.odd |= {n: given for n, given in nearer.odd.items() if n in again.overflowed}
    lasting: dict[int, Given] = {
        index: given for index, given in first.odd.items() if again.odd.get(index) == given
    }
    if not lasting:
        return ()
    trace = record(step, micro).whole_trace()
    rows = [_row(trace, trace.ops[index], given) for index, given in lasting.items()]
    return tuple(dict.fromkeys(row for row in rows if row is not None))


def _with_other_weights(step: Step, micro: int, share: float, asked: Set[int]) -> _Operands:
    trained = [p for p in step.view.root.parameters() if p.requires_grad]
    look = _Operands(asked)
    # The script's own code may refuse what such weights compute: then nothing is established.
    with suppress(Exception), step.isolated(), moved(trained, share), SecondRun(look):
        step.run(micro)
    return look


class _Operands:
    """Called with each op; keeps of those that end an objective what was odd about their operand,
    by index. ``overflowed``: those of ``asked`` whose operand was not finite.
    """

    def __init__(self, asked: Set[int] = frozenset()) -> None:
        self.odd: dict[int, Given] = {}
        self.overflowed: set[int] = set()
        self._asked = asked

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        base = op_name(str(func))
        read = _reader(base)
        if read is not None and isinstance(args[0], Tensor) and args[0].is_floating_point():
            with torch.no_grad():
                found = read(args)
                if index in self._asked and not bool(args[0].isfinite().all()):
                    self.overflowed.add(index)
            if found is not None:
                self.odd[index] = found
        return None


def _reader(base: str) -> Callable[[Any], Given | None] | None:
    """Return what reads the operand of an op, None for ops that end no objective."""
    if base in _NORMALISE:
        return lambda args: _normalised(args[0], _dim(args[1]))
    if base == "exp":  # of probabilities: a softmax of them that is spelled out
        return lambda args: _exponents(args[0])
    if base in LIKELIHOODS:
        return lambda args: _likelihood(args[0], 1 if args[0].dim() > 1 else 0)
    if base in _ALIGNMENTS:
        return lambda args: _likelihood(args[0], -1)
    return (lambda args: _between(args[0])) if base == _BINARY else None


def _dim(given: Any) -> int | None:
    dims = list(given) if isinstance(given, (list, tuple)) else [given]
    return int(dims[0]) if len(dims) == 1 else None


def _rows(values: Tensor, dim: int) -> Tensor:
    """Return some rows of an operand, its classes last, in float32."""
    rows = values.detach().movedim(dim, -1).reshape(-1, values.shape[dim])
    each = max(1, len(rows) // MOST_ROWS)
    return rows[::each][:MOST_ROWS].float()


def _normalised(values: Tensor, dim: int | None) -> Given | None:
    """Return what is odd about logits."""
    if dim is None or values.dim() == 0 or not values.numel() or not values.requires_grad:
        return None
    if values.shape[dim] == 1:
        return "one_class" if values.dim() > 1 else None
    return "probabilities" if _are_probabilities(_rows(values, dim)) else None


def _exponents(values: Tensor) -> Given | None:
    """Return what is odd about the exponents of a softmax. Probabilities of one class are 1."""
    if values.dim() < 2 or values.shape[-1] < 2 or not values.requires_grad:
        return None
    rows = _rows(values, -1)
    return "probabilities" if len(rows) > 1 and _are_probabilities(rows) else None


def _likelihood(values: Tensor, dim: int) -> Given | None:
    """Return what is odd about log-probabilities. Their log-sum is 0, and none is above 0."""
    if not values.numel() or values.shape[dim] < 2 or not values.requires_grad:
        return None
    rows = _rows(values, dim)
    if _are_probabilities(rows):
        return "probabilities"
    return "scores" if bool((rows.amax(-1) > TOLERANCE).any()) else None


def _between(values: Tensor) -> Given | None:
    if not values.numel() or not values.requires_grad:
        return None
    read = values.detach().flatten()[: MOST_ROWS * MOST_ROWS]
    inside = bool(((read >= 0.0) & (read <= 1.0)).all())
    return "between_0_and_1" if inside and bool((read > 0.0).any()) else None


def _are_probabilities(rows: Tensor) -> bool:
    sums = (rows.sum(-1) - 1.0).abs()
    return bool((rows >= 0.0).all()) and bool((sums <= TOLERANCE).all())


def _row(trace: Trace, op: Op, given: Given) -> ObjectiveRow | None:
    """Return an odd operand as a record; None where scores may be meant as they are."""
    value = op.inputs[0] if op.inputs else None
    if value is None or op.phase not in ("forward", "loss"):
        return None
    maker = _maker(trace, value)
    # What a logarithm went into (a weighted log-probability, a density) may be above 0.
    if given == "scores" and (maker is None or _base(maker) not in _PRODUCTS):
        return None
    place = op if maker is None or given in ("one_class", "scores") else maker
    line = line_text(place.line)
    classes = 1 if _base(op) in LIKELIHOODS and len(value.shape) > 1 else -1
    return ObjectiveRow(
        op=op.name, module=place.module, given=given, width=value.shape[classes], line=line
    )


def _maker(trace: Trace, value: Value) -> Op | None:
    """Return the op that made a value, those left out that only hand on, shift or weigh it."""
    seen: set[int] = set()
    while True:
        newest = next(iter(writers(trace, value)), None)
        if newest is None or newest in seen:
            return None
        op = trace.ops[newest]
        seen.add(op.index)
        base = _base(op)
        if base not in _PASSES or not op.inputs or _divides_by_its_sum(op):
            return op
        value = max(op.inputs, key=lambda one: math.prod(one.shape))


def _divides_by_its_sum(op: Op) -> bool:
    return _base(op) == "div" and len(op.inputs) == 2 and op.inputs[1].shape[-1:] == (1,)


def _base(op: Op) -> str:
    return op_kind(op.name)


class Ratios:
    """Called with each op; keeps the largest exponential of a difference of log-probabilities, by
    the op's index.

    Two tensors without a number above 0 are such where a gradient comes to one alone: a policy, and
    what it is compared with. Synchronises the device at differences and their exponentials.
    """

    def __init__(self) -> None:
        self.largest: dict[int, float] = {}
        self._differences: set[tuple[int, torch.Size]] = set()

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        base = op_name(str(func))
        if base not in ("sub", "exp") or torch._C._current_graph_task_id() != -1:
            return None

        def done(result: Any) -> None:
            if base == "sub":
                if _are_of_two(*args[:2]):
                    self._differences.add(_place(result))
            elif _place(args[0]) in self._differences:
                self.largest[index] = float(result.detach().amax())

        return done


def _are_of_two(first: Any, second: Any) -> bool:
    """Return whether two operands are log-probabilities of two models."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    if first.shape != second.shape or first.numel() < 2 or not first.is_floating_point():
        return False
    if first.requires_grad == second.requires_grad:
        return False
    both = torch.stack([first.detach().float().flatten(), second.detach().float().flatten()])
    return bool((both <= TOLERANCE).all()) and bool((both < 0.0).any(1).all())


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def ratio_rows(step: Step, ratios: Ratios) -> tuple[RatioRow, ...]:
    """Return the ratios of single tokens that are beyond reason and that the loss is made of: a
    mask may leave them out. Undone bitwise; runs the first micro-batch again where there is one.
    """
    large = [index for index, value in ratios.largest.items() if value >= LARGE_RATIO]
    plain = first_loss(step, _Doubled(-1)) if large else 0.0
    used = [n for n in large[:MOST_TRIED] if first_loss(step, _Doubled(n)) != plain]
    found = {index: ratios.largest[index] for index in used}
    if not found:
        return ()
    ops = first_ops(step)
    return tuple(
        RatioRow(
            op=ops[index].name,
            module=ops[index].module,
            largest=value,
            line=line_text(ops[index].line),
        )
        for index, value in found.items()
    )


class _Doubled(SecondRun):
    """Has one op give twice what it gives beyond ``LARGE_RATIO``."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if index != self._index:
            return result
        return torch.where(result >= LARGE_RATIO, 2.0 * result, result)
