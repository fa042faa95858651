"""Which samples of a micro-batch fail by themselves, what the others give, and what a cure may
change in those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nanstop.decide.policy import DATA_REMEDIES
from nanstop.errors import NanstopError, ShortOfMemoryError
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.reference.agreement import SAME, largest_gap
from nanstop.records import Atom, Position
from nanstop.records.remedies import makes_rows, new_rows_of
from nanstop.remedies.apply import applied
from nanstop.remedies.data import dropped_micros, rebatch, taken
from nanstop.replay.batches import num_samples
from nanstop.replay.conditions import Under
from nanstop.replay.rerun import Attempt
from nanstop.replay.step import Batch

_MAX_ROWS = 32
"""More samples than that are halved, and only what fails is looked into further."""
_MAX_RUNS = 64
_MAX_RUNS_OF_ALL = 20
"""Runs of as many samples as the failing one has."""
_TIMES_AVERAGE = 2.0
"""Times the share of a softmax of as many average classes that new rows may take.

The mean of the others takes that of as many of them at most, for the exponential is convex
(Hewitt 2021, "Initializing new word embeddings for pretrained language models").
"""
_TURNED = 10.0
"""Gradients may move by this many times the share of the softmax that goes to new rows or is taken
from them: a row far longer than those that are trained moves them by more.
"""


def bad_rows(failing: FailingStep) -> tuple[int, ...] | None:
    """Return the samples that fail when all others are left out;
    None where samples cannot be told apart.

    One undone run a sample, of many samples one of each half that fails. A loss over several
    samples (a batch statistic, a pair) may not run on one alone, or may fail on any: then nothing
    is said. Where the failure is an exception, one of a sample alone is its failure.
    """
    rows = num_samples(failing.step.batches[failing.micro])
    if failing.update or rows is None:
        return None
    if rows == 1:
        return (0,)
    if rows > _MAX_ROWS:
        return _bad_by_halves(rows, partial(_fails_alone, failing), _MAX_RUNS)
    fails = [_fails_alone(failing, range(row, row + 1)) for row in range(rows)]
    if None in fails:
        return None
    return tuple(row for row, failed in enumerate(fails) if failed)


def healthy_rows(failing: FailingStep) -> tuple[int, ...] | None:
    """Return the samples that do not fail, alone or with each other; None where that is unknown, as
    it is where memory is short.

    Where they fail together, what one sample does alone says nothing of it in a batch.
    """
    with suppress(ShortOfMemoryError):
        return _healthy_rows(failing)
    return None


def _healthy_rows(failing: FailingStep) -> tuple[int, ...] | None:
    rows, bad = num_samples(failing.step.batches[failing.micro]), bad_rows(failing)
    if rows is None or bad is None:
        return None
    healthy = tuple(row for row in range(rows) if row not in bad)
    if not healthy:
        return healthy
    batch = without(failing.step.batches[failing.micro], bad)
    return None if failing.attempt(batch=batch, under=nullcontext).failed else healthy


def bad_places(failing: FailingStep) -> tuple[Position, ...] | None:
    """Return the samples that fail by themselves, or where a step takes no fewer of them among
    copies of their own, unless that tells none from the others.
    """
    bad, rows = bad_rows(failing), num_samples(failing.step.batches[failing.micro])
    if bad is None and rows is not None and not failing.update:
        bad = _bad_among_copies(failing, rows)
    if not bad or len(bad) == rows:
        return None
    return tuple(Position(sample=row) for row in bad)


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


def _bad_by_halves(
    rows: int, fails_so: Callable[[range], bool | None], most_runs: int
) -> tuple[int, ...] | None:
    """Return the samples that fail by themselves: what passes together has none. None where a part
    fails whose halves pass, or where so many fail that it would take too many runs.
    """
    bad: list[int] = []
    parts = [range(rows // 2), range(rows // 2, rows)]
    num_runs = 0
    while parts:
        halves = [parts.pop(), parts.pop()]
        fails = [fails_so(half) for half in halves]
        num_runs += 2
        if None in fails or not any(fails) or num_runs > most_runs:
            return None
        for half in (half for half, failed in zip(halves, fails, strict=True) if failed):
            middle = half.start + len(half) // 2
            if len(half) == 1:
                bad.append(half.start)
            else:
                parts += [range(half.start, middle), range(middle, half.stop)]
    return tuple(sorted(bad))


def _bad_among_copies(failing: FailingStep, rows: int) -> tuple[int, ...] | None:
    """Return the samples that fail in a batch of nothing else that has as many of them: a loss may
    count on their number. None where none is told from the others, or the step fails with copies
    of a healthy one in their places.
    """
    if rows < 2:
        return None

    def fails(some: range) -> bool | None:
        filled = [row if row in some else some.start for row in range(rows)]
        return _fails_with(failing, taken(batch, filled))

    batch = failing.step.batches[failing.micro]
    bad = _bad_by_halves(rows, fails, _MAX_RUNS_OF_ALL)
    healthy = next((row for row in range(rows) if bad and row not in bad), None)
    if bad is None or healthy is None:
        return None
    cleared = taken(batch, [healthy if row in bad else row for row in range(rows)])
    return bad if _fails_with(failing, cleared) is False else None


def _fails_alone(failing: FailingStep, some: range) -> bool | None:
    """Return whether some samples fail by themselves; None where they cannot be run so."""
    batch = failing.step.batches[failing.micro]
    try:
        alone = only(batch, tuple(some))
    except NanstopError:
        return None
    return _fails_with(failing, alone)


def _fails_with(failing: FailingStep, batch: Batch) -> bool | None:
    """Return whether the micro-batch fails with another batch; None where that cannot be run."""
    run = failing.attempt(batch=batch, under=nullcontext)
    if run.error is not None and failing.step.losses[failing.micro] is not None:
        return None
    return run.failed


def without(batch: Batch, rows: tuple[int, ...]) -> Batch:
    """Return the batch without some samples. Errors: ``NanstopError`` where none would be left."""
    return rebatch(batch, tuple(Atom(remedy="drop_sample", target=f"0:{row}") for row in rows))


def only(batch: Batch, rows: tuple[int, ...]) -> Batch:
    """Return the batch with no other samples than these; errors as ``without``."""
    return without(batch, tuple(set(range(num_samples(batch) or 0)) - set(rows)))


def changes_new_outputs_only(
    failing: FailingStep,
    atoms: Sequence[Atom],
    batch: Batch,
    *,
    under: Under,
    plain: Attempt,
    cured: Attempt,
) -> bool:
    """Return whether rows made anew change nothing in a healthy batch but the outputs that are
    theirs, and these take no more than their share.

    A head that is tied to the table has an output of every row for every token, so that no loss
    keeps its value, however harmless the rows. ``plain`` and ``cured``: the batch without them and
    with them (``under``). False where it is not known: the host has no logits, or a remedy does
    anything else. Synchronises the device.
    """
    if not makes_rows(atoms) or plain.loss is None or cured.loss is None or cured.failed:
        return False
    outputs = _outputs(failing, batch, under)
    if outputs is None:
        return False
    before, after, others = outputs
    columns = (before != after).flatten(0, -2).any(0).nonzero().squeeze(1)
    num = len(columns)
    if not num or not set(columns.tolist()) <= new_rows_of(atoms) or 2 * num > others:
        return False
    shares = _share(before, columns), _share(after, columns)
    rises = cured.loss - plain.loss
    turned = largest_gap(cured.grads or {}, plain.grads or {})
    return (
        shares[1] <= _TIMES_AVERAGE * num / others
        and rises <= math.log1p(num / (others - num)) + SAME * abs(plain.loss)
        and turned <= _TURNED * sum(shares)
    )


def _outputs(failing: FailingStep, batch: Batch, under: Under) -> tuple[Tensor, Tensor, int] | None:
    view = failing.step.view
    ids = view.token_ids(batch)
    if ids is None:
        return None
    with failing.step.isolated():
        before = view.logits(ids)
        with under():
            after = view.logits(ids)
    if before is None or after is None or before.shape != after.shape:
        return None
    return before.float(), after.float(), before.shape[-1]


def _share(logits: Tensor, columns: Tensor) -> float:
    """Return what some columns [new] of logits [batch, tokens, vocabulary] have of their softmax,
    over all tokens.
    """
    own = logits[..., columns].logsumexp(-1)
    return float((own - logits.logsumexp(-1)).exp().mean())


def is_causal(failing: FailingStep, atoms: tuple[Atom, ...], micro: int) -> bool | None:
    """Return whether, under a cure of attention, changing the last token leaves every earlier logit
    as it was; None where it cannot be asked.
    """
    if not any(atom.remedy == "attention" for atom in atoms):
        return None
    view = failing.step.view
    ids = view.token_ids(failing.step.batches[micro])
    if ids is None or ids.dim() != 2 or ids.shape[1] < 2:
        return None
    changed = ids.clone()
    changed[:, -1] = torch.where(ids[:, -1] > 0, ids[:, -1] - 1, ids[:, -1] + 1)
    with failing.step.isolated(), applied(view, atoms):
        before, after = view.logits(ids), view.logits(changed)
    if before is None or after is None:
        return None
    return torch.equal(before[:, :-1], after[:, :-1])
