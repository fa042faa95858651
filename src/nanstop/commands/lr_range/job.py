"""The job of ``nanstop lr-range``: a sweep of learning rates in place of the training that a
script asks for.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from nanstop.commands.lr_range.recorder import LrRecorder
from nanstop.commands.lr_range.result import Sweep
from nanstop.errors import NanstopError
from nanstop.hosts.patch_table import Table
from nanstop.process.inject.dry_run import DryRun
from nanstop.process.inject.dry_run_child import Target

ON_EVERY_RANK = True
"""A sweep trains, and ranks train together."""

_BY_HAND = "(step, model, optimizer) tests a step of your own"


def run(target: Target, options: Mapping[str, Any]) -> Sweep:
    """Return what a trainer's sweep has measured, up to where its training raised if it did."""
    from nanstop.commands.lr_range.on_trainer import LrSweep

    if target.trainer is None:
        raise NanstopError("this job sweeps trainers; a loop is swept while it runs")
    recorder = LrRecorder(**options)
    LrSweep(recorder).prepare(target.trainer)
    try:
        target.trainer.train()
    except Exception as error:  # the script's own: shown as the script would have shown it
        traceback.print_exc()
        recorder.ended = f"{type(error).__name__}: {error}"[:500]
    return recorder.measured()


def open_loop(dry_run: DryRun, table: Table) -> Callable[[Any, Any], Any]:
    """Return what raw loops open as their session: every optimizer step gets its planned rate."""
    from nanstop.commands.lr_range import on_loop

    return on_loop.install(table, dry_run, LrRecorder(**dry_run.options))
