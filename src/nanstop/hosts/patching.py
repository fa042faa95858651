"""One table of attributes replaced on instances, and the way back."""

from __future__ import annotations

from typing import Any


class Patches:
    """Attributes that stand in for others.

    ``undo`` leaves every object as it was, also where there was none before.
    """

    def __init__(self) -> None:
        self._table: list[tuple[Any, str, bool, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name`` on the instance itself."""
        own = vars(owner)
        self._table.append((owner, name, name in own, own.get(name)))
        own[name] = value

    def holds(self, owner: Any, name: str) -> bool:
        """Return whether this attribute of this object is replaced now."""
        return any(o is owner and n == name for o, n, _, _ in self._table)

    def undo(self) -> None:
        """Put everything back, the latest first; a second call finds nothing to do."""
        while self._table:
            owner, name, had, value = self._table.pop()
            if had:
                vars(owner)[name] = value
            else:
                vars(owner).pop(name, None)
