"""When a growing range will leave its format: a straight line through its logarithm, or nothing.

What grows by a factor a step (a residual stream that no norm holds, a weight that runs away) is a
straight line in doublings. The line is Theil and Sen's (the median of the slopes of all pairs): a
lone spike does not move it, and up to 29 % of wild points do not either, where least squares
follows a single one. https://doi.org/10.1080/01621459.1968.10480934
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import median

from nanstop.frozen import frozen

MIN_SAMPLES = 7
MIN_GROWN_BITS = 2.0
"""Doublings that must have been seen: noise and a drift of the data stay below."""
AHEAD_STEPS = 60.0
"""Steps ahead beyond which nothing is foretold:
what levels off before is healthy, and looks like growth until then.
"""
LEAST_BITS, FAR_BITS = 0.75, 2.0
"""Doublings ahead within which growth is foretold however slow it is, and beyond which it is not
however fast.
"""
STRAIGHT = 0.8
"""Least slope of the later half against the whole: what levels off has less."""
NOISE_BITS = 0.1
"""The least scatter assumed: the range of one micro-batch stands for that of all."""
BAND = 3.0
"""Standard errors on both sides of the line."""
WILD = 4.0
MAX_WILD_SHARE = 0.2


@frozen
class Growth:
    """``rate``: doublings a step. ``reaches``: first and last step between which the range
    leaves its format.
    """

    rate: float
    reaches: tuple[int, int]


@frozen
class _Line:
    """``level`` at step ``middle``, ``slope`` and scatter ``noise`` of bits over steps;
    ``spread``: of the steps.
    """

    slope: float
    level: float
    noise: float
    middle: float
    spread: float
    count: int

    def at(self, step: float) -> float:
        """Return the fitted value (bits over the end of the format) at a step."""
        return self.level + self.slope * (step - self.middle)

    def error(self, step: float) -> float:
        """Return the standard error of a new value at ``step``: its own scatter and what is not
        known of the line.
        """
        own = 1.0 + 1.0 / self.count + (step - self.middle) ** 2 / self.spread
        return self.noise * math.sqrt(own)


def foretell(steps: Sequence[int], bits: Sequence[float]) -> Growth | None:
    """Return when a range will leave its format, or None where that cannot be said well.

    ``steps`` rise; ``bits``: log2 of the range over the end of its format, below 0 while it fits,
    all finite. The longest run of samples up to the present that is straight is used: what was
    before the growth began is left away.
    """
    first = 0
    while len(steps) - first >= MIN_SAMPLES:
        found = _foretold(steps[first:], bits[first:])
        if found is not None:
            return found
        first += max(1, (len(steps) - first) // 4)
    return None


def suspected(steps: Sequence[int], bits: Sequence[float]) -> float | None:
    """Return in how many steps a range that may be growing would leave its format;
    None for one that is at rest.

    A rough look at the last samples, to say which deserve more of them.
    """
    steps, bits = steps[-24:], bits[-24:]
    if len(steps) < 3:
        return None
    third = max(1, len(steps) // 3)
    grown = median(bits[-third:]) - median(bits[:third])
    span = median(steps[-third:]) - median(steps[:third])
    left = -median(bits[-third:])
    if span <= 0 or grown < 0.75 or left > 8.0:
        return None
    return max(left, 0.0) * span / grown


def _foretold(steps: Sequence[int], bits: Sequence[float]) -> Growth | None:
    line = _line(steps, bits)
    now = steps[-1]
    grown = line.slope * (now - steps[0])
    # What has begun to bend away has more left than the line says.
    left = max(-line.at(now), -bits[-1] - NOISE_BITS)
    if grown < max(MIN_GROWN_BITS, left, 6.0 * line.noise):
        return None
    if left > min(max(LEAST_BITS, AHEAD_STEPS * line.slope), FAR_BITS):
        return None
    if not _is_straight(line, steps, bits):
        return None
    earliest = _crossing(line, now, BAND)
    latest = _crossing(line, now, -BAND)
    if earliest is None or latest is None:
        return None
    return Growth(line.slope, (max(math.floor(earliest), now + 1), max(math.ceil(latest), now + 2)))


def _line(steps: Sequence[int], bits: Sequence[float]) -> _Line:
    slope = _slope(steps, bits)
    middle = sum(steps) / len(steps)
    offsets = [b - slope * (s - middle) for s, b in zip(steps, bits, strict=True)]
    level = median(offsets)
    scatter = 1.4826 * median(abs(one - level) for one in offsets)
    spread = sum((s - middle) ** 2 for s in steps)
    return _Line(slope, level, max(scatter, NOISE_BITS), middle, spread, len(steps))


def _slope(steps: Sequence[int], bits: Sequence[float]) -> float:
    points = list(zip(steps, bits, strict=True))
    return median((b2 - b1) / (s2 - s1) for (s1, b1), (s2, b2) in combinations(points, 2))


def _is_straight(line: _Line, steps: Sequence[int], bits: Sequence[float]) -> bool:
    """Return whether the points scatter about the line to its very end, and the later half rises
    as the whole does.
    """
    off = [(b - line.at(s)) / line.noise for s, b in zip(steps, bits, strict=True)]
    if sum(abs(one) > WILD for one in off) > MAX_WILD_SHARE * len(off):
        return False
    if median(off[-3:]) < -1.0 or min(off[-2:]) < -WILD:
        return False
    half = len(steps) // 2
    early = _slope(steps[: half + 1], bits[: half + 1])
    late = _slope(steps[half:], bits[half:])
    return late >= STRAIGHT * line.slope and late <= line.slope / STRAIGHT and early > 0


def _crossing(line: _Line, now: int, band: float) -> float | None:
    """Return the step at which the line, ``band`` errors off, reaches 0;
    None if not before four times as far as it.
    """
    low, high = float(now), now + 4.0 * max(-line.at(now), 0.5) / line.slope
    if line.at(low) + band * line.error(low) >= 0.0:
        return low
    if line.at(high) + band * line.error(high) < 0.0:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        if line.at(middle) + band * line.error(middle) >= 0.0:
            high = middle
        else:
            low = middle
    return high
