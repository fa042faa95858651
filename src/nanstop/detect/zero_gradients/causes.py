"""Why every gradient of a step is exactly 0, as far as an experiment shows it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.zero_gradients.flat_steps import passed_by
from nanstop.detect.zero_gradients.gradient_end import gradient_end
from nanstop.detect.zero_gradients.stuck import stuck
from nanstop.detect.zero_gradients.times_zero import times_zero
from nanstop.replay.undo import attributes_kept

if TYPE_CHECKING:
    from nanstop.detect.zero_gradients.standstill import Standstill
    from nanstop.records import GradientPath
    from nanstop.replay.step import Step

GONE_FOR = 16
"""Updates without a gradient after which it is asked whether any can arrive, where some did: a
script may leave its loss out for a few.
"""
_MOST_ENTRIES = 4


def none_arrives(
    step: Step, path: GradientPath, elsewhere: float, still: Standstill
) -> GradientPath | None:
    """Return with ``path`` why every gradient is 0, None where that is not known.
    ``elsewhere``: the largest one with other weights; ``still``: since when.

    Undone bitwise; raises what the step raises. Synchronises the device.
    """
    if elsewhere > 0.0:
        zeros = stuck(step)
        return replace(path, stuck=zeros) if zeros else None
    if step.calls_script or elsewhere != 0.0:
        return None
    zeroed_at = times_zero(step)
    if zeroed_at is not None:
        return replace(path, zeroed_at=zeroed_at)
    trained = {n: p for n, p in step.view.root.named_parameters() if p.requires_grad}
    found = passed_by(step, tuple(trained.values()))
    if found is None:
        gone = _gone(step, path, still.until) if still.num_zero >= GONE_FOR else None
        if gone is not None:
            return gone
        zeros = _zeros(step)
        dropped = () if zeros else _dropped(step)
        if not zeros and not dropped:
            return None
        return replace(path, zeros=zeros, dropped=dropped, end=gradient_end(step))
    behind = tuple(n for n, p in trained.items() if any(p is one for one in found.parameters))
    return replace(path, behind=behind, flat_at=found.line, is_own=found.is_own)


def _gone(step: Step, path: GradientPath, until: int | None) -> GradientPath | None:
    """Return with ``path`` that a backward gives no trained tensor a gradient, not even zeros, as
    after adapters were merged; None where it gives one.
    """
    trained = {n: p for n, p in step.view.root.named_parameters() if p.requires_grad}
    with step.isolated(), torch.enable_grad():
        step.run(0)
        if any(p.grad is not None for p in trained.values()):
            return None
    missing = tuple(trained)[:8]
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
