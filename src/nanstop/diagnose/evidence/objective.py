"""Series of an objective: their names, and what rules about policies and rewards read off them."""

from __future__ import annotations

import math
from statistics import median

from nanstop.diagnose.evidence.reading import series_values
from nanstop.records import Evidence

INF, NAN, UNSCORED = "reward_inf/", "reward_nan/", "reward_unscored"
"""Share of a batch of rewards that was bad, by reward function; noted of bad batches only."""
RATIO_AT_ONCE, RATIO = "log_ratio/at_once", "log_ratio/later"
"""Mean distance of log-probabilities to those noted, before any update and after one."""


def named(evidence: Evidence, beginning: str) -> dict[str, tuple[tuple[int, float], ...]]:
    """Return the series whose names begin with a prefix, by the rest of their names."""
    histories = evidence.series or (evidence.incident.history if evidence.incident else ())
    return {
        one.name.removeprefix(beginning): tuple(zip(one.steps, one.values, strict=False))
        for one in histories
        if one.name.startswith(beginning)
    }


def typical(evidence: Evidence, name: str, *, last: int = 8, least: int = 1) -> float | None:
    """Return the median of the last values of a series, None where it has fewer than ``least``."""
    values = [value for _, value in series_values(evidence, name) if not math.isnan(value)][-last:]
    return median(values) if len(values) >= least else None
