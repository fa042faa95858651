"""What the gauge looks at from the first step on, because nothing that fails would ever show it.

Whether gradients arrive at all (``arrival``), whether an update moves what it should, whether
float16 flushed the gradients, whether positions and the pooled token are right. What the run itself
does is looked at where that is enough: the update is seen in a sample of the half-precision weights
before and after the real one. Only the rest runs a micro-batch again: in half precision, for a
model that pools, and once for what the objective reads. Steps 0, 1, 2, 4, 8 and so on are looked
at, so that the cost is that of the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from nanstop.detect.arrival.gradient_arrival import GradientArrival, is_whole
from nanstop.detect.objective.equal_halves import EqualHalves
from nanstop.detect.objective.references import Equals, OwnReference
from nanstop.detect.stale_weights import keeps_casts
from nanstop.frozen import frozen
from nanstop.measure.updates import Before, after_update, before_update, trained_by
from nanstop.numerics.room import let_go
from nanstop.numerics.tensors import HALF, floats, is_plain, pieces
from nanstop.records import Probe, RunFacts, StepId, formats
from nanstop.records.facts import BY_HAND
from nanstop.replay.step import ModelView, Step, gradients_of, scale_of
from nanstop.tracing.record_step import gives_its_loss

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanstop.records import GradientRow, ObjectiveRow
    from nanstop.tracing.op_patches import Look

MOST_ELEMENTS = 1 << 20
"""Weights in the sample of an update: 2 MiB of copies."""
LOST = 0.95
"""Share of an update from which training stands still.
A run in pure half precision that learns loses much of it.
"""
ZERO = 0.1
"""Share of zero gradients from which they are compared to those in float32."""
MAX_COMPARED = 2
MOST_OBJECTIVES = 4
"""Optimizers whose first window is looked at for what their objective reads: each of those that
take turns has one of its own.
"""


class EarlySteps:
    """The looks of one run. A look returns a probe of what it found, or None.

    ``inside``: the formats in which parts of the model were seen to work, whatever the weights and
    the loop's autocast say.
    """

    def __init__(self, view: ModelView, inside: Callable[[], Collection[str]] = frozenset) -> None:
        self.view = view
        self._inside = inside
        self.sample: _Sample | None = None
        """Of the present update, None where it is not looked at."""
        self._losing: tuple[int, float] | None = None
        """Step and learning rate of the last update looked at, where that was mostly lost."""
        self._highest_rate = 0.0
        self._open = {"coarse", "pooling", "objective", "casts"}
        self._begun: list[ReferenceType[Optimizer]] = []
        """Optimizers that have come to their first update, in order."""
        self._zero_since: int | None = None
        """Step of the first of the last looks that all saw many gradients of zero."""
        self._flushed = False
        self._are_all_zero = False
        self._num_compared = 0
        self._own_reference = OwnReference()
        self._equal_halves = EqualHalves()
        self.lost: float | None = None
        """Share of the last update looked at that its weights could not take up, None where none
        was measured.
        """
        self.arrival = GradientArrival(view)

    def begins(self, optimizer: Optimizer) -> None:
        """Have the objective of an optimizer looked at that is about to make its first update."""
        if len(self._begun) < MOST_OBJECTIVES:
            self._begun.append(ref(optimizer))
            self._open.add("objective")

    def before_update(self, step: Step, facts: RunFacts) -> None:
        """Look at the gradients and weights that an update is about to change.
        Synchronises in float16 runs only.
        """
        self.sample = None
        if not is_early(step.id.step) or not is_whole(facts):
            return
        self.sample = _sample(step)
        if self._num_compared < MAX_COMPARED and "float16" in self._formats(facts):
            # One window may have next to nothing to learn from: it takes two.
            share = self._share_of_zeros()
            before, zero = self._zero_since, share >= ZERO
            self._are_all_zero = share == 1.0
            self._zero_since = (step.id.step if before is None else before) if zero else None
            self._flushed = zero and before is not None

    def updated(self, step: int) -> Probe | None:
        """Return what the update that was just made has lost.
        Synchronises where a sample of it was taken.
        """
        sample, self.sample, self.lost = self.sample, None, None
        if sample is None or sample.id.step != step:
            return None
        updates, states = after_update(sample.optimizer, sample.parameters, sample.before)
        lost, total = sum(row.num_lost for row in updates), sum(row.num_total for row in updates)
        found = Probe(at=sample.id, num_micro=1, lr=sample.lr, states=states)
        before, self._losing = self._losing, None
        self._highest_rate = max(self._highest_rate, sample.peak)
        self.lost = lost / total if total else None
        if total and lost >= LOST * total:
            self._losing = (step, sample.lr)
            # A rate that rises is a warm-up's, and a small one the end of a schedule:
            # nothing to tell.
            if before is not None and self._highest_rate / 2 <= sample.lr <= before[1]:
                return replace(found, updates=updates, since=before[0])
        return found if states else None

    def due(self, step: int, facts: RunFacts) -> bool:
        """Return whether a micro-batch of this healthy window may be run again."""
        follows = step in (self._own_reference.next, self._equal_halves.next)
        if not (follows or is_early(step)) or not (is_whole(facts) or _is_by_hand(facts)):
            return False
        return follows or self._flushed or bool(self._wanted(step, facts))

    def again(self, step: Step, facts: RunFacts) -> Probe | None:
        """Return what a micro-batch shows of positions, of the pooled token, of what the objective
        reads and, if many are zero, of its gradients.

        Undone bitwise; raises what the step raises. Synchronises the device.
        """
        wanted = self._wanted(step.id.step, facts)
        if step.calls_script:
            wanted -= {"objective", "casts"}
        found: dict[str, Any] = {}
        # A model that is known to pool is looked at until a batch has padding.
        self._open -= {"coarse", "casts"} & wanted if facts.head is not None else wanted
        if "coarse" in wanted:
            from nanstop.measure.position_rounding import coarse_rows

            found["coarse"] = coarse_rows(step, micros=(0,))
        if "pooling" in wanted and _is_padded(step):
            self._open.discard("pooling")
            if "objective" not in wanted:  # which looks at it as well
                from nanstop.measure.pooled_token import pooled_rows

                found |= pooled_rows(step)
        if "objective" in wanted:
            self._open.discard("objective")
            with suppress(Exception):  # a healthy run that cannot be run again is none to speak of
                equal = Equals()
                seen = at_once(step, equal)
                if not self._begun or self._begun[0]() is step.view.optimizer:
                    seen["objective"] += self._own_reference.take(step, equal)
                    seen["objective"] += self._equal_halves.take(step)
                if not any(seen.values()) or gives_its_loss(step):
                    found = seen | found
        elif rows := self._followed(step):
            found["objective"] = rows
        if "casts" in wanted:
            from nanstop.detect.stale_weights import stale_losses

            found["stale"] = stale_losses(step)
        if self._flushed:
            self._flushed = False
            self._num_compared += 1
            found["loss_scale"] = scale_of(step.view)
            found["gradients"] = _gradients(step)
            found["since"] = self._zero_since
            found["are_all_zero"] = self._are_all_zero
        return Probe(at=replace(step.id, micro=0), num_micro=1, **found) if found else None

    def _followed(self, step: Step) -> tuple[ObjectiveRow, ...]:
        """Return what shows in several updates in a row alone."""
        rows: tuple[ObjectiveRow, ...] = ()
        with suppress(Exception):  # as above
            if step.id.step == self._own_reference.next:
                rows += self._own_reference.again(step)
            if step.id.step == self._equal_halves.next:
                rows += self._equal_halves.take(step)
            return rows if not rows or gives_its_loss(step) else ()
        return rows

    def _wanted(self, step: int, facts: RunFacts) -> set[str]:
        asked = {"objective"}
        if step > 0 and keeps_casts(self.view):
            asked.add("casts")
        if self._formats(facts) or any(b.dtype in HALF for b in self.view.root.buffers()):
            asked |= {"coarse", "pooling"}
        elif facts.head is not None:
            asked.add("pooling")
        return self._open & asked

    def _formats(self, facts: RunFacts) -> set[str]:
        """Return the half formats that the run computes or stores in."""
        used = {facts.autocast, *(group.dtype for group in facts.param_groups), *self._inside()}
        return {name for name in formats.HALF if name in used}

    def _share_of_zeros(self) -> float:
        """Return the share of gradients that are exactly 0, without the table of which a batch uses
        a few rows.

        Reads each value (1 to 2 ns on one core) and synchronises once, at steps 0, 1, 2, 4, 8, ...
        of float16 runs.
        """
        table = self.view.embedding()
        gradients = [
            p.grad
            for name, p in self.view.root.named_parameters()
            if p.grad is not None and not p.grad.is_sparse and name.rpartition(".")[0] != table
        ]
        total = sum(gradient.numel() for gradient in gradients)
        if not total:
            return 0.0
        # Counting takes eight bytes an element on a device that may be full.
        parts = (part for g in gradients for part in (pieces(g) if is_plain(g) else (g,)))
        nonzero = torch.stack([part.count_nonzero().to(gradients[0].device) for part in parts])
        return 1.0 - int(nonzero.sum()) / total


@frozen
class _Sample:
    """Weights in half precision before an update.
    ``peak``: the rate that the schedule multiplies.
    """

    id: StepId
    optimizer: Optimizer
    parameters: Mapping[str, Tensor]
    before: Mapping[str, Before]
    lr: float
    peak: float


def _sample(step: Step) -> _Sample | None:
    optimizer = step.view.optimizer
    if optimizer is None or _rounds_at_random(optimizer):
        return None
    trained = trained_by(optimizer, step.view.root)
    half = {name: p for name, p in trained.items() if p.dtype in HALF}
    rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
    if not half or not any(rates):
        return None
    peaks = [float(g.get("max_lr", g.get("initial_lr", 0.0))) for g in optimizer.param_groups]
    before = before_update(half, most=MOST_ELEMENTS)
    return _Sample(step.id, optimizer, half, before, max(rates), max(*rates, *peaks))


def _rounds_at_random(optimizer: Optimizer) -> bool:
    """Return whether updates are rounded stochastically: what one loses, the others make good."""
    options: dict[str, Any] = {**optimizer.defaults, **vars(optimizer)}
    return any("stochastic" in name and bool(value) for name, value in options.items())


def _gradients(step: Step) -> tuple[GradientRow, ...]:
    """Return the gradients of one micro-batch against those of the same micro-batch in float32."""
    from nanstop.measure.float32_distance import gradient_rows, run_window
    from nanstop.measure.ranges import op_formats
    from nanstop.remedies.precision import reference
    from nanstop.replay.conditions import without_dropout

    scale = scale_of(step.view) or 1.0
    with without_dropout(step.view.root):
        own = run_window(step, micros=(0,))
        true = run_window(step, under=lambda: reference(step.view), micros=(0,))
        return gradient_rows(own, true, op_formats(step, micros=(0,)), scale)


def at_once(step: Step, *looks: Look) -> dict[str, Any]:
    """Return what the objective reads, which differences are lost and what is counted in half
    precision, from one run of all three and of ``looks``.
    """
    from nanstop.detect.objective.backwards import Backwards, backward_rows, unheard_rows
    from nanstop.detect.objective.groups import Groups, lone_rows
    from nanstop.detect.objective.inputs import objective_rows
    from nanstop.detect.objective.labels import Picks, Targets, beyond_rows, misaligned_rows
    from nanstop.detect.objective.one_policy import OnePolicy, apart_rows
    from nanstop.detect.objective.operands.ahead import reads_ahead
    from nanstop.detect.objective.operands.blanks import Blanks, blank_rows
    from nanstop.detect.objective.operands.mixed import MixedRows, mixed_rows
    from nanstop.detect.objective.operands.reach import Met, unreached
    from nanstop.detect.objective.operands.signs import Signs, unsigned_rows
    from nanstop.detect.objective.padded_labels import padded_labels
    from nanstop.detect.objective.padding import Masks, States, hidden_texts
    from nanstop.detect.objective.pairs import Pairs, paired_rows
    from nanstop.detect.objective.ratios import Ratios, ratio_rows
    from nanstop.detect.running_sums import RunningSums, lost_sum_rows
    from nanstop.measure.cancellation import Cancellations, cancelled_rows
    from nanstop.measure.pooled_token import Pooling, pooled_rows
    from nanstop.measure.position_rounding import WholeNumbersInHalf, coarse_rows

    differences, counts, picks = Cancellations(), WholeNumbersInHalf(), Picks()
    ratios, pooling, sums, pairs, masks = Ratios(), Pooling(step), RunningSums(), Pairs(), Masks()
    groups, policy, backwards, states = Groups(), OnePolicy(), Backwards(), States()
    targets, blanks, met, signs, mixed = Targets(), Blanks(), Met(), Signs(), MixedRows()
    seen = (differences, counts, picks, ratios, pooling, sums, pairs, masks, groups, policy)
    seen += (states, backwards, targets, blanks, met, signs, mixed)
    rows = objective_rows(step, 0, *seen, *looks)
    rows += _found(misaligned_rows, step, picks) + _found(paired_rows, step, pairs)
    rows += _found(lone_rows, step, groups) + _found(hidden_texts, step, picks, masks, states)
    rows += _found(padded_labels, step, picks) + _found(beyond_rows, step, targets)
    rows += _found(blank_rows, step, blanks) + _found(reads_ahead, step, picks)
    rows += _found(mixed_rows, step, mixed)
    rows += _found(unheard_rows, step) if backwards.are_several else ()
    rows += _found(unreached, step, met) + _found(unsigned_rows, step, signs)
    coarse = {"coarse": coarse_rows(step, micros=(0,))} if counts.are_there else {}
    return {
        **coarse,
        **dict(_found(pooled_rows, step, pooling)),
        "ratios": _found(ratio_rows, step, ratios) + _found(apart_rows, step, policy),
        "objective": rows,
        "are_all_zero": bool(rows) and _are_zero(step.view),
        "cancelled": _found(cancelled_rows, step, differences.found),
        "lost_sums": _found(lost_sum_rows, step, sums),
        "backwards": _found(backward_rows, step, backwards),
    }


def _found(look: Callable[..., Any], *given: Any) -> Any:
    """Return what a look finds; nothing where its runs come to no end, which says nothing of what
    the others look for.
    """
    try:
        return look(*given)
    except Exception as error:
        let_go(error)
        return ()


def _are_zero(view: ModelView) -> bool:
    """Return whether every gradient that arrived is exactly 0. Synchronises the device."""
    gradients = gradients_of(view.root).values()
    return all(not bool(part.any()) for gradient in gradients for part in floats(gradient))


def _is_by_hand(facts: RunFacts) -> bool:
    """Return whether the script itself makes an update of each window that is over, in one
    process.
    """
    return facts.world_size == 1 and facts.veto == BY_HAND


def is_early(step: int) -> bool:
    """Return whether a step is one of those that are looked at."""
    return step & (step - 1) == 0


def _is_padded(step: Step) -> bool:
    mask = step.batches[0].get("attention_mask") if step.batches else None
    return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
