"""Tensors of a checkpoint that are one and the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nanstop.commands.scan.checkpoint_files import Stored
from nanstop.commands.scan.counting import CHUNK_BYTES
from nanstop.commands.scan.pieces import chunks_of, pieces_of
from nanstop.records import TensorScan, TensorStats


def duplicates(
    tensors: Sequence[Stored], rows: Sequence[TensorScan]
) -> tuple[tuple[str, ...], ...]:
    """Return groups of equal tensors.

    Those of one shape, format and range are compared byte by byte.
    """
    alike: dict[Any, list[Stored]] = {}
    for stored, row in zip(tensors, rows, strict=True):
        stats = row.stats
        if row.measured and row.num_elements > 1 and not _constant(stats):
            key = (
                stats.shape,
                stats.dtype,
                stats.absmax,
                stats.absmin_nonzero,
                stats.zeros,
                stats.num_bad,
            )
            alike.setdefault(key, []).append(stored)
    groups: list[list[Stored]] = []
    for candidates in alike.values():
        first = len(groups)
        for stored in candidates if len(candidates) > 1 else ():
            home = next((group for group in groups[first:] if _equal(group[0], stored)), None)
            if home is None:
                groups.append([stored])
            else:
                home.append(stored)
    return tuple(tuple(one.name for one in group) for group in groups if len(group) > 1)


def _constant(stats: TensorStats) -> bool:
    """Return whether all magnitudes are one: fresh norms are equal without being one tensor."""
    return stats.absmax == 0.0 or (stats.absmax == stats.absmin_nonzero and not stats.zeros)


def _equal(first: Stored, second: Stored) -> bool:
    buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)]
    pairs = (pieces_of(one, 0, full=True) for one in (first, second))
    for mine, theirs in zip(*pairs, strict=True):
        with first.opened(buffers[0]) as read, second.opened(buffers[1]) as read_other:
            chunks = zip(chunks_of(read, mine), chunks_of(read_other, theirs), strict=True)
            if not all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in chunks
            ):
                return False
    return True
