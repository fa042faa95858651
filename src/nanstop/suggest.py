"""The error for a name that is not one of those known, with the nearest that is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from nanstop.errors import NanstopError


def unknown(
    what: str, given: object, choices: Iterable[str], *, code: str = "NS001"
) -> NanstopError:
    """Return ``unknown WHAT: `GIVEN``` with a did-you-mean where a choice is near, and the choices where they are few."""
    known = list(choices)
    near = difflib.get_close_matches(str(given), known, n=1)
    hints = [f"did you mean `{near[0]}`?"] if near else []
    if len(known) <= 24:
        hints.append(f"known: {', '.join(known)}")
    return NanstopError(f"unknown {what}: `{given}`", code=code, hint=" ".join(hints))
