"""Which samples of a micro-batch fail by themselves, and what the others give."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from nanstop.decide.policy import DATA_REMEDIES
from nanstop.errors import NanstopError
from nanstop.prove.failing_step import FailingStep
from nanstop.records import Atom
from nanstop.remedies.data import dropped_micros, rebatch
from nanstop.replay.batches import num_samples
from nanstop.replay.step import Batch

_MAX_ROWS = 32


def bad_rows(failing: FailingStep) -> tuple[int, ...] | None:
    """Return the samples that fail when all others are left out;
    None where samples cannot be told apart.

    One undone run a sample. A loss over several samples (a batch statistic, a pair) may not run on
    one alone, or may fail on any: then nothing is said. Where the failure is an exception, one of a
    sample alone is its failure.
    """
    rows = num_samples(failing.step.batches[failing.micro])
    if failing.update or rows is None or rows > _MAX_ROWS:
        return None
    if rows == 1:
        return (0,)
    fails = [_fails_alone(failing, row, rows) for row in range(rows)]
    if None in fails:
        return None
    return tuple(row for row, failed in enumerate(fails) if failed)


def healthy_rows(failing: FailingStep) -> tuple[int, ...] | None:
    """Return the samples that do not fail, alone or with each other; None where that is unknown.

    Where they fail together, what one sample does alone says nothing of it in a batch.
    """
    rows, bad = num_samples(failing.step.batches[failing.micro]), bad_rows(failing)
    if rows is None or bad is None:
        return None
    healthy = tuple(row for row in range(rows) if row not in bad)
    if not healthy:
        return healthy
    batch = without(failing.step.batches[failing.micro], bad)
    return None if failing.attempt(batch=batch, under=nullcontext).failed else healthy


def atoms_for(failing: FailingStep, atoms: tuple[Atom, ...], micro: int) -> tuple[Atom, ...]:
    """Return what a cure means for another micro-batch of the window that fails.

    Remedies of data name samples: each micro-batch has its own, found as in ``bad_rows``.
    """
    rest = tuple(atom for atom in atoms if atom.remedy not in DATA_REMEDIES)
    if micro == failing.micro or rest == atoms:
        return atoms
    if dropped_micros(atoms):
        return (*rest, Atom(remedy="drop_micro", target=str(micro)))
    rows = bad_rows(replace(failing, micro=micro)) or ()
    return (*rest, *(Atom(remedy="drop_sample", target=f"{micro}:{row}") for row in rows))


def _fails_alone(failing: FailingStep, row: int, rows: int) -> bool | None:
    """Return whether a sample fails by itself; None where it cannot be run so."""
    batch = failing.step.batches[failing.micro]
    try:
        alone = without(batch, tuple(other for other in range(rows) if other != row))
    except NanstopError:
        return None
    run = failing.attempt(batch=alone, under=nullcontext)
    if run.error is not None and failing.step.losses[failing.micro] is not None:
        return None
    return run.failed


def without(batch: Batch, rows: tuple[int, ...]) -> Batch:
    """Return the batch without some samples. Errors: ``NanstopError`` where none would be left."""
    return rebatch(batch, tuple(Atom(remedy="drop_sample", target=f"0:{row}") for row in rows))
