"""What a report says is made of: logical lines, which `report.text.wrapping` and `report.html`
wrap and colour.
"""

from __future__ import annotations

from nanstop.frozen import frozen
from nanstop.records import Diagnosis


@frozen
class Block:
    """One line before wrapping. ``cells`` come after ``lead``, ``gap`` apart, and wrap singly."""

    kind: str
    lead: str
    cells: tuple[str, ...]
    gap: str = "    "


def pointer(code: str, record: str | None) -> Block:
    """Return the line that says where to read on. ``record``: path of the ``report.json``."""
    full = f" ; full record {record}" if record else ""
    return Block("note", "note: ", (f"nanstop explain {code}{full}",))


def certainty(diagnosis: Diagnosis, what: str) -> list[str]:
    """Return how ``what`` was confirmed, and how sure it is where that is not certain."""
    sure = diagnosis.confidence
    how = diagnosis.confirmed.removesuffix(f": {diagnosis.cause}")
    confirmed = [f"confirmed: {how}"] if how else []
    unsure = [] if sure == "certain" else [f"{what} is {sure}, not certain"]
    return confirmed + unsure
