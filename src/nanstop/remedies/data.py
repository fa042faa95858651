"""Remedies of data: rows of a token table made anew, samples and micro-batches left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.errors import NanstopError
from nanstop.numerics.token_rows import row_blocks, row_norms, untrained
from nanstop.records import Atom
from nanstop.records.remedies import row_spans
from nanstop.replay.batches import holds_dicts
from nanstop.replay.step import Batch, ModelView

_SPREAD = 0.1
"""Deviation of new rows from the mean, in units of the spread of the other rows."""

_SAMPLE = 16384
"""Rows that mean and spread are taken from, at most."""


@contextmanager
def init_rows(view: ModelView, atom: Atom) -> Iterator[None]:
    """Rows of a token table that were never trained get the mean of the others, or that and a small
    deviation.

    They are the rows that the value names ("mean 5,9-12"), all where it names none; one that has
    been trained since then is left. The old rows are back on exit, unless training moved the new
    ones meanwhile: then those stay. Draws from a generator of its own, so that the run's random
    state is as it was.
    """
    kind, _, named = atom.value.partition(" ")
    if kind not in ("mean", "normal"):
        raise NanstopError(f"{atom}: the value must be mean or normal")
    table = _table(view, atom)
    odd = odd_rows(table.data, padding=_padding_row(view, table))
    rows = _chosen(odd, named, atom).nonzero().squeeze(1)
    before = table.data[rows].clone()
    new = _fresh_rows(table.data[~odd], len(rows), noisy=kind == "normal")
    table.data[rows] = new
    try:
        yield
    finally:
        if torch.equal(table.data[rows], new):
            table.data[rows] = before


def odd_rows(table: Tensor, *, padding: int | None = None) -> Tensor:
    """Return which rows [rows] of a table [rows, width] are not finite, or look as if never trained
    (``untrained``).

    Synchronises the device.
    """
    norms = torch.cat([row_norms(block) for block in row_blocks(table)]).cpu()
    zero, far, _ = untrained(norms, partial(row_blocks, table), padding=padding)
    return (zero | far | ~norms.isfinite()).to(table.device)


def _chosen(odd: Tensor, named: str, atom: Atom) -> Tensor:
    if not named:
        return odd
    chosen = torch.zeros_like(odd)
    for first, last in row_spans(named, atom):
        if last >= len(odd):
            raise NanstopError(f"{atom}: rows {first} to {last} of a table of {len(odd)}")
        chosen[first : last + 1] = True
    return odd & chosen


def rebatch(batch: Batch, atoms: Sequence[Atom], *, micro: int | None = None) -> Batch:
    """Return the batch without the samples that ``drop_sample`` atoms name (of ``micro`` only,
    where it is given).

    A sample is a row of every tensor or list whose length is that of most of the batch's tensors.
    Values that belong to the batch as a whole stay, a token count for instance, so that the other
    samples weigh what they weighed. Raises NanstopError for a row that is not there, where no row
    would be left, and where samples are dicts in a list that a script holds.
    """
    places = [sample_place(atom) for atom in atoms if atom.remedy == "drop_sample"]
    dropped = {row for of_micro, row in places if micro in (None, of_micro)}
    if not dropped:
        return batch
    if holds_dicts(batch):
        raise NanstopError("samples that are dicts in a list cannot be left out")
    num_rows = _num_rows(batch)
    kept = [row for row in range(num_rows) if row not in dropped]
    if not kept or max(dropped) >= num_rows:
        raise NanstopError(f"cannot leave out samples {sorted(dropped)} of a batch of {num_rows}")
    return taken(batch, kept)


def taken(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return a batch of the samples ``rows`` of another in this order, some more than once it may
    be. What a sample is: see ``rebatch``.
    """
    num_rows = _num_rows(batch)
    return {name: _rows(value, rows, num_rows) for name, value in batch.items()}


def _num_rows(batch: Batch) -> int:
    lengths = Counter(len(leaf) for leaf in _tensors(batch))
    return lengths.most_common(1)[0][0] if lengths else 0


def dropped_micros(atoms: Sequence[Atom]) -> frozenset[int]:
    """Return the micro-batches of the window that ``drop_micro`` atoms leave out."""
    return frozenset(_index(atom, atom.target) for atom in atoms if atom.remedy == "drop_micro")


def sample_place(atom: Atom) -> tuple[int, int]:
    """Return (micro-batch, row) of a ``drop_sample`` atom, whose target is "micro:row"."""
    micro, _, row = atom.target.partition(":")
    return _index(atom, micro), _index(atom, row)


@contextmanager
def drop_sample(_: ModelView, atom: Atom) -> Iterator[None]:
    """Nothing to do to the model: ``rebatch`` makes the batch. Checks the target."""
    sample_place(atom)
    yield


@contextmanager
def drop_micro(_: ModelView, atom: Atom) -> Iterator[None]:
    """Nothing to do to the model: the host leaves out ``dropped_micros``. Checks the target."""
    dropped_micros((atom,))
    yield


def _index(atom: Atom, text: str) -> int:
    if not text.isdecimal():
        raise NanstopError(f"{atom}: `{atom.target}` does not name a place in the window")
    return int(text)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.dim():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in () if _are_dicts(value) else value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _are_dicts(value: Sequence[Any]) -> bool:
    """Return whether a list holds a dict for each sample, whose tensors are none of samples."""
    return bool(value) and all(isinstance(item, Mapping) for item in value)


def _rows(value: Any, kept: Sequence[int], num_rows: int) -> Any:
    if isinstance(value, Tensor):
        return value[kept] if value.dim() and len(value) == num_rows else value
    if isinstance(value, Mapping):
        return {name: _rows(item, kept, num_rows) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) == num_rows and not any(isinstance(item, Tensor) for item in value):
            return type(value)(value[row] for row in kept)
        if _are_dicts(value):
            return value
        return type(value)(_rows(item, kept, num_rows) for item in value)
    return value


def _table(view: ModelView, atom: Atom) -> Tensor:
    try:
        table = view.root.get_parameter(atom.target)
    except AttributeError:
        raise NanstopError(f"the model has no parameter `{atom.target}`") from None
    if table.dim() != 2 or not table.is_floating_point():
        raise NanstopError(f"{atom}: `{atom.target}` is not a table of token rows")
    return table


def _padding_row(view: ModelView, table: Tensor) -> int | None:
    """Return the row that torch keeps at zero on purpose, in whatever embedding holds the table."""
    holders = (m for m in view.root.modules() if isinstance(m, nn.Embedding) and m.weight is table)
    return next((m.padding_idx for m in holders if m.padding_idx is not None), None)


def _fresh_rows(trained: Tensor, number: int, *, noisy: bool) -> Tensor:
    others = trained[:_SAMPLE].float()
    if not len(others):
        raise NanstopError("the table has no trained row to start from")
    mean = others.mean(dim=0)
    new = mean.expand(number, -1)
    if noisy:
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(number, len(others), generator=generator).to(others.device)
        # weights @ (others - mean) / sqrt(n) has the covariance of the rows, without ever forming
        # it
        new = new + _SPREAD * (weights @ (others - mean)) / len(others) ** 0.5
    return new.to(trained.dtype)
