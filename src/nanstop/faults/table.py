"""The zoo: for every finding a planted fault, its healthy twin, and the sign of the fault."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanstop.faults import (
    data,
    forward,
    gradients,
    loading,
    logs,
    objective,
    runtime,
    setup,
    unexplained,
    updates,
    weights,
)
from nanstop.faults.specimen import Entry

_FAMILIES = (unexplained, loading, setup, updates, forward, gradients, weights, data, runtime)
_FAMILIES += (objective, logs)

ZOO: Mapping[str, Entry] = MappingProxyType(
    dict(sorted(pair for family in _FAMILIES for pair in family.FAULTS.items()))
)
