"""Trials of precision plans: each is a recorded run of the calibration batches, undone, held against float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nanstop.core.eager import eager
from nanstop.core.headroom import (
    Narrow,
    Rehearsal,
    births,
    bytes_written,
    narrow_values,
    num_casts,
    product_work,
    rehearse,
)
from nanstop.core.numerics import format_limit, format_name, nonfinite_names
from nanstop.core.probe import exact_ranges, headroom_bits
from nanstop.core.step import Step
from nanstop.errors import NanstopError
from nanstop.records import PrecisionPlan
from nanstop.remedies.plan import planned
from nanstop.remedies.precision import reference
from nanstop.run.trials import cosine

LOSS_TOLERANCE = 1e-3
MIN_COSINE = 0.999
MIN_HEADROOM = 2.0
MIN_SHARE = 0.9

_SCALES = 2.0**-10, 2.0**16
"""The smallest loss scale that is tried, and GradScaler's own, above which nothing is gained."""
_TINY_LOSS = 1e-3

Under = Callable[[], AbstractContextManager[Any]]


class ScaledStep(Step, Protocol):
    """A step whose loss is multiplied by ``scale`` before its backward; ``update`` divides the gradients by it."""

    scale: float


@dataclass(frozen=True, slots=True)
class Shown:
    """What the trial of a plan showed, the worst of all batches.

    ``pressed``: what is too large for the plan's format, or would leave it after two doublings; ``blamed``: modules
    where the run broke otherwise. ``why``: what is wrong, "" where nothing is.
    """

    why: str
    loss_gap: float
    cosine: float
    headroom_bits: float
    worst: Narrow | None
    pressed: tuple[Narrow, ...]
    blamed: tuple[str, ...]
    loss_dtype: str
    casts: int
    bytes: int
    products: Mapping[str, tuple[int, int]]
    """Of the first batch: conversions, bytes written, and the work of matrix products by module."""
    scale: float = 1.0
    """The largest loss scale that leaves the gradients their headroom."""

    @property
    def passes(self) -> bool:
        return not self.why


@dataclass(frozen=True, slots=True)
class Walk:
    """A few updates under a plan against the same in float32; see ``records.Agreement``."""

    loss_gap: float
    share: float
    updates: int = 0
    error: str = ""

    @property
    def why(self) -> str:
        """Return what is wrong, "" where nothing is."""
        if self.error:
            return self.error
        if not self.loss_gap <= LOSS_TOLERANCE:
            return f"the loss along the updates is {self.loss_gap:.1e} away from float32"
        if not self.share >= MIN_SHARE:
            return f"{self.updates} updates go {self.share:.0%} of the way that they go in float32"
        return ""


@dataclass(frozen=True, slots=True)
class _Exact:
    """The float32 run of one batch."""

    loss: float
    grads: Mapping[str, Tensor]


class Bench:
    """Tries plans on the batches of a step. ``scale``: the loss scale, found along the way; 1 where none is needed."""

    def __init__(self, step: ScaledStep, *, dtype: torch.dtype, updates: int) -> None:
        self.step = step
        self.dtype = dtype
        self.updates = updates
        self.base = PrecisionPlan()
        self.num_looks = 0
        self.scales = dtype is torch.float16
        self._shown: dict[PrecisionPlan, Shown] = {}
        self._walks: dict[PrecisionPlan, Walk] = {}
        exact = partial(reference, step.view)
        runs = [rehearse(step, micro, under=exact) for micro in range(len(step.batches))]
        for run in runs:
            if run.error is not None:
                raise run.error
        self._order = _modules_in_order(runs[0])
        self._exact = [_exact_of(run) for run in runs]
        self._wide = exact_ranges(step, under=exact)
        self._way = self._walked(exact)
        backward = [size for key, size in self._wide.items() if key[1] == "backward"]
        self.scale = self._scale_for(max(backward, default=0.0))

    @property
    def dtype_name(self) -> str:
        return format_name(self.dtype)

    @property
    def model_name(self) -> str:
        model = getattr(self.step.view, "model", self.step.view.root)
        return type(model).__name__

    def forward_modules(self) -> tuple[str, ...]:
        """Return the modules that compute, in the order of their first operation."""
        return self._order

    def look(self, plan: PrecisionPlan) -> Shown:
        """Return what a plan does to loss, gradients and headroom."""
        if plan not in self._shown:
            self.num_looks += 1
            shown = self._tried(plan)
            if shown.scale < self.scale or (shown.scale > self.scale and not shown.passes):
                self.scale = shown.scale
                shown = self._tried(plan)
            self._shown[plan] = shown
        return self._shown[plan]

    def settle(self, plan: PrecisionPlan) -> Shown:
        """Return what a plan that passes shows at the largest loss scale that its own gradients have room for."""
        before, known = self.scale, self.look(plan)
        self.scale = known.scale
        self._shown[plan], self._walks = self._tried(plan), {}
        if not self._shown[plan].passes:
            self.scale, self._shown[plan] = before, known
        return self._shown[plan]

    def walk(self, plan: PrecisionPlan) -> Walk:
        """Return how a few updates under a plan, not recorded, compare with float32."""
        if plan not in self._walks:
            self._walks[plan] = self._compared(self._walked(self._under(plan)))
        return self._walks[plan]

    def product_share(self, plan: PrecisionPlan, inside: Callable[[str], bool]) -> float:
        """Return the share of the matrix products in the plan's format, of modules that ``inside`` picks."""
        work = [one for name, one in self.look(plan).products.items() if inside(name)]
        total = sum(every for _, every in work)
        return sum(narrow for narrow, _ in work) / total if total else 0.0

    def _under(self, plan: PrecisionPlan) -> Under:
        return partial(planned, self.step.view, plan)

    def _rehearsed(self, plan: PrecisionPlan, micro: int) -> Rehearsal:
        self.step.scale = self.scale
        try:
            return rehearse(self.step, micro, under=self._under(plan))
        finally:
            self.step.scale = 1.0

    def _tried(self, plan: PrecisionPlan) -> Shown:
        """Return what a plan shows at the present scale."""
        largest = 0.0
        worst: Shown | None = None
        for micro in range(len(self.step.batches)):
            run = self._rehearsed(plan, micro)
            values = narrow_values(run, self._wide, self.dtype)
            largest = max(largest, *(v.absmax for v in values if v.backward), 0.0)
            shown = self._shown_by(run, values)
            worst = shown if worst is None else _worse(worst, shown)
            if shown.why:
                break
        assert worst is not None
        return replace(worst, scale=self._scale_for(largest))

    def _scale_for(self, largest: float) -> float:
        """Return the largest power of two that leaves gradients of this size their headroom."""
        if not self.scales:
            return 1.0
        low, high = _SCALES
        if not 0.0 < largest < math.inf:
            return high
        room = math.floor(headroom_bits(largest, self.dtype_name) - MIN_HEADROOM)
        return min(max(2.0**room, low), high)

    def _shown_by(self, run: Rehearsal, values: tuple[Narrow, ...]) -> Shown:
        exact = self._exact[run.micro]
        limit = format_limit(self.dtype) / 2**MIN_HEADROOM
        sized = [replace(v, absmax=v.absmax * self.scale) if v.backward else v for v in values]
        pressed = tuple(v for v in sized if v.absmax > limit)
        worst = max(sized, key=lambda value: value.absmax, default=None)
        bits = headroom_bits(worst.absmax, self.dtype_name) if worst is not None else math.inf
        bad = nonfinite_names(run.grads.items())
        gap = _gap(run.loss, exact.loss)
        near = cosine(run.grads, exact.grads) if not bad and run.error is None else -1.0
        why = _wrong(run, gap, near, bad)
        tight = _tight(worst, self.dtype_name) if worst is not None else ""
        return Shown(
            why="; ".join(filter(None, (tight, why))),
            loss_gap=gap,
            cosine=near,
            headroom_bits=bits,
            worst=worst,
            pressed=pressed,
            blamed=_blamed(run) if why and not pressed else (),
            loss_dtype="" if run.loss_dtype is None else format_name(run.loss_dtype),
            casts=num_casts(run),
            bytes=bytes_written(run),
            products=product_work(run, self.dtype),
        )

    def _walked(self, under: Under) -> tuple[list[float], dict[str, Tensor]] | str:
        """Return losses of the updates and how far each trainable parameter went; or what was raised."""
        step = self.step
        losses: list[float] = []
        step.scale = self.scale if hasattr(self, "scale") else 1.0
        try:
            # Compiled code would be compiled anew for each plan.
            with step.isolated(with_update=True), under(), eager():
                held = {n: p for n, p in step.view.root.named_parameters() if p.requires_grad}
                start = {name: p.detach().float().clone() for name, p in held.items()}
                for place in range(self.updates):
                    for parameter in step.view.root.parameters():
                        parameter.grad = None
                    losses.append(float(step.run(place % len(step.batches))))
                    step.update()
                moved = {name: p.detach().float() - start[name] for name, p in held.items()}
        except Exception as error:  # the model's own code under a plan: an outcome like any other
            return f"{type(error).__name__}: {error}"
        finally:
            step.scale = 1.0
        return losses, moved

    def _compared(self, way: tuple[list[float], dict[str, Tensor]] | str) -> Walk:
        if isinstance(self._way, str):
            raise NanstopError(f"an update in float32 fails: {self._way}")
        if isinstance(way, str):
            return Walk(math.inf, 0.0, self.updates, way)
        gaps = [_gap(mine, exact) for mine, exact in zip(way[0], self._way[0], strict=True)]
        mine, exact = self._descent(way[1]), self._descent(self._way[1])
        return Walk(max(gaps, default=0.0), mine / exact if exact else 1.0, self.updates)

    def _descent(self, moved: Mapping[str, Tensor]) -> float:
        """Return how far parameters went along float32's gradients, which tell steps that matter from Adam's noise."""
        return sum(
            float((moved[name].double() * gradient.double().to(moved[name].device)).sum())
            for exact in self._exact
            for name, gradient in exact.grads.items()
        )


def _exact_of(run: Rehearsal) -> _Exact:
    assert run.loss is not None
    if not run.grads:
        raise NanstopError(
            "the calibration gives no gradient",
            hint="are all parameters frozen, or does the loss not depend on them?",
        )
    if not math.isfinite(run.loss) or nonfinite_names(run.grads.items()):
        raise NanstopError(
            "loss or gradients are not finite even in float32: no format cures that",
            hint="`nanstop run` names the operation; look at the batch, the mask and the weights",
        )
    return _Exact(run.loss, run.grads)


def _modules_in_order(run: Rehearsal) -> tuple[str, ...]:
    return tuple(dict.fromkeys(op.module for op in run.trace.ops if op.phase == "forward"))


def _gap(loss: float | None, exact: float) -> float:
    """Return the relative distance of two losses, inf where one is not finite."""
    if loss is None or not math.isfinite(loss):
        return math.inf
    return abs(loss - exact) / max(abs(exact), _TINY_LOSS)


def _wrong(run: Rehearsal, gap: float, near: float, bad: tuple[str, ...]) -> str:
    if run.error is not None:
        text = " ".join(str(run.error).split())[:160]
        return f"{type(run.error).__name__} in `{_last_module(run)}`: {text}"
    if math.isinf(gap):
        return "the loss is not finite"
    if bad:
        return f"{len(bad)} gradients are not finite, `{bad[0]}` first"
    if gap > LOSS_TOLERANCE:
        return f"the loss is {gap:.1e} away from float32"
    if near < MIN_COSINE:
        return f"the gradient's cosine with float32 is {near:.4f}"
    return ""


def _tight(worst: Narrow, dtype: str) -> str:
    bits = headroom_bits(worst.absmax, dtype)
    if bits >= MIN_HEADROOM:
        return ""
    what = "a scaled gradient" if worst.backward else "a value"
    room = f"{bits:.1f} bits below" if bits >= 0.0 else "beyond"
    return f"{what} of {worst.absmax:.3g} is {room} the end of {dtype}"


def _blamed(run: Rehearsal) -> tuple[str, ...]:
    """Return where a run broke: where it raised, else where non-finite values were born."""
    return (_last_module(run),) if run.error is not None else births(run)


def _last_module(run: Rehearsal) -> str:
    return run.trace.ops[-1].module if run.trace.ops else ""


def _worse(first: Shown, second: Shown) -> Shown:
    """Return both at once: the larger distances, the smaller headroom, everything that is pressed."""
    tight = min((first, second), key=lambda shown: shown.headroom_bits)
    pressed = {(v.module, v.op, v.backward): v for v in (*first.pressed, *second.pressed)}
    return Shown(
        why=first.why or second.why,
        loss_gap=max(first.loss_gap, second.loss_gap),
        cosine=min(first.cosine, second.cosine),
        headroom_bits=tight.headroom_bits,
        worst=tight.worst,
        pressed=tuple(pressed.values()),
        blamed=tuple(dict.fromkeys((*first.blamed, *second.blamed))),
        loss_dtype=first.loss_dtype,
        casts=first.casts,
        bytes=first.bytes,
        products=first.products,
    )
