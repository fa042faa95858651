"""Which samples of a micro-batch fail by themselves, and what the others give."""

from __future__ import annotations

from nanstop.core.batches import num_samples
from nanstop.core.step import Batch
from nanstop.errors import NanstopError
from nanstop.records import Atom
from nanstop.remedies.table import applied, rebatch
from nanstop.run.case import Case

_MAX_ROWS = 32


def bad_rows(case: Case) -> tuple[int, ...] | None:
    """Return the samples that fail when all others are left out; None where samples cannot be told apart.

    One undone run a sample.
    """
    batch = case.step.batches[case.micro]
    rows = num_samples(batch)
    if case.update or rows is None or not 1 < rows <= _MAX_ROWS:
        return None
    try:
        return tuple(row for row in range(rows) if _fails_alone(case, batch, row, rows))
    except NanstopError:
        return None


def _fails_alone(case: Case, batch: Batch, row: int, rows: int) -> bool:
    alone = without(batch, tuple(other for other in range(rows) if other != row))
    return case.attempt(batch=alone, under=lambda: applied(case.step.view, ())).failed


def without(batch: Batch, rows: tuple[int, ...]) -> Batch:
    """Return the batch without some samples. Errors: ``NanstopError`` where none would be left."""
    return rebatch(batch, tuple(Atom(remedy="drop_sample", target=f"0:{row}") for row in rows))
