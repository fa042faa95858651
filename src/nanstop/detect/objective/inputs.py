"""What an objective reads: logits, log-probabilities, or something that only looks like them.

A cross entropy of probabilities is finite, falls a little and teaches little. That rows sum to 1 is
seen in the numbers; that they do so whatever the weights are, by an experiment: the micro-batch run
again, undone, with other weights. How a softmax was spelled, and where, plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nanstop.detect.objective.answers import falls_without_end, takes_logits_of_labels
from nanstop.detect.objective.labels import LIKELIHOODS, PICKS, picked
from nanstop.detect.standstill import is_constant, moved
from nanstop.frozen import frozen
from nanstop.localize.provenance import KEEPS
from nanstop.localize.slicing import writers
from nanstop.numerics.trained import held_by
from nanstop.records import ObjectiveRow, op_kind, op_name
from nanstop.tracing.op_patches import Look, LookOfSome, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import look_again, record

if TYPE_CHECKING:
    from nanstop.replay.step import Step
    from nanstop.tracing.recorder import Op, Trace, Value

Given = Literal["probabilities", "between_0_and_1", "scores", "one_class", "across"]

MOST_ROWS = 64
"""Rows of an operand that are read: all of them are to be alike."""
TOLERANCE = 1e-2
"""Of a sum of probabilities: those of bfloat16 sum to 1 within it."""
_APART, _WHOLE = 0.05, 1e-4
"""By how much logarithms of sums are off that are none of probabilities, and of a length by how
much it is at most.
"""
FAR, NEAR = 10.0, 1.0
"""Sizes by which weights are moved: nothing stays between 0 and 1 by accident."""
_NORMALISE = frozenset({"_log_softmax", "log_softmax", "logsumexp"})
_SHARES = "_softmax"
_ALIGNMENTS = frozenset({"_ctc_loss", "_cudnn_ctc_loss"})
_BINARY = "binary_cross_entropy_with_logits"
_DIVERGENCE = "aten.kl_div"
_PARTS = frozenset({"exp", "mul", "sub", "xlogy", _BINARY})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "linear"})
_PASSES = KEEPS | {"add", "sub", "mul", "div"}
_PICKS = frozenset({"gather", "index"})
_SQUASHES = frozenset({"softplus", "log_sigmoid_forward"})


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


def _with_other_weights(step: Step, micro: int, share: float, asked: Set[int]) -> _Operands:
    trained = [p for p in step.view.root.parameters() if p.requires_grad]
    look = _Operands(asked)
    # The script's own code may refuse what such weights compute: then nothing is established.
    with suppress(Exception), step.isolated(), moved(trained, share), SecondRun(look):
        step.run(micro)
    return look


class _Operands(LookOfSome):
    """Keeps of the ops that end an objective what was odd about their operand, by index.
    ``overflowed``: those of ``asked`` whose operand was not finite. ``divergences``: which operand
    of those that are a part of a KL divergence is to be a logarithm.
    """

    ops = _PARTS | _NORMALISE | {_SHARES} | _ALIGNMENTS | _SQUASHES | PICKS

    def __init__(self, asked: Set[int] = frozenset()) -> None:
        self.odd: dict[int, Given] = {}
        self.overflowed: set[int] = set()
        self._asked = asked
        self.divergences: dict[int, int] = {}
        self._normalised: set[StorageWeakRef] = set()
        self._picked: dict[StorageWeakRef, int] = {}
        self._weighed: _Weighed | None = None
        self._less: tuple[_Weighed, StorageWeakRef] | None = None

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        base = op_name(str(func))
        if base in ("sub", "mul", "xlogy"):
            with torch.no_grad():
                done = self._divergence(index, base, args)
            if done is not None:
                return done
        read = _reader(base)
        if read is not None and isinstance(args[0], Tensor) and args[0].is_floating_point():
            with torch.no_grad():
                found = read(args)
                if index in self._asked and not bool(args[0].isfinite().all()):
                    self.overflowed.add(index)
            self._note(index, base, args[0], found)
        return None

    def _divergence(self, index: int, base: str, args: Any) -> Callable[[Any], None] | None:
        """Look at the parts of a KL divergence to a target p: p log(p) - p x, as torch computes
        it, or p (log(p) - x), as its formula is written and torch computes it of logarithms.
        """
        tensors = [one for one in args[:2] if isinstance(one, Tensor) and one.is_floating_point()]
        if len(tensors) < 2 or tensors[0].shape != tensors[1].shape or tensors[0].dim() < 2:
            return None
        if base == "sub" and len(args) == 2 and _is_asked(tensors[1]) and not _is_asked(tensors[0]):
            weighed = _Weighed(index, 1, tensors[1], tensors[0])

            def made(result: Tensor) -> None:
                self._less = weighed, StorageWeakRef(result.untyped_storage())

            return made
        if base == "xlogy" and self._weighed is not None and tensors[0] is tensors[1]:
            target = self._weighed.target
            if StorageWeakRef(tensors[0].untyped_storage()) == StorageWeakRef(
                target.untyped_storage()
            ):
                self._take(self._weighed, target)
        elif base == "mul" and sum(map(_is_asked, tensors)) == 1:
            asked = int(_is_asked(tensors[1]))
            self._weighed = _Weighed(index, asked, tensors[asked], tensors[1 - asked])
            place = StorageWeakRef(tensors[asked].untyped_storage())
            if self._less is not None and self._less[1] == place:
                self._take(self._less[0], tensors[1 - asked])
        return None

    def _take(self, weighed: _Weighed, target: Tensor) -> None:
        """Keep what is odd about what is taken for a logarithm beside a target of probabilities."""
        dims = [dim for dim in (-1, 1) if _are_probabilities(_rows(target, dim))]
        given = _likelihood(weighed.logs, dims[0]) if dims else None
        if given is None or (weighed.target is not target and not _is_log(weighed.target, target)):
            return
        place = StorageWeakRef(weighed.logs.untyped_storage())
        if place not in self._normalised:
            self.odd[weighed.index], self._picked[place] = given, weighed.index
            self.divergences[weighed.index] = weighed.place

    def _note(self, index: int, base: str, operand: Tensor, given: Given | None) -> None:
        """Keep what is odd; scores that are normalised as well are the logits of a cross entropy
        that is spelled by hand.
        """
        # It keeps the address from being given to another storage.
        place = StorageWeakRef(operand.untyped_storage())
        if base in _NORMALISE:
            self._normalised.add(place)
            self.odd.pop(self._picked.pop(place, -1), None)
        if given is None or (base in _PICKS and place in self._normalised):
            return
        self.odd[index] = given
        if base in _PICKS:
            self._picked[place] = index


@frozen
class _Weighed:
    """``logs``, which the op ``index`` reads at ``place`` beside ``target``, or its logarithm."""

    index: int
    place: int
    logs: Tensor
    target: Tensor


def _is_asked(values: Tensor) -> bool:
    return values.requires_grad


def _is_log(logs: Tensor, values: Tensor) -> bool:
    """Return whether some rows of ``logs`` are the logarithms of those of ``values``."""
    read, given = _rows(logs, -1).exp(), _rows(values, -1)
    return torch.allclose(read, given, rtol=TOLERANCE, atol=TOLERANCE)


def _reader(base: str) -> Callable[[Any], Given | None] | None:
    """Return what reads the operand of an op, None for ops that end no objective."""
    if base in _NORMALISE or base == _SHARES:
        return lambda args: _normalised(args[0], _dim(args[1]), base)
    if base == "exp":  # of probabilities: a softmax of them that is spelled out
        return lambda args: _exponents(args[0])
    if base in LIKELIHOODS:
        return lambda args: _likelihood(args[0], 1 if args[0].dim() > 1 else 0)
    if base in _ALIGNMENTS:
        return lambda args: _likelihood(args[0], -1)
    if base in _PICKS:
        return lambda args: _picked_scores(args[0]) if picked(base, args) is not None else None
    if base == "mul":
        return _meets_labels
    if base in _SQUASHES:
        return lambda args: _between(args[0])
    return (lambda args: _between(args[0])) if base == _BINARY else None


def _dim(given: Any) -> int | None:
    dims = list(given) if isinstance(given, (list, tuple)) else [given]
    return int(dims[0]) if len(dims) == 1 else None


def _rows(values: Tensor, dim: int) -> Tensor:
    """Return some rows of an operand, its classes last, in float32."""
    rows = values.detach().movedim(dim, -1).reshape(-1, values.shape[dim])
    each = max(1, len(rows) // MOST_ROWS)
    return rows[::each][:MOST_ROWS].float()


def _normalised(values: Tensor, dim: int | None, base: str) -> Given | None:
    """Return what is odd about logits; of a softmax, whose scores may be anything, one entry."""
    if dim is None or values.dim() == 0 or not values.numel() or not values.requires_grad:
        return None
    if values.shape[dim] == 1:
        return "one_class" if values.dim() > 1 else None
    are_odd = base != _SHARES and _are_probabilities(_rows(values, dim))
    return "probabilities" if are_odd else None


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
    if bool((rows.amax(-1) > TOLERANCE).any()):
        return "scores"
    is_off = bool((rows.logsumexp(-1).abs() > _APART).any())
    return "across" if is_off and _are_normalised_across(values, values.shape[dim]) else None


def _are_normalised_across(values: Tensor, classes: int) -> bool:
    """Return whether logarithms are those of probabilities that sum to 1 along a dimension, in
    whatever shape: there are as many times their sum of them as it is long. One of as many as there
    are ``classes`` may be meant: a contrast of a batch with itself goes both ways.
    """
    long = values.numel() / float(values.detach().exp().sum(dtype=torch.float32))
    return round(long) not in (1, classes) and abs(long - round(long)) <= _WHOLE * long


def _between(values: Tensor) -> Given | None:
    if not values.numel() or not values.requires_grad:
        return None
    return "between_0_and_1" if _are_shares(values) and bool((values > 0.0).any()) else None


def _picked_scores(values: Tensor) -> Given | None:
    """Return "scores" where one of each row is picked that is no log-probability."""
    odd = _likelihood(values, -1)
    return odd if odd == "scores" else None


def _meets_labels(args: Any) -> Given | None:
    """Return what is odd about scores that are multiplied by as many numbers between 0 and 1."""
    if not all(isinstance(one, Tensor) and one.shape == args[0].shape for one in args[:2]):
        return None
    trained = [one for one in args[:2] if one.requires_grad]
    labels = [one for one in args[:2] if not one.requires_grad]
    is_met = len(labels) == 1 and labels[0].numel() > 0 and _are_shares(labels[0])
    return _between(trained[0]) if is_met else None


def _are_shares(values: Tensor) -> bool:
    read = values.detach().flatten()[: MOST_ROWS * MOST_ROWS]
    return bool(((read >= 0.0) & (read <= 1.0)).all())


def _are_probabilities(rows: Tensor) -> bool:
    sums = (rows.sum(-1) - 1.0).abs()
    return bool((rows >= 0.0).all()) and bool((sums <= TOLERANCE).all())


def _wrong(step: Step, trace: Trace, op: Op, given: Given) -> Value | None:
    """Return the operand that the loss takes for something else, None where it does not.

    What an operation of torch expects is known; a loss that is spelled by hand is told by how it
    answers to other numbers.
    """
    base = _base(op)
    if base == _SHARES and not is_constant(step):  # attention to one token
        return None
    if base in _PICKS:
        made_at = _of_same_weight(step, trace, op.inputs[0])
        return op.inputs[0] if made_at and falls_without_end(step, made_at) else None
    if given != "between_0_and_1" or base == _BINARY:
        return next(iter(op.inputs), None)
    for value in op.inputs:
        newest = next(iter(writers(trace, value)), None)
        if newest is not None and takes_logits_of_labels(step, newest):
            return value
    return None


def _of_same_weight(step: Step, trace: Trace, scores: Value) -> list[int]:
    """Return the products that a weight has part in which makes scores and is trained now."""
    maker = _maker(trace, scores)
    if maker is None or _base(maker) not in _PRODUCTS:
        return []
    trained = {name: p for name, p in step.view.root.named_parameters() if p.requires_grad}
    if step.view.optimizer is not None:
        held = {id(p) for p in held_by(step.view.optimizer)}
        trained = {name: p for name, p in trained.items() if id(p) in held}
    mine = [one.storage for one in maker.inputs if one.storage.name in trained]
    return [
        op.index
        for op in trace.ops
        if _base(op) in _PRODUCTS
        and op.phase in ("forward", "loss")
        and any(one.storage is weight for one in op.inputs for weight in mine)
    ]


def _row(trace: Trace, op: Op, value: Value, given: Given) -> ObjectiveRow | None:
    """Return an odd operand as a record; None where scores may be meant as they are."""
    if op.phase not in ("forward", "loss"):
        return None
    maker = _maker(trace, value)
    # What a logarithm went into (a weighted log-probability, a density) may be above 0.
    if given == "scores" and (maker is None or _base(maker) not in _PRODUCTS):
        return None
    place = op if maker is None or given in ("one_class", "scores") else maker
    line = line_text(place.line)
    classes = 1 if _base(op) in LIKELIHOODS and len(value.shape) > 1 else -1
    by_hand = given == "between_0_and_1" and _base(op) != _BINARY
    return ObjectiveRow(
        op=f"aten.{_BINARY}" if by_hand else op.name,
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
