"""A probe as a table: the narrowest places first, then what the run loses against float32."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from typing import TextIO

from nanstop.diagnose.evidence.reading import counted, listed, number, op_name, percent
from nanstop.records import Probe, RangeRow
from nanstop.records.formats import HALF

MOST_ROWS = 12
_NUMBERS = ("headroom", "largest", "underflow")
_WORDS = ("format", "phase", "operation")
_UNWRAPPED = 400
_LEAST_SHOWN = 0.001
_ROOMY = 32.0
"""Bits of headroom beyond which no place is worth a row."""


def render_probe(probe: Probe, *, width: int | None = None, stream: TextIO | None = None) -> str:
    """Return a probe as text: a table of at most 12 rows with the least headroom, a count, and a line for each loss.

    ``width`` None: that of the terminal, or no wrapping where ``stream`` (stdout by default) is none. ``probe`` itself
    is the JSON form (``report.codec``).
    """
    if width is None:
        terminal = (stream or sys.stdout).isatty()
        width = shutil.get_terminal_size().columns if terminal else _UNWRAPPED
    return "\n".join((*_head(probe), *_table(probe, width), *_losses(probe), *_problems(probe)))


def _head(probe: Probe) -> Iterator[str]:
    scale = f", loss scale {number(probe.loss_scale)}" if probe.loss_scale else ""
    noun = "micro-batch" if probe.num_micro == 1 else "micro-batches"
    yield f"probe: {probe.num_micro} {noun}{scale}"
    if probe.loss is not None and probe.reference_loss is not None:
        yield f"  loss {probe.loss:.6g}, in float32 {probe.reference_loss:.6g}"


def _narrow(probe: Probe) -> list[RangeRow]:
    """Return the rows of formats whose range can be left; where the run has none, all."""
    narrow = [row for row in probe.ranges if row.dtype not in ("float32", "float64")]
    return narrow or list(probe.ranges)


def _table(probe: Probe, width: int) -> Iterator[str]:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    rows = _narrow(probe)
    if not rows or rows[0].headroom_bits > _ROOMY:
        if rows:
            yield f"  every value has {_bits(rows[0])} or more to the end of its format"
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in _NUMBERS:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in _WORDS:
        table.add_column(heading, no_wrap=heading != "operation", overflow="fold")
    for row in rows[:MOST_ROWS]:
        table.add_row(*_cells(row))
    console = Console(width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    yield from (line.rstrip() for line in captured.get().rstrip("\n").split("\n"))
    if len(rows) > MOST_ROWS:
        yield f"and {len(rows) - MOST_ROWS} with {_bits(rows[MOST_ROWS])} or more"


def _bits(row: RangeRow) -> str:
    return "all" if math.isinf(row.headroom_bits) else f"{row.headroom_bits:.1f} bits"


def _cells(row: RangeRow) -> tuple[str, ...]:
    under = f"{row.underflow:.1%}" if row.underflow >= _LEAST_SHOWN else ""
    place = f"{row.module} {op_name(row.op)}".strip()
    return _bits(row), f"{row.absmax:.3g}", under, row.dtype, row.phase, place


def _losses(probe: Probe) -> Iterator[str]:
    lost, moved = (sum(getattr(r, f) for r in probe.updates) for f in ("num_lost", "num_total"))
    if moved:
        formats = ", ".join(dict.fromkeys(row.dtype for row in probe.updates))
        rate = f" at learning rate {probe.lr:g}" if probe.lr is not None else ""
        yield f"updates: {percent(lost, moved)} lost to rounding ({formats}{rate})"
    flushed, present, bare = (
        sum(getattr(row, field) for row in probe.gradients)
        for field in ("num_flushed", "num_nonzero", "num_flushed_unscaled")
    )
    if present:
        without = f", {percent(bare, present)} without the loss scale" if probe.loss_scale else ""
        yield f"gradients: {percent(flushed, present)} flushed to zero{without}"
    vanished, kept = (
        sum(getattr(r, f) for r in probe.states) for f in ("num_vanished", "num_total")
    )
    if vanished:
        yield f"second moments: {percent(vanished, kept)} are zero"
    if probe.broken:
        yield f"not finite after the update: {listed(probe.broken)}"
    if probe.logits is not None and any(row.dtype in HALF for row in probe.ranges):
        gap = probe.logits
        yield (
            f"logits off float32: {gap.logit_mean:.2g} a token on average, {gap.logit_max:.2g} at most; "
            f"log-probabilities {gap.logprob_mean:.2g} and {gap.logprob_max:.2g}"
        )
    if probe.coarse:
        yield f"too coarse for positions: {listed(dict.fromkeys(r.module for r in probe.coarse))}"
    if probe.num_rows_pooled_at_padding:
        yield f"{counted(probe.num_rows_pooled_at_padding, 'row')} scored at a padding token"


def _problems(probe: Probe) -> Iterator[str]:
    for problem in probe.problems:
        yield f"not measured: {problem}"
