"""Charts as SVG without scripts, drawn by pygal and coloured by the style of the page.

Every chart is an image with a title and a description; whoever places one puts its numbers into a
table beside it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

WIDTH, HEIGHT = 480, 230
MISSING = "charts need pygal: `pip install nanstop[report]`"

ChartPoint = tuple[float | None, float | None]
ChartLine = tuple[ChartPoint, ...]

_COORDINATES = re.compile(r"-?\d+\.\d+")
_SERIES = re.compile(r"\bserie-(\d+)\b")
_EXTRAS = ("defs", "style", "script", "title", "desc")
_EXTRA_CLASSES = ("background", "plot text-overlay", "plot tooltip-overlay", "titles")
_LARGEST = 1e300
MOST_ROUND = 6
"""Marks of an axis."""
_DECADES = 1.7
"""Orders of magnitude between smallest and largest from which on a scale is logarithmic."""


def are_available() -> bool:
    """Return whether the library that draws is installed."""
    return find_spec("pygal") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """``lines``: by the class that the page's style gives a colour to. ``log2``: decades are powers
    of two. ``powers``: places across are exponents of two, those up are counts. ``described``: what
    a screen reader says. ``name``: unique on the page.
    """

    name: str
    title: str
    described: str
    lines: tuple[tuple[str, ChartLine], ...]
    marks: tuple[tuple[str, tuple[float, ...]], ...] = ()
    log2: bool = False
    powers: bool = False


def drawn(chart: Chart) -> str:
    """Return the chart as an SVG element; "" where it has no two places with a finite point."""
    points = [(x, y) for _, line in chart.lines for x, y in line if x is not None and y is not None]
    if len({x for x, _ in points}) < 2:
        return ""
    steps = [x for x, _ in points] + [step for _, marked in chart.marks for step in marked]
    across, up = Scale.linear(steps), Scale.of([y for _, y in points], log2=chart.log2)
    series = [
        (kind, [_placed(point, across, up) for point in line], len(line) == 1)
        for kind, line in chart.lines
    ]
    for kind, marked in chart.marks:
        upright: list[ChartPoint] = []
        for x in (across.place(step) for step in marked):
            upright += [(x, 0.0), (x, 1.0), (None, None)]
        series.append((kind, upright, False))
    return _svg(chart, series, across, up)


def _placed(point: ChartPoint, across: Scale, up: Scale) -> ChartPoint:
    x, y = point
    return (None, None) if x is None or y is None else (across.place(x), up.place(y))


@dataclass(frozen=True, slots=True)
class Scale:
    """Where values are drawn, from 0 to 1. ``base``: of the logarithm; 0 for a linear scale.

    ``least``: stands for all that is smaller. ``ends``: values at 0 and 1, or their logarithms.
    """

    base: int
    least: float
    ends: tuple[float, float]

    @classmethod
    def linear(cls, values: Sequence[float]) -> Scale:
        """Return a linear scale that holds all of ``values``, with some room."""
        low, high = min(values), max(values)
        room = (high / 2 - low / 2) * 0.1 or abs(high) * 0.05 or 1.0
        return cls(0, -_LARGEST, (max(low - room, -_LARGEST), min(high + room, _LARGEST)))

    @classmethod
    def of(cls, values: Sequence[float], *, log2: bool = False) -> Scale:
        """Return a scale for ``values``: logarithmic where they are positive and far apart."""
        positive = [value for value in values if value > 0.0]
        spread = math.log10(max(positive)) - math.log10(min(positive)) if positive else 0.0
        if not positive or min(values) < 0.0 or not (log2 or spread > _DECADES):
            return cls.linear(values)
        base = 2 if log2 else 10
        low, high = math.log(min(positive), base), math.log(max(positive), base)
        room = max((high - low) * 0.06, 0.3)
        return cls(base, min(positive), (low - room, high + room))

    def place(self, value: float) -> float:
        """Return where a value is, from 0 to 1."""
        known = min(max(value, self.least), _LARGEST)
        return self._share(math.log(known, self.base) if self.base else known)

    def _share(self, at: float) -> float:
        low, high = self.ends
        return (at / 2 - low / 2) / (high / 2 - low / 2)

    def ticks(self, *, whole: bool = False) -> list[dict[str, Any]]:
        """Return at most seven places with what they say; ``whole``: at whole numbers only."""
        low, high = self.ends
        if not self.base:
            places = _round_places(low, high)
            places = [at for at in places if at == int(at)] if whole else places
            said = ((at, f"{at:.10g}" if whole else f"{at:.4g}") for at in places)
        else:
            first, last = math.ceil(low), math.floor(high)
            exponents = range(first, last + 1, max(1, math.ceil((last - first) / 5)))
            said = ((at, self._label(at)) for at in exponents)
            if len(exponents) < 2:
                few = (low, (low + high) / 2, high)
                said = ((at, f"{self.base**at:.2g}") for at in few)
        return [{"value": self._share(at), "label": label} for at, label in said]

    def _label(self, exponent: int) -> str:
        if self.base == 2:
            return f"{2**exponent}" if 0 <= exponent < 20 else f"2^{exponent}"
        return f"{10.0**exponent:g}" if -4 < exponent < 5 else f"1e{exponent}"


def _round_places(low: float, high: float) -> list[float]:
    """Return round numbers from ``low`` to ``high``: steps of 1, 2 or 5 times a power of ten."""
    span = high / MOST_ROUND - low / MOST_ROUND
    if not span > 0.0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span))
    jump = next((f * power for f in (1, 2, 5, 10) if f * power >= span), 10 * power)
    first = math.ceil(low / jump)
    places = [(first + i) * jump for i in range(MOST_ROUND + 1)]
    return [at for at in places if low <= at <= high] or [low]


def _library() -> tuple[Any, Any]:
    """Return pygal and its class of styles; the process imports as it did before.

    pygal adds a finder of modules that Python 3.11 and before warn of at each later import, and
    its importlib_metadata puts itself in the place of the standard library's, which knows all that
    pygal asks it for.
    """
    import importlib.metadata

    stands_in = "importlib_metadata" not in sys.modules
    if stands_in:
        sys.modules["importlib_metadata"] = importlib.metadata
    try:
        import pygal
        from pygal.style import Style
    finally:
        if stands_in:
            del sys.modules["importlib_metadata"]
    for finder in [one for one in sys.meta_path if type(one).__module__ == "pygal"]:
        sys.meta_path.remove(finder)
    return pygal, Style


def _svg(chart: Chart, series: Sequence[Any], across: Scale, up: Scale) -> str:
    pygal, style = _library()
    before = "2^" if chart.powers else ""
    drawing = pygal.XY(
        width=WIDTH,
        height=HEIGHT,
        margin=8,
        margin_left=4,
        spacing=6,
        range=(0.0, 1.0),
        xrange=(0.0, 1.0),
        show_legend=False,
        show_dots=False,
        allow_interruptions=True,
        dots_size=3,
        x_labels=[
            {**tick, "label": f"{before}{tick['label']}"} for tick in across.ticks(whole=True)
        ],
        y_labels=up.ticks(whole=chart.powers),
        style=style(label_font_size=15, major_label_font_size=15),
        no_prefix=True,
        js=[],
        css=[],
    )
    for kind, points, is_alone in series:
        drawing.add(kind, points, show_dots=is_alone or kind in DOTS, stroke=kind not in DOTS)
    kinds = [kind for kind, _, _ in series]
    return _plain(drawing.render_tree(), chart, kinds)


DOTS = ("nonfinite",)
"""Lines that are single dots."""


def _plain(root: Any, chart: Chart, kinds: Sequence[str]) -> str:
    """Return what pygal drew without its scripts, styles and comments, named for screen readers."""
    from pygal.etree import etree  # lxml's elements where a script has it

    for parent in list(root.iter()):
        for child in list(parent):
            words = str(child.get("class") or "") if isinstance(child.tag, str) else ""
            if child.tag in _EXTRAS or not isinstance(child.tag, str) or words in _EXTRA_CLASSES:
                parent.remove(child)
    for element in root.iter():
        number = _SERIES.search(element.get("class") or "")
        if number is not None:
            element.set("class", f"line {kinds[int(number[1])]}")
        for name in {"d", "x", "y", "cx", "cy"} & set(element.keys()):
            element.set(name, _COORDINATES.sub(_rounded, element.get(name)))
    root.attrib.pop("id", None)
    labels = f"{chart.name}-title", f"{chart.name}-text"
    root.set("class", "chart")
    root.set("role", "img")
    root.set("aria-labelledby", " ".join(labels))
    for at, (label, text) in enumerate(zip(labels, (chart.title, chart.described), strict=True)):
        element = etree.Element("title" if at == 0 else "desc", {"id": label})
        element.text = text
        root.insert(at, element)
    return etree.tostring(root, encoding="unicode")


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.1f}"
