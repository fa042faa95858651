"""Series of an objective: their names, and what rules about policies and rewards read off them."""

from __future__ import annotations

import math
import re
from statistics import median

from nanstop.diagnose.evidence.reading import series_values, standing
from nanstop.records import Evidence, OpEvent

INF, NAN, UNSCORED = "reward_inf/", "reward_nan/", "reward_unscored"
"""Share of a batch of rewards that was bad, by reward function; noted of bad batches only."""
RATIO_AT_ONCE, RATIO = "log_ratio/at_once", "log_ratio/later"
"""Mean distance of log-probabilities to those noted, before any update and after one."""

_POLICY = re.compile(r"ratio|(^|\W|_)kl|log_?p(rob)?s?\b|logits_ref|ref_log|importance", re.I)
_METHODS = ("grpo", "rloo", "ppo", "gspo", "reinforce")


def named(evidence: Evidence, beginning: str) -> dict[str, tuple[tuple[int, float], ...]]:
    """Return the series whose names begin so, by what follows."""
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


def is_of_policies(evidence: Evidence, event: OpEvent) -> bool:
    """Return whether an op compares two policies: the trainer says so, else its own line."""
    objective = standing(evidence).objective
    if objective is not None and objective.method in _METHODS:
        return event.phase == "loss" or not event.module
    text = event.source.text if event.source is not None else ""
    return bool(_POLICY.search(text))
