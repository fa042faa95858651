"""One window of real batches, looked at from every side that a precision can fail on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from nanstop.core.agreement import gradient_rows, logit_gap, run_window, without_dropout
from nanstop.core.coarse import coarse_rows
from nanstop.core.drift import drift_rows
from nanstop.core.pooling import num_rows_pooled_at_padding
from nanstop.core.probe import op_formats, probe_ranges
from nanstop.core.step import Step
from nanstop.core.updates import probe_update
from nanstop.errors import NanstopError
from nanstop.records import Probe
from nanstop.remedies.precision import reference

T = TypeVar("T")

MAX_MICROS = 2
"""Micro-batches of a window whose operations are recorded; losses, gradients and the update are of all of them."""


def probe(
    step: Step,
    *,
    max_micros: int = MAX_MICROS,
    clock: Callable[[], float] = time.perf_counter,
) -> Probe:
    """Return ranges, gradients, updates and the distance to float32 of one window, at the run's own loss scale.

    ``step``: a window of the user's real objective with its update still to come, as ``adapters.probing.first_step``
    hands to its job, as a raw loop's watch hands to ``gauge``, or any step of a run. It is run about ten times, under
    the recorder and in float32 (room for a float32 copy of every half parameter), with dropout off so that formats can
    be compared. Everything is undone bitwise. Synchronises the device. What cannot be measured (out of memory, an
    optimizer that raises) is in ``problems``; raises nothing but ``KeyboardInterrupt`` and the like.
    """
    began = clock()
    stage = _Stages()
    micros = range(min(max_micros, len(step.batches)))

    def wide() -> Any:
        return reference(step.view)

    with without_dropout(step.view.root):
        formats = stage("formats", lambda: op_formats(step, micros=micros))
        own = stage("the run's own formats", lambda: run_window(step))
        true = stage("float32", lambda: run_window(step, under=wide))
        ranges = None
        if formats is not None:
            ranges = stage(
                "ranges", lambda: probe_ranges(step, formats=formats, under=wide, micros=micros)
            )
        coarse = stage("positions", lambda: coarse_rows(step, micros=micros))
        drift = stage("digits", lambda: drift_rows(step, under=wide, micros=micros))
        pooled = stage("the pooled token", lambda: num_rows_pooled_at_padding(step))
        update = stage("the update", lambda: probe_update(step))
        scale = _scale(step)
        gradients = logits = None
        if own is not None and true is not None and formats is not None:
            gradients = stage("gradients", lambda: gradient_rows(own, true, formats, scale or 1.0))
            logits = stage("logits", lambda: logit_gap(own, true))
    return Probe(
        at=step.id,
        num_micro=len(step.batches),
        loss=_mean(own.losses) if own is not None else None,
        reference_loss=_mean(true.losses) if true is not None else None,
        loss_scale=scale,
        lr=update.lr if update is not None else None,
        ranges=ranges or (),
        gradients=gradients or (),
        updates=update.rows if update is not None else (),
        states=update.states if update is not None else (),
        broken=update.broken if update is not None else (),
        logits=logits,
        coarse=coarse or (),
        drift=drift or (),
        num_rows_pooled_at_padding=pooled or 0,
        problems=tuple(stage.problems),
        seconds=clock() - began,
    )


class _Stages:
    """Runs one measurement after the other; one that fails becomes a problem and costs only itself."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __call__(self, name: str, measure: Callable[[], T]) -> T | None:
        try:
            return measure()
        except Exception as error:  # the user's own code runs in there: anything may come out of it
            said = error.message if isinstance(error, NanstopError) else str(error)
            first_line = said.partition("\n")[0]
            self.problems.append(f"{name}: {first_line or type(error).__name__}")
            return None


def _scale(step: Step) -> float | None:
    scaler = step.view.scaler
    return float(scaler.get_scale()) if scaler is not None else None


def _mean(losses: tuple[float, ...]) -> float | None:
    return sum(losses) / len(losses) if losses else None
