"""What the first bad operation read and made, by exponent, against the ends of the formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nanstop.diagnose.evidence.reading import bad_counts
from nanstop.records import FORMAT_MAX, OpEvent, TensorStats
from nanstop.records.formats import SMALLEST
from nanstop.report.html.charts import Chart, ChartPoint, drawn
from nanstop.wording import counted

ENDS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("end-e4m3", "fp8 e4m3", (FORMAT_MAX["float8_e4m3fn"],)),
    ("end-e5m2", "fp8 e5m2", (FORMAT_MAX["float8_e5m2"],)),
    ("end-fp16", "fp16", (FORMAT_MAX["float16"], SMALLEST["float16"])),
    ("end-wide", "bf16 and fp32", (FORMAT_MAX["float32"],)),
)
"""Where formats end, at the top and, of fp16, at the bottom."""
MOST = 4
BELOW, ABOVE = 12, 20
"""Doublings around the values within which an end is shown; where there is none, the next above."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """``said``: the same in a sentence."""

    title: str
    svg: str
    key: tuple[tuple[str, str], ...]
    said: str


def histograms(
    event: OpEvent | None, name: str, *, draw: bool, say: Callable[[str], str] = str
) -> Iterator[Histogram]:
    """Yield a histogram of each operand and result that values were counted of; none where they
    were not.
    """
    if event is None:
        return
    roles = [("input", one) for one in event.inputs] + [("output", one) for one in event.outputs]
    shown = [(role, stats) for role, stats in dict.fromkeys(roles) if len(stats.exponents) > 0]
    for at, (role, stats) in enumerate(shown[-MOST:]):
        found, chart = _histogram(role, stats, f"{name}-{at}")
        spoken = replace(chart, title=say(chart.title), described=say(chart.described))
        yield replace(found, svg=drawn(spoken) if draw else "")


def _histogram(role: str, stats: TensorStats, name: str) -> tuple[Histogram, Chart]:
    known = dict(stats.exponents)
    low, high = min(known), max(known) + 1
    places = [(kind, label, tuple(map(math.log2, ends))) for kind, label, ends in ENDS]
    known_ends = sorted(at for *_, ends in places for at in ends)
    shown = [at for at in known_ends if low - BELOW <= at <= high + ABOVE]
    shown = shown or [at for at in known_ends if at >= high][:1]
    near = [(kind, label, tuple(at for at in ends if at in shown)) for kind, label, ends in places]
    marks = tuple((kind, ends) for kind, _, ends in near if ends)
    bars: list[ChartPoint] = []
    for exponent, count in sorted(known.items()):
        bars += [(exponent, 0.5), (exponent, count), (exponent + 1, count), (exponent + 1, 0.5)]
        bars.append((None, None))
    shape = ", ".join(str(size) for size in stats.shape)
    title = f"{role}: {stats.dtype} [{shape}]"
    most = max(known, key=known.__getitem__)
    said = f"{counted(sum(known.values()), 'value')} from 2^{low} to 2^{high}, most near 2^{most}"
    said += "" if stats.finite else f"; not finite: {bad_counts(stats)}"
    said += f"; {counted(stats.zeros, 'zero')}" if stats.zeros else ""
    chart = Chart(
        name=name,
        title=title,
        described=said,
        lines=(("bars", tuple(bars)),),
        marks=marks,
        powers=True,
    )
    key = tuple((kind, f"end of {label}") for kind, label, ends in near if ends)
    return Histogram(title, "", key, said), chart
