"""What a micro-batch holds: shapes, ranges, and how much of it is supervised."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from nanstop.numerics.tensors import dense_parts, format_name, in_float64, shape_of
from nanstop.records import BatchFact
from nanstop.records.vocabulary import IGNORED_LABEL
from nanstop.replay.step import Batch

_MOST_ROWS = 8
_FEWEST_SAMPLES = 3
"""Of two samples neither is the odd one."""


_IN_DICT = re.compile(r"\.\d+\.[^.]+$")


def holds_dicts(batch: Batch) -> bool:
    """Return whether samples of a batch are dicts in a list, by the names of what is in these
    (``targets.2.boxes``): rows of their tensors are no samples, and none can be left out.
    """
    return any(_IN_DICT.search(str(name)) for name in batch)


def num_samples(batch: Batch) -> int | None:
    """Return how many samples a micro-batch has:
    the first axis of its tensors, where they agree. Of a sparse one, as of a graph, no row stands
    for itself.
    """
    if holds_dicts(batch):
        return None
    given = [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    lengths = {value.size(0) for value in given}  # a nested one may have no shape
    return lengths.pop() if len(lengths) == 1 and all(map(_is_dense, given)) else None


def _is_dense(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested


def batch_facts(batch: Batch, micro: int) -> tuple[BatchFact, ...]:
    """Return shape, range and supervision of every tensor of a micro-batch.
    Synchronises once an entry.
    """
    return tuple(
        (_batch_fact if _is_dense(value) else _sparse_fact)(str(name), value, micro)
        for name, value in batch.items()
        if isinstance(value, Tensor)
    )


def _batch_fact(name: str, value: Tensor, micro: int) -> BatchFact:
    detached = value.detach()
    if detached.is_complex():
        detached = torch.view_as_real(detached.resolve_conj())
    finite, mask = detached, torch.ones((), dtype=torch.bool)
    num_bad, bad_rows = 0, ()
    if detached.is_floating_point():
        mask = detached.isfinite()
        num_bad, finite = int((~mask).sum()), detached[mask]
        bad_rows = _bad_rows(mask) if num_bad and mask.dim() else ()
    elif detached.dtype == torch.bool:
        finite = detached.to(torch.uint8)
    supervised = _supervised(detached)
    rows = supervised.reshape(supervised.shape[0], -1).any(1) if supervised is not None else None
    outlier, ratio = _outlier(detached)
    return BatchFact(
        micro=micro,
        name=name,
        shape=tuple(value.shape),
        dtype=format_name(value.dtype),
        minimum=float(finite.min()) if finite.numel() else None,
        maximum=float(finite.max()) if finite.numel() else None,
        num_bad=num_bad,
        bad_rows=bad_rows,
        hides=num_bad > 0 and not bool(finite.any()) and bool((detached[~mask] < 0).all()),
        num_rows_without_labels=int((~rows).sum()) if rows is not None else None,
        num_rows=int(rows.numel()) if rows is not None else None,
        num_supervised=int(supervised.sum()) if supervised is not None else None,
        outlier_row=outlier,
        outlier_ratio=ratio,
    )


def _sparse_fact(name: str, value: Tensor, micro: int) -> BatchFact:
    """Return what a sparse tensor holds: its entries, of which none is a sample; of a nested one
    not where its rows begin, which are numbers as well.
    """
    parts = (value.values(),) if value.is_nested else dense_parts(value)
    entries = torch.cat([part.flatten() for part in parts])
    return replace(_batch_fact(name, entries[None], micro), shape=shape_of(value), bad_rows=())


def _bad_rows(finite: Tensor) -> tuple[int, ...]:
    rows = (~finite.reshape(len(finite), -1)).any(1)
    return tuple(rows.nonzero().flatten()[:_MOST_ROWS].tolist())


def _outlier(value: Tensor) -> tuple[int | None, float | None]:
    """Return the sample with the largest magnitude, and how many times the others' median it is;
    Nones for few samples.

    Values that are not finite are left out: they are counted elsewhere.
    """
    if not value.is_floating_point() or value.dim() == 0 or value.shape[0] < _FEWEST_SAMPLES:
        return None, None
    rows = in_float64(value.reshape(value.shape[0], -1)).nan_to_num(0.0, 0.0, 0.0)
    if rows.shape[1] == 0:
        return None, None
    largest = rows.abs().amax(1)
    row = int(largest.argmax())
    others = float(torch.cat((largest[:row], largest[row + 1 :])).median())
    return row, float(largest[row]) / others if others > 0.0 else None


def _supervised(value: Tensor) -> Tensor | None:
    """Return which entries of labels are not left out; None of what leaves nothing out.

    What is -100 somewhere is labels, whatever it is called: no token id is.
    """
    if value.dim() == 0 or value.shape[0] == 0 or value.is_floating_point():
        return None
    counts = value != IGNORED_LABEL
    return None if bool(counts.all()) else counts
