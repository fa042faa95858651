"""What of a script writes down or makes what is not finite, or writes to weights that are not, in
words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nanstop.diagnose.evidence.reading import limit
from nanstop.records import Evidence, SourceLine
from nanstop.records.formats import HALF

_MODULE = "<module>"
_SPELLED = re.compile(r"(?<!f)inf", re.IGNORECASE)
"""An infinity by its name; ``finfo`` is none."""


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


def unmade_at(evidence: Evidence) -> tuple[str, ...]:
    """Return the line that makes numbers of the batch, or of a variable, that are not finite, where
    it was run again; () for none.
    """
    rows = evidence.incident.rows if evidence.incident is not None else None
    known = (one.unmade_at for one in (rows, evidence.localization) if one is not None)
    line = next((one for one in known if one is not None), None)
    return (f"made so at {line.short}: `{line.text}`",) if line is not None else ()


def warned_before(evidence: Evidence) -> tuple[str, ...]:
    """Return where NumPy has warned before the step read what is not finite: that may be where it
    was made. () where the line that made it is known from an experiment.
    """
    incident = evidence.incident
    if incident is None or unmade_at(evidence):
        return ()
    return tuple(
        f"NumPy warned of numbers without a value at {one.short}: `{one.text}`"
        for one in incident.without_value
    )
