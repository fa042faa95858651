"""What the gauge looks at from the first step on, because nothing that fails would ever show it.

Whether gradients arrive at all, whether an update moves what it should, whether float16 flushed the gradients, whether
positions and the pooled token are right. What the run itself does is looked at where that is enough: which parameters have
a gradient costs no device work, the update is seen in a sample of the half-precision weights before and after the real
one. Only the rest runs a micro-batch again, in half precision or for a model that pools. Steps 0, 1, 2, 4, 8 and so on are
looked at, so that the cost is that of the first ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from nanstop.diagnose.findings.setup.ns114_no_gradient_path import is_mostly_unreached
from nanstop.measure.updates import Before, after_update, before_update, trained_by
from nanstop.numerics.tensors import HALF
from nanstop.records import GradientPath, Probe, RunFacts, StepId, formats
from nanstop.replay.step import ModelView, Step, scale_of
from nanstop.tracing.module_ranges import WHOLE

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanstop.records import GradientRow

MOST_ELEMENTS = 1 << 20
"""Weights in the sample of an update: 2 MiB of copies."""
MOST_TENSORS, MOST_COMPARED_ELEMENTS = 16, 4096
LOST = 0.95
"""Share of an update from which training stands still. A run in pure half precision that learns loses much of it."""
ZERO = 0.1
"""Share of zero gradients from which they are compared to those in float32."""
MAX_COMPARED = 2


class EarlySteps:
    """The looks of one run. A look returns a probe of what it found, or None."""

    def __init__(self, view: ModelView) -> None:
        self._view = view
        self._sample: _Sample | None = None
        self._losing: tuple[int, float] | None = None
        """Step and learning rate of the last update looked at, where that was mostly lost."""
        self._highest_rate = 0.0
        self._open = {"coarse", "pooling"}
        self._zero_since: int | None = None
        """Step of the first of the last looks that all saw many gradients of zero."""
        self._flushed = False
        self._are_all_zero = False
        self._num_compared = 0
        self._was: list[tuple[Tensor, Tensor]] | None = None
        """The starts of some weights at the first update."""
        self._compared: WeakSet[Optimizer] = WeakSet()
        self._fed = False
        """Whether the script hands gradients to tensors of its own: copies that it updates and writes back."""
        self._unheld: GradientPath | None = None
        """What arrived, where the optimizer holds nothing of the model: to be told if the update uses nothing else."""

    def arrived(self, facts: RunFacts, step: Step) -> GradientPath | None:
        """Return how many trainable tensors have a gradient now, None where that was looked at. No device work.

        Where most have none, a micro-batch is run again, undone: those of modules that it does not call count for nothing.
        An optimizer of other tensors alone may hold copies to which the script hands the gradients, after the clip at
        the latest: then ``unheld`` tells.
        """
        path = facts.gradient_path
        if path is None or path.num_reached is not None or self._fed or not _is_whole(facts):
            return None
        held = _held(self._view)
        trained = {n: p for n, p in self._view.root.named_parameters() if p.requires_grad}
        # A model that only answers (a teacher, a reference) is often left trainable.
        mine = {n: p for n, p in trained.items() if id(p) in held}
        others = bool(held) and not mine
        mine = mine or trained
        found = _reached(path, mine)
        reached = found.num_reached
        if reached and is_mostly_unreached(found):
            found = _reached(path, _called(step, mine))
        self._fed = others and any(p.grad is not None for p in held.values())
        # Gradients that are nowhere may be summed up in tensors that torch's optimizers know nothing of.
        self._unheld = found if others and reached and not self._fed else None
        return None if others else found

    def unheld(self) -> GradientPath | None:
        """Return, after an update, what had arrived where that update used nothing of it. No device work."""
        found, self._unheld = self._unheld, None
        if found is None:
            return None
        self._fed = any(p.grad is not None for p in _held(self._view).values())
        return None if self._fed else found

    def replaced(self, view: ModelView) -> float:
        """Return by how much of their size the weights moved between the first two updates; 0.0 where nothing asks.

        Asked before each update. An optimizer that holds nothing of the model has copies, which are written back: they
        may be copies of other weights. Synchronises the device once, of such a run.
        """
        was, self._was = self._was, None
        if view.optimizer is not None and view.optimizer not in self._compared:
            self._compared.add(view.optimizer)
            held = _held(view)
            trained = [p for p in view.root.parameters() if p.requires_grad]
            tables = [p for p in trained if p.dim() > 1][:MOST_TENSORS]
            others = bool(held) and not any(id(p) in held for p in trained)
            self._was = [(p, _start(p).clone()) for p in tables] if others else None
            return 0.0
        if not was:
            return 0.0
        moved = torch.stack([(_start(p) - before).float().norm() for p, before in was])
        size = torch.stack([before.float().norm() for _, before in was])
        return float((moved / size.clamp(min=1e-12)).median())

    def before_update(self, step: Step, facts: RunFacts) -> None:
        """Look at the gradients and weights that an update is about to change. Synchronises in float16 runs only."""
        self._sample = None
        if not _is_time(step.id.step) or not _is_whole(facts):
            return
        self._sample = _sample(step)
        if self._num_compared < MAX_COMPARED and "float16" in _formats(facts):
            # One window may have next to nothing to learn from: it takes two.
            share = self._share_of_zeros()
            before, zero = self._zero_since, share >= ZERO
            self._are_all_zero = share == 1.0
            self._zero_since = (step.id.step if before is None else before) if zero else None
            self._flushed = zero and before is not None

    def updated(self, step: int) -> Probe | None:
        """Return what the update that was just made has lost. Synchronises where a sample of it was taken."""
        sample, self._sample = self._sample, None
        if sample is None or sample.id.step != step:
            return None
        updates, states = after_update(sample.optimizer, sample.parameters, sample.before)
        lost, total = sum(row.num_lost for row in updates), sum(row.num_total for row in updates)
        found = Probe(at=sample.id, num_micro=1, lr=sample.lr, states=states)
        before, self._losing = self._losing, None
        self._highest_rate = max(self._highest_rate, sample.peak)
        if total and lost >= LOST * total:
            self._losing = (step, sample.lr)
            # A rate that rises is a warm-up's, and a small one the end of a schedule: nothing to tell.
            if before is not None and self._highest_rate / 2 <= sample.lr <= before[1]:
                return replace(found, updates=updates, since=before[0])
        return found if states else None

    def due(self, step: int, facts: RunFacts) -> bool:
        """Return whether a micro-batch of this healthy window may be run again."""
        if not _is_time(step) or not _is_whole(facts):
            return False
        return self._flushed or bool(self._wanted(facts))

    def again(self, step: Step, facts: RunFacts) -> Probe | None:
        """Return what a micro-batch shows of positions, of the pooled token and, if many are zero, of its gradients.

        Undone bitwise; raises what the step raises. Synchronises the device.
        """
        wanted = self._wanted(facts)
        found: dict[str, Any] = {}
        # A model that is known to pool is looked at until a batch has padding.
        self._open -= {"coarse"} if facts.head is not None else wanted
        if "coarse" in wanted:
            from nanstop.measure.position_rounding import coarse_rows

            found["coarse"] = coarse_rows(step, micros=(0,))
        if "pooling" in wanted and _is_padded(step):
            from nanstop.measure.pooled_token import num_rows_pooled_at_padding

            self._open.discard("pooling")
            found["num_rows_pooled_at_padding"] = num_rows_pooled_at_padding(step)
        if self._flushed:
            self._flushed = False
            self._num_compared += 1
            found["loss_scale"] = scale_of(step.view)
            found["gradients"] = _gradients(step)
            found["since"] = self._zero_since
            found["are_all_zero"] = self._are_all_zero
        return Probe(at=replace(step.id, micro=0), num_micro=1, **found) if found else None

    def _wanted(self, facts: RunFacts) -> set[str]:
        if _formats(facts) or any(b.dtype in HALF for b in self._view.root.buffers()):
            return set(self._open)
        return self._open & {"pooling"} if facts.head is not None else set()

    def _share_of_zeros(self) -> float:
        """Return the share of gradients that are exactly 0, without the table of which a batch uses a few rows.

        Reads each value (1 to 2 ns on one core) and synchronises once, at steps 0, 1, 2, 4, 8, ... of float16 runs.
        """
        table = self._view.embedding()
        gradients = [
            p.grad
            for name, p in self._view.root.named_parameters()
            if p.grad is not None and not p.grad.is_sparse and name.rpartition(".")[0] != table
        ]
        total = sum(gradient.numel() for gradient in gradients)
        if not total:
            return 0.0
        nonzero = torch.stack([g.count_nonzero().to(gradients[0].device) for g in gradients]).sum()
        return 1.0 - int(nonzero) / total


def _reached(path: GradientPath, trained: Mapping[str, Tensor]) -> GradientPath:
    missing = tuple(name for name, p in trained.items() if p.grad is None)
    reached = len(trained) - len(missing)
    return replace(path, num_tensors=len(trained), num_reached=reached, unreached=missing[:8])


def _called(step: Step, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of some parameters whose module, or the one around it, is called by a micro-batch: run again, undone.

    All of them where it cannot be run again. Of a model of images and text the one half has nothing to do with text.
    """
    from nanstop.tracing.module_ranges import module_ranges

    try:
        called = module_ranges(step).keys()
    except Exception:  # what cannot be told apart is told
        return dict(trained)
    return {
        name: p
        for name, p in trained.items()
        if not called.isdisjoint(_around(name)) or p.grad is not None
    }


def _around(name: str) -> set[str]:
    """Return the names of the module that holds a parameter and of the one around that, but not the model's own."""
    owner = name.rpartition(".")[0]
    return {owner or WHOLE, owner.rpartition(".")[0]}


def _held(view: ModelView) -> dict[int, Tensor]:
    """Return what the optimizer updates."""
    groups = view.optimizer.param_groups if view.optimizer is not None else ()
    return {id(p): p for group in groups for p in group["params"]}


def _start(weight: Tensor) -> Tensor:
    return weight.detach().reshape(-1)[:MOST_COMPARED_ELEMENTS]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Weights in half precision before an update. ``peak``: the rate that the schedule multiplies."""

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


def _is_time(step: int) -> bool:
    return step & (step - 1) == 0


def _is_whole(facts: RunFacts) -> bool:
    """Return whether this process has the whole model, and its gradients until the update."""
    return facts.world_size == 1 and facts.veto == "yes"


def _formats(facts: RunFacts) -> set[str]:
    """Return the half formats that the run computes or stores in."""
    used = {facts.autocast, *(group.dtype for group in facts.param_groups)}
    return {name for name in formats.HALF if name in used}


def _is_padded(step: Step) -> bool:
    mask = step.batches[0].get("attention_mask") if step.batches else None
    return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
