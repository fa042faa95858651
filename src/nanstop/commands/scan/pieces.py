"""The values of a checkpoint, counted piece by piece.

Chunks are read into a buffer of a core's cache and counted there, on as many threads as torch would
use. Memory does not grow with the checkpoint.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanstop.commands.scan.checkpoint_files import Reader, Stored
from nanstop.commands.scan.counting import CHUNK_BYTES, Meter, Scratch, Tally, computed_in
from nanstop.numerics.token_rows import row_norms

PIECE_BYTES = 16 * 2**20
"""What one thread takes on at a time."""
_ONE_IN, _OF_CHUNK = 8, 4
"""Of a large tensor, small values are counted in one chunk of so many, and in so small a part of
it: 1 value in 32.
"""
_WHOLE_CHUNKS = 2
"""A tensor of no more chunks is counted completely."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one tensor's values, in whole rows of a table."""

    stored: Stored
    start: int
    stop: int
    chunk: int
    """Values read at a time."""
    full: bool
    """Count small values everywhere."""
    rows_of: int = 0
    """Width of a table's rows, 0 for what is no table."""


@dataclass(slots=True)
class Found:
    """What was counted in one piece, or in all pieces of a tensor. ``norms``: of a table's rows."""

    tally: Tally = field(default_factory=Tally)
    norms: list[Tensor] = field(default_factory=list)
    largest_integer: float = 0.0


def _computed_size(dtype: torch.dtype) -> int:
    """Return the bytes that a value takes while it is counted."""
    return (computed_in(dtype) or dtype).itemsize


def pieces_of(stored: Stored, width: int, *, full: bool) -> Iterator[Piece]:
    """Yield the pieces of a tensor. ``width``: of a table's rows, 0 for what is no table."""
    dtype, total = stored.dtype, math.prod(stored.shape)
    assert dtype is not None
    chunk = CHUNK_BYTES // _computed_size(dtype)
    if width:  # whole rows, which fit the scratch memory in float32 too
        chunk = CHUNK_BYTES // max(dtype.itemsize, 4)
        chunk -= chunk % width
    full = full or total <= _WHOLE_CHUNKS * chunk
    step = max(1, PIECE_BYTES // (chunk * dtype.itemsize * _ONE_IN)) * chunk * _ONE_IN
    for start in range(0, total, step):
        yield Piece(stored, start, min(total, start + step), chunk, full, width)


def measured(tensors: Sequence[Stored], tables: dict[str, int], *, full: bool) -> dict[int, Found]:
    """Return what was counted in each tensor, by its place in ``tensors``."""
    pieces = [
        (at, piece)
        for at, stored in enumerate(tensors)
        if stored.dtype is not None and not stored.dtype.is_complex
        for piece in pieces_of(stored, tables.get(stored.name, 0), full=full)
    ]
    found: dict[int, Found] = {}
    for (at, _), part in zip(pieces, _in_threads([piece for _, piece in pieces]), strict=True):
        whole = found.setdefault(at, Found())
        whole.tally.add(part.tally)
        whole.norms += part.norms
        whole.largest_integer = max(whole.largest_integer, part.largest_integer)
    return found


def _in_threads(pieces: Sequence[Piece]) -> Iterator[Found]:
    """Yield what each piece holds, in order, counted on as many threads as torch would use for
    one operation.
    """
    threads, memory = torch.get_num_threads(), threading.local()

    def count(piece: Piece) -> Found:
        if not hasattr(memory, "own"):
            memory.own = Scratch.new()
        return _counted(piece, memory.own)

    if threads == 1 or len(pieces) == 1:
        yield from map(count, pieces)
        return
    try:
        # Each thread works on chunks of its own;
        # a second level of threads inside an operation would only wait.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(count, pieces)
    finally:
        torch.set_num_threads(threads)


def _counted(piece: Piece, scratch: Scratch) -> Found:
    dtype = piece.stored.dtype
    assert dtype is not None
    source = computed_in(dtype)
    with piece.stored.opened(scratch.spare) as read:
        if source is None:
            return Found(largest_integer=max(_largest(one) for _, one in chunks_of(read, piece)))
        meter, norms = Meter(dtype, scratch), []
        for number, (start, values) in enumerate(chunks_of(read, piece)):
            exact = values if values.dtype is source else values.to(source)
            if piece.rows_of:
                wide = scratch.magnitudes.view(torch.float32)[: len(exact)].copy_(exact)
                norms.append(row_norms(wide.view(-1, piece.rows_of)))
            meter.take(exact, start=start, part=_part(number, len(exact), piece))
        return Found(tally=meter.tally(), norms=norms)


def _part(number: int, num: int, piece: Piece) -> int:
    """Return in how many values of a chunk, the ``number``-th of its piece, small ones are
    counted.
    """
    if piece.full:
        return num
    return num // _OF_CHUNK if number % _ONE_IN == 0 else 0


def chunks_of(read: Reader, piece: Piece) -> Iterator[tuple[int, Tensor]]:
    """Yield the values of a piece, a chunk at a time, with the place of its first value."""
    for start in range(piece.start, piece.stop, piece.chunk):
        yield start, read(start, min(piece.stop, start + piece.chunk))


def _largest(values: Tensor) -> float:
    least, most = (int(one) for one in values.aminmax())
    return float(max(abs(least), abs(most)))


@dataclass(frozen=True, slots=True)
class Blocks:
    """A table again from its file, block by block."""

    stored: Stored
    width: int

    def __call__(self) -> Iterable[Tensor]:
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        for piece in pieces_of(self.stored, self.width, full=True):
            with self.stored.opened(buffer) as read:
                for _, values in chunks_of(read, piece):
                    yield values.view(-1, self.width).float()
