"""Short histories of a run's numbers, kept without looking at them."""

from __future__ import annotations

from collections import deque
from typing import Any

from nanstop.records import Series

_KEPT = 512

WHOLE = 200_000
"""Values kept of each series where the whole run is to be recorded; a 0-dim tensor on a GPU takes 512 bytes."""


class History:
    """Named series of (step, value), the last ``kept`` of each. A value may be a 0-dim tensor: it is read only when a record is made."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._rows: dict[str, deque[tuple[int, Any]]] = {}

    def add(self, name: str, step: int, value: Any) -> None:
        """Append a number or a detached 0-dim tensor, which must not change afterwards. No synchronisation."""
        self._rows.setdefault(name, deque(maxlen=self._kept)).append((step, value))

    def forget(self, step: int) -> None:
        """Drop what was noted of a step that is run again."""
        for name, rows in self._rows.items():
            kept = (row for row in rows if row[0] != step)
            self._rows[name] = deque(kept, maxlen=self._kept)

    def records(self) -> tuple[Series, ...]:
        """Return every series as a record. Synchronises the device where values lie on one."""
        return tuple(
            Series(
                name=name,
                steps=tuple(step for step, _ in rows),
                values=tuple(float(value) for _, value in rows),
            )
            for name, rows in sorted(self._rows.items())
        )
