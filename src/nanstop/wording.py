"""Numbers, counts and names as people write them, and text made fit for a terminal or a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable


def printable(text: str, kept: str = "\n\t") -> str:
    """Return a text with a mark in place of each control character that is not ``kept``, and of
    each that turns the direction of writing: what strangers wrote must not steer a terminal.
    """
    return "".join(each if each.isprintable() or each in kept else "\ufffd" for each in text)


def typed(path: object) -> str:
    """Return a path as it is typed in a shell: quoted where it holds a space or the like."""
    text = str(path)
    if re.fullmatch(r"[\w@%+=:,./~-]*", text):
        return text
    return "'" + text.replace("'", "'\"'\"'") + "'"


def number(value: float) -> str:
    """Return ``value`` as people write it: whole numbers whole, others with six digits."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.6g}"


def counted(amount: int, noun: str) -> str:
    """Return ``1 row`` or ``2 rows``, ``2 batches``."""
    plural = "" if amount == 1 else "es" if noun.endswith("ch") else "s"
    return f"{amount} {noun}{plural}"


def spans(numbers: Iterable[int], most: int = 8) -> str:
    """Return whole numbers in order, those in a row as ``3-7``, and how many rows are left."""
    rows: list[list[int]] = []
    for one in sorted(numbers):
        if rows and one == rows[-1][-1] + 1:
            rows[-1][1:] = [one]
        else:
            rows.append([one])
    shown = ", ".join("-".join(map(str, row)) for row in rows[:most])
    return f"{shown} and {len(rows) - most} more" if len(rows) > most else shown


def percent(part: int, whole: int) -> str:
    """Return a share in percent: one digit below 10 %, never rounded to none or all."""
    if part in (0, whole):
        return "100 %" if part else "0 %"
    share = max(100.0 * part / whole, 0.1)
    return f"{min(share, 99.0):.0f} %" if share >= 10.0 else f"{share:.1f} %"


def listed(names: Iterable[str], most: int = 3, *, of: int | None = None) -> str:
    """Return the first names in backticks, and how many more there are.

    ``of``: how many there are in all, where only some names are known.
    """
    names = tuple(names)
    shown = ", ".join(f"`{name}`" for name in names[:most])
    num_more = (len(names) if of is None else of) - len(names[:most])
    return f"{shown} and {num_more} more" if num_more > 0 else shown
