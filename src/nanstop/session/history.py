"""Short histories of a run's numbers, kept without looking at them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

from nanstop.records import Series

_KEPT = 512

WHOLE = 200_000
"""Values kept of each series where the whole run is to be recorded;
a 0-dim tensor on a GPU takes 512 bytes.
"""

_OBJECTIVE = (
    "reward",
    "frac_reward_zero_std",
    "kl",
    "clip_ratio/",
    "sampling/",
    "entropy",
    "logps/",
    "objective/",
    "val/ratio",
)
"""What the metrics begin with by which trainers of preferences and policies log how their
objective stands.
"""
_NUM_METRICS = 64
_KEPT_OF_METRICS = 64


class History:
    """Named series of (step, value), the last ``kept`` of each. A value may be a 0-dim tensor:
    it is read only when a record is made.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._rows: dict[str, deque[tuple[int, Any]]] = {}
        self._counts: dict[str, int] = {}
        """How many values were ever added to each series."""
        self._num_metrics = 0

    def add(self, name: str, step: int, value: Any) -> None:
        """Append a number or a detached 0-dim tensor, which must not change afterwards.
        No synchronisation.
        """
        rows = self._rows.get(name)
        if rows is None:
            rows = self._rows[name] = deque(maxlen=self._kept)
        rows.append((step, value))
        self._counts[name] = self._counts.get(name, 0) + 1

    def log(self, step: int, entry: Mapping[str, Any]) -> None:
        """Append the metrics of the objective that a trainer has logged;
        one that it left empty is NaN.

        The last 64 of each (all where the whole run is kept), of 64 metrics at most: a reward
        function may invent new ones at every step.
        """
        for name, value in entry.items():
            if not name.startswith(_OBJECTIVE) or not isinstance(value, int | float | None):
                continue
            if name not in self._rows:
                if self._num_metrics == _NUM_METRICS:
                    continue
                self._num_metrics += 1
                kept = self._kept if self._kept > _KEPT else _KEPT_OF_METRICS
                self._rows[name] = deque(maxlen=kept)
            self._rows[name].append((step, math.nan if value is None else float(value)))
            self._counts[name] = self._counts.get(name, 0) + 1

    def take_back(self, name: str, num: int) -> None:
        """Drop the last ``num`` values of a series: those of a window that is run again."""
        rows = self._rows.get(name, deque())
        for _ in range(min(num, len(rows))):
            rows.pop()
            self._counts[name] -= 1

    def last(self, name: str) -> Any:
        """Return the last value of a series as it was added, None where there is none."""
        rows = self._rows.get(name)
        return rows[-1][1] if rows else None

    def last_number(self, name: str, *, reads: bool = False) -> float | None:
        """Return the last value of a series as a number, None where there is none, and without
        ``reads`` where it lies on a device: reading it there synchronises that device.
        """
        value = self.last(name)
        if value is None or isinstance(value, int | float):
            return value
        return float(value) if reads or value.is_cpu else None

    def counts(self) -> dict[str, int]:
        """Return how many values were ever added to each series: where the next ones begin."""
        return dict(self._counts)

    def since(
        self, counts: Mapping[str, int]
    ) -> tuple[dict[str, list[tuple[int, float]]], dict[str, int]]:
        """Return what was added after ``counts``, as far as it is kept, and the counts of now.
        Synchronises a device where new values lie on it, once for all of them.
        """
        from nanstop.numerics.tensors import as_numbers  # of a run that is followed

        found: dict[str, list[tuple[int, Any]]] = {}
        for name, rows in self._rows.items():
            new = min(self._counts[name] - counts.get(name, 0), len(rows))
            if new > 0:
                found[name] = list(islice(reversed(rows), new))[::-1]
        values = as_numbers([value for rows in found.values() for _, value in rows])
        told = iter(values)
        return {n: [(step, next(told)) for step, _ in rows] for n, rows in found.items()}, dict(
            self._counts
        )

    def records(self) -> tuple[Series, ...]:
        """Return every series as a record. Synchronises the device where values lie on one."""
        return self._records(None)

    def recent(self) -> tuple[Series, ...]:
        """Return the end of every series, ``_KEPT`` values of it however many are kept.
        Synchronises as ``records``.
        """
        return self._records(_KEPT)

    def _records(self, most: int | None) -> tuple[Series, ...]:
        found: list[Series] = []
        for name, rows in sorted(self._rows.items()):
            last = list(islice(reversed(rows), most))[::-1]
            steps, values = zip(*last, strict=True) if last else ((), ())
            found.append(Series(name=name, steps=steps, values=tuple(map(float, values))))
        return tuple(found)
