"""What the trial of a plan on one batch showed.

How far from float32, how near to the format's end, where it broke.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanstop.commands.plan.narrow_values import (
    Narrow,
    births,
    bytes_written,
    num_casts,
    product_work,
)
from nanstop.errors import NanstopError
from nanstop.measure.ranges import headroom_bits
from nanstop.numerics.tensors import format_limit, format_name
from nanstop.prove.reference.agreement import cosine
from nanstop.tracing.record_step import Recording

LOSS_TOLERANCE = 1e-3
MIN_COSINE = 0.999
MIN_HEADROOM = 2.0

_TINY_LOSS = 1e-3
_BAD_LOSS = "the loss is not finite"


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """What the trial of a plan showed, the worst of all batches.

    ``pressed``: what is too large for the plan's format, or would leave it after two doublings;
    ``blamed``: modules where the run broke otherwise. ``why``: what is wrong, "" where nothing is.
    ``largest``: gradient in the format, without the loss scale.
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
    largest: float
    values: tuple[Narrow, ...] = ()
    """What the run held in the format, loss not scaled."""

    @property
    def passes(self) -> bool:
        """Whether the plan agrees with float32 within its tolerances; ``why`` says why not."""
        return not self.why


@dataclass(frozen=True, slots=True)
class Exact:
    """The float32 run of one batch."""

    loss: float
    grads: Mapping[str, Tensor]


def exact_of(run: Recording) -> Exact:
    """Return what a float32 run gave.

    Raises what it raised; ``NanstopError`` where it can't be held against.
    """
    if run.error is not None:
        raise run.error
    assert run.loss is not None
    if not run.grads:
        raise NanstopError(
            "the calibration gives no gradient",
            hint="are all parameters frozen, or does the loss not depend on them?",
        )
    if run.failed:
        raise NanstopError(
            "loss or gradients are not finite even in float32: no format cures that",
            hint="`nanstop run` names the operation; look at the batch, the mask and the weights",
        )
    return Exact(float(run.loss), run.grads)


def outcome_of(
    run: Recording, values: tuple[Narrow, ...], exact: Exact, dtype: torch.dtype, scale: float
) -> PlanOutcome:
    """Return what a recorded run under a plan showed.

    ``values``: what it held in ``dtype``, loss not scaled.
    """
    pressed, worst = _at_scale(values, dtype, scale)
    bad = tuple(name for name in run.failed if name != "loss")
    gap = loss_gap(None if run.loss is None else float(run.loss), exact.loss)
    near = cosine(run.grads, exact.grads) if not bad and run.error is None else -1.0
    why = _wrong(run, gap, near, bad)
    return PlanOutcome(
        why=_both(worst, dtype, why),
        loss_gap=gap,
        cosine=near,
        headroom_bits=_headroom(worst, dtype),
        worst=worst,
        pressed=pressed,
        blamed=_blamed(run) if why and not pressed else (),
        loss_dtype="" if run.loss is None else format_name(run.loss.dtype),
        casts=num_casts(run),
        bytes=bytes_written(run),
        products=product_work(run, dtype),
        largest=max((v.absmax for v in values if v.backward), default=0.0),
        values=values,
    )


def at_other_scale(outcome: PlanOutcome, dtype: torch.dtype, scale: float) -> PlanOutcome | None:
    """Return what another run with the loss times ``scale`` would show, where that is known: the
    forward knows no scale, and one that leaves the format with its loss fails at any.
    """
    is_bad = bool(outcome.loss_dtype) and math.isinf(outcome.loss_gap)
    if not is_bad or all(value.backward for value in outcome.pressed):
        return None
    pressed, worst = _at_scale(outcome.values, dtype, scale)
    return replace(
        outcome,
        why=_both(worst, dtype, _BAD_LOSS),
        headroom_bits=_headroom(worst, dtype),
        worst=worst,
        pressed=pressed,
    )


def _at_scale(
    values: tuple[Narrow, ...], dtype: torch.dtype, scale: float
) -> tuple[tuple[Narrow, ...], Narrow | None]:
    """Return the values that press against the format, and the largest of all."""
    limit = format_limit(dtype) / 2**MIN_HEADROOM
    sized = [replace(v, absmax=v.absmax * scale) if v.backward else v for v in values]
    pressed = tuple(v for v in sized if v.absmax > limit)
    return pressed, max(sized, key=lambda value: value.absmax, default=None)


def _headroom(worst: Narrow | None, dtype: torch.dtype) -> float:
    return headroom_bits(worst.absmax, format_name(dtype)) if worst is not None else math.inf


def _both(worst: Narrow | None, dtype: torch.dtype, why: str) -> str:
    tight = _tight(worst, format_name(dtype)) if worst is not None else ""
    return "; ".join(filter(None, (tight, why)))


def worse(first: PlanOutcome, second: PlanOutcome) -> PlanOutcome:
    """Return both at once.

    The larger distances, the smaller headroom, everything that is pressed.
    """
    tight = min((first, second), key=lambda outcome: outcome.headroom_bits)
    pressed = {(v.module, v.op, v.backward): v for v in (*first.pressed, *second.pressed)}
    return replace(
        first,
        why=first.why or second.why,
        loss_gap=max(first.loss_gap, second.loss_gap),
        cosine=min(first.cosine, second.cosine),
        headroom_bits=tight.headroom_bits,
        worst=tight.worst,
        pressed=tuple(pressed.values()),
        blamed=tuple(dict.fromkeys((*first.blamed, *second.blamed))),
        largest=max(first.largest, second.largest),
    )


def loss_gap(loss: float | None, exact: float) -> float:
    """Return the relative distance of two losses, inf where one is not finite."""
    if loss is None or not math.isfinite(loss):
        return math.inf
    return abs(loss - exact) / max(abs(exact), _TINY_LOSS)


def _wrong(run: Recording, gap: float, near: float, bad: tuple[str, ...]) -> str:
    if run.error is not None:
        text = " ".join(str(run.error).split())[:160]
        return f"{type(run.error).__name__} in `{_last_module(run)}`: {text}"
    if math.isinf(gap):
        return _BAD_LOSS
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


def _blamed(run: Recording) -> tuple[str, ...]:
    """Return where a run broke: where it raised, else where non-finite values were born."""
    return (_last_module(run),) if run.error is not None else births(run)


def _last_module(run: Recording) -> str:
    return run.trace.ops[-1].module if run.trace.ops else ""
