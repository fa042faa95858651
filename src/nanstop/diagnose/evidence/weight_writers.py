"""What of a script writes to weights that are not finite, in words."""

from __future__ import annotations

from collections.abc import Sequence

from nanstop.records import SourceLine

_MODULE = "<module>"


def named_writers(written: Sequence[SourceLine]) -> str:
    """Return the functions that write to some weights, or what is written at a script's own level;
    "" for none.
    """
    return ", ".join(
        f"`{line.text if line.function == _MODULE else line.function}` ({line.short})"
        for line in written
    )


def finite_numbers_only(writers: str) -> str:
    """Return the usual cure of weights that these writers have broken."""
    return f"Look at what {writers} writes to weights, and let it be finite numbers only."
