"""What an objective reads: logits, log-probabilities, or something that only looks like them.

A cross entropy of probabilities is finite, falls a little and teaches little. That rows sum to 1 is
seen in the numbers; that they do so whatever the weights are, by an experiment: the micro-batch run
again, undone, with other weights. How a softmax was spelled, and where, plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Set
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nanstop.detect.objective.answers import (
    falls_without_end,
    rises_on_one_side,
    takes_logits_of_labels,
)
from nanstop.detect.objective.labels import LIKELIHOODS
from nanstop.detect.objective.operands.bounded import are_bounded
from nanstop.detect.objective.operands.look import Operands
from nanstop.detect.objective.operands.numbers import BINARY, LOG_SHARES, SCORED, SHARES, Given
from nanstop.detect.objective.operands.products import PRODUCTS, product
from nanstop.detect.other_weights import is_constant, moved
from nanstop.localize.provenance import KEEPS
from nanstop.localize.slicing import writers
from nanstop.numerics.trained import held_by
from nanstop.records import ObjectiveRow, op_kind
from nanstop.tracing.op_patches import Look, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import look_again, record

if TYPE_CHECKING:
    from nanstop.replay.step import Step
    from nanstop.tracing.recorder import Op, Trace, Value

FAR, NEAR = 10.0, 1.0
"""Sizes by which weights are moved: nothing stays between 0 and 1 by accident."""
MOVED = 0.2
"""By how much a number between 0 and 1 is to be another one with them."""
_DIVERGENCE = "aten.kl_div"
_PASSES = KEEPS | {"add", "sub", "mul", "div"}


def objective_rows(step: Step, micro: int = 0, *looks: Look) -> tuple[ObjectiveRow, ...]:
    """Return what the objective of a micro-batch reads that is not what it expects.

    ``looks``: others that see the same run. Undone bitwise; raises what the step raises. Costs one
    run and, where something is odd, three. Synchronises the device at operations that end an
    objective.
    """
    first = Operands()
    _, error = look_again(step, micro, first, *looks)
    if error is not None:
        raise error
    if not first.odd:
        return ()
    again = _with_other_weights(step, micro, FAR, set(first.odd))
    if again.overflowed:  # a softmax that is spelled out leaves its format before torch's does
        nearer = _with_other_weights(step, micro, NEAR, again.overflowed)
        again.odd |= {n: given for n, given in nearer.odd.items() if n in again.overflowed}
        again.between |= {n: seen for n, seen in nearer.between.items() if n in again.overflowed}
    lasting: dict[int, Given] = {
        index: given
        for index, given in first.odd.items()
        if again.odd.get(index) == given and _has_moved(first, again, index)
    }
    if not lasting:
        return ()
    trace = record(step, micro).whole_trace()
    rows: dict[ObjectiveRow | None, None] = {}
    for index, given in lasting.items():
        op, place = trace.ops[index], first.divergences.get(index)
        if place is not None and place < len(op.inputs):
            row = _row(trace, op, op.inputs[place], given)
            rows[row and replace(row, op=_DIVERGENCE)] = None
            continue
        value = _wrong(step, trace, op, given)
        if value is not None:
            rows[_row(trace, op, value, given)] = None
    return tuple(row for row in rows if row is not None)


def _with_other_weights(step: Step, micro: int, share: float, asked: Set[int]) -> Operands:
    trained = [p for p in step.view.root.parameters() if p.requires_grad]
    look = Operands(asked)
    # The script's own code may refuse what such weights compute: then nothing is established.
    with suppress(Exception), step.isolated(), moved(trained, share), SecondRun(look):
        step.run(micro)
    return look


def _has_moved(first: Operands, again: Operands, index: int) -> bool:
    """Return whether other weights are seen in what they are to have left between 0 and 1: it goes
    from one end to the other there, and is not only near to where it was.
    """
    one, two = first.between.get(index), again.between.get(index)
    if one is None or two is None or one.shape != two.shape:
        return True
    return float((one - two).abs().max()) >= MOVED


def _wrong(step: Step, trace: Trace, op: Op, given: Given) -> Value | None:
    """Return the operand that the loss takes for something else, None where it does not.

    What an operation of torch expects is known; a loss that is spelled by hand is told by how it
    answers to other numbers.
    """
    base = _base(op)
    if base == SHARES and not is_constant(step):  # attention to one token
        return None
    if base in SCORED:
        made_at = _of_same_weight(step, trace, op.inputs[0])
        return op.inputs[0] if made_at and falls_without_end(step, made_at) else None
    if given == "unsigned":
        return next((one for one in op.inputs if _is_signed(step, trace, one)), None)
    if given != "between_0_and_1" or base == BINARY:
        return next(iter(op.inputs), None)
    if base == LOG_SHARES:
        made_at = product(trace, op.inputs[0])
        is_meant = made_at is None or not are_bounded(step, op.index, made_at)
        return None if is_meant else op.inputs[0]
    for value in op.inputs:
        newest = next(iter(writers(trace, value)), None)
        if newest is not None and takes_logits_of_labels(step, newest):
            return value
    return None


def _is_signed(step: Step, trace: Trace, scores: Value) -> bool:
    """Return whether nothing asks for low scores: those of a weight, or products of features."""
    maker = _maker(trace, scores)
    made = _of_same_weight(step, trace, scores)
    if not made and maker is not None and _base(maker) in PRODUCTS:
        parameters = dict(step.view.root.named_parameters())
        is_of_none = not any(one.storage.name in parameters for one in maker.inputs)
        made = [maker.index] if is_of_none else []
    return bool(made) and rises_on_one_side(step, made)


def _of_same_weight(step: Step, trace: Trace, scores: Value) -> list[int]:
    """Return the products that a weight has part in which makes scores and is trained now."""
    maker = _maker(trace, scores)
    if maker is None or _base(maker) not in PRODUCTS:
        return []
    trained = {name: p for name, p in step.view.root.named_parameters() if p.requires_grad}
    if step.view.optimizer is not None:
        held = {id(p) for p in held_by(step.view.optimizer)}
        trained = {name: p for name, p in trained.items() if id(p) in held}
    mine = [one.storage for one in maker.inputs if one.storage.name in trained]
    return [
        op.index
        for op in trace.ops
        if _base(op) in PRODUCTS
        and op.phase in ("forward", "loss")
        and any(one.storage is weight for one in op.inputs for weight in mine)
    ]


def _row(trace: Trace, op: Op, value: Value, given: Given) -> ObjectiveRow | None:
    """Return an odd operand as a record; None where scores may be meant as they are."""
    if op.phase not in ("forward", "loss"):
        return None
    maker = _maker(trace, value)
    # What a logarithm went into (a weighted log-probability, a density) may be above 0.
    if given == "scores" and (maker is None or _base(maker) not in PRODUCTS):
        return None
    place = op if maker is None or given in ("one_class", "scores", "unsigned") else maker
    line = line_text(place.line)
    classes = 1 if _base(op) in LIKELIHOODS and len(value.shape) > 1 else -1
    by_hand = given == "between_0_and_1" and _base(op) not in (BINARY, LOG_SHARES)
    return ObjectiveRow(
        op=f"aten.{BINARY}" if by_hand else op.name,
        module=place.module,
        given=given,
        width=value.shape[classes],
        line=line,
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
