"""The line of a script that writes down a number that is not finite in its format."""

from __future__ import annotations

import re

from nanstop.diagnose.evidence.reading import limit
from nanstop.records import Evidence
from nanstop.records.formats import HALF

_SPELLED = re.compile(r"(?<!f)inf", re.IGNORECASE)
"""An infinity by its name; ``finfo`` is none."""


def writing_lines(evidence: Evidence) -> tuple[str, ...]:
    """Return the line that writes down what no operation has made, and in half precision that a
    finite number may be none there.
    """
    found = evidence.localization
    made = found.made if found is not None else None
    if found is None or made is None:
        return ()
    said = f"line {made.line} writes it down: `{made.text}`"
    read = found.first_bad.inputs if found.first_bad is not None else ()
    dtype = next((one.dtype for one in read if not one.finite and one.dtype in HALF), "")
    if not dtype or _SPELLED.search(made.text):
        return (said,)
    return said, f"{dtype} ends at {limit(dtype)}: a number beyond that is an infinity in it"
