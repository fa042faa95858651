"""A mean of ratios, and how sure it is."""

from __future__ import annotations

import math
import random
import statistics


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the ratios and its 95 % bootstrap interval."""
    logs = [math.log(ratio) for ratio in ratios]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(4000))
    low, high = means[int(0.025 * len(means))], means[int(0.975 * len(means))]
    return math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high)
