"""One window of real batches, looked at from every side that a precision can fail on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from nanstop.diagnose.findings.forward.ns208_silent_precision_loss import strays
from nanstop.errors import NanstopError
from nanstop.measure.float32_distance import (
    WindowOutputs,
    gradient_rows,
    logit_gap,
    run_window,
)
from nanstop.measure.pooled_token import pooled_rows
from nanstop.measure.position_rounding import coarse_rows
from nanstop.measure.precision_loss import drift_rows
from nanstop.measure.ranges import op_formats, probe_ranges
from nanstop.measure.updates import probe_update
from nanstop.records import Probe
from nanstop.remedies.precision import reference
from nanstop.replay.conditions import without_dropout
from nanstop.replay.path import Path
from nanstop.replay.step import Step, scale_of

T = TypeVar("T")

MAX_MICROS = 2
"""Micro-batches of a window whose operations are recorded;
losses, gradients and the update are of all of them.
"""


def probe(step: Step) -> Probe:
    """Return ranges, gradients, updates and the distance to float32 of one window, at the run's own
    loss scale.

    ``step``: a window of the user's real objective with its update still to come, as
    ``hosts.trainer.first_window.first_step`` hands to its job, as a raw loop's watch hands to
    ``gauge``, or any step of a run. It is run three times whole and its first ``MAX_MICROS``
    micro-batches four times more, under the recorder and in float32 (room for a float32 copy of
    every half parameter), with dropout off, and what else is drawn the same in float32, so that
    formats can be compared. Everything is undone bitwise. Synchronises the device. What cannot be
    measured (out of memory, an optimizer that raises) is in ``problems``; raises nothing but
    ``KeyboardInterrupt`` and the like.
    """
    began = time.perf_counter()
    stage = _Stages()
    micros = range(min(MAX_MICROS, len(step.batches)))
    found: dict[str, Any] = {}
    path = Path()
    along = nullcontext if step.facts.compiled else path.recorded
    with without_dropout(step.view.root):
        own = stage("the window", lambda: run_window(step, along=along))
        if own is not None:
            found |= _as_it_is(step, stage, micros)
            found |= _against_float32(step, stage, micros, own, path)
        probed = Probe(at=step.id, num_micro=len(step.batches), **found)
        if strays(probed):
            rows = stage(
                "digits",
                lambda: drift_rows(step, under=lambda: reference(step.view), micros=micros),
            )
            probed = replace(probed, drift=rows or ())
    return replace(probed, problems=tuple(stage.problems), seconds=time.perf_counter() - began)


def _as_it_is(step: Step, stage: _Stages, micros: range) -> dict[str, Any]:
    """Return what needs no float32: positions, pooled tokens and the update."""
    coarse = stage("positions", lambda: coarse_rows(step, micros=micros))
    pooled = stage("the pooled token", lambda: pooled_rows(step))
    update = stage("the update", lambda: probe_update(step))
    found: dict[str, Any] = {"coarse": coarse or (), **(pooled or {})}
    if update is not None:
        found |= {"lr": update.lr, "updates": update.rows}
        found |= {"states": update.states, "broken": update.broken}
    return found


def _against_float32(
    step: Step, stage: _Stages, micros: range, own: WindowOutputs, path: Path
) -> dict[str, Any]:
    """Return ranges, and the distances of the window in the run's formats to the same window in
    float32.
    """

    def wide() -> AbstractContextManager[None]:
        return reference(step.view)

    scale = scale_of(step.view)
    found: dict[str, Any] = {"loss": _mean(own.losses), "loss_scale": scale}
    played = partial(path.played, choices=False)
    true = stage("float32", lambda: run_window(step, under=wide, along=played))
    formats = stage("formats", lambda: op_formats(step, micros=micros))
    if true is None or formats is None:
        return found
    measured = {
        "ranges": lambda: probe_ranges(step, formats=formats, under=wide, micros=micros),
        "gradients": lambda: gradient_rows(own, true, formats, scale or 1.0),
        "logits": lambda: logit_gap(own, true),
    }
    found["reference_loss"] = _mean(true.losses)
    for name, measure in measured.items():
        value = stage(name, measure)
        if value is not None:
            found[name] = value
    return found


class _Stages:
    """Runs one measurement after the other;
    one that fails becomes a problem and costs only itself.
    """

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


def _mean(losses: tuple[float, ...]) -> float | None:
    return sum(losses) / len(losses) if losses else None
