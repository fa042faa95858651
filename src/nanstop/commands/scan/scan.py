"""``nanstop scan``: what is wrong with the numbers of a checkpoint, in one pass over its bytes.

Chunks are read into a buffer of a core's cache and counted there, on as many threads as torch would
use. Memory does not grow with the checkpoint.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanstop.commands.scan.checkpoint_files import Checkpoint, Reader, Stored, open_checkpoint
from nanstop.commands.scan.checkpoint_keys import (
    HEADS,
    TABLES,
    adapter_problems,
    key_problems,
    table_of,
    text_config,
    tied,
)
from nanstop.commands.scan.counting import (
    CHUNK_BYTES,
    Meter,
    Scratch,
    Tally,
    computed_in,
    fits_of,
    stats_of,
    subnormal_count,
)
from nanstop.diagnose.diagnose import diagnose
from nanstop.numerics.tensors import format_name
from nanstop.numerics.token_rows import MIN_ROWS, row_norms, token_rows
from nanstop.records import (
    CheckpointScan,
    Diagnosis,
    Evidence,
    ParamGroup,
    RunFacts,
    TensorScan,
    TensorStats,
    TokenRows,
)

PIECE_BYTES = 16 * 2**20
"""What one thread takes on at a time."""
_ONE_IN, _OF_CHUNK = 8, 4
"""Of a large tensor, small values are counted in one chunk of so many, and in so small a part of
it: 1 value in 32.
"""
_WHOLE_CHUNKS = 2
"""A tensor of no more chunks is counted completely."""


@dataclass(frozen=True, slots=True)
class _Piece:
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
class _Found:
    tally: Tally = field(default_factory=Tally)
    norms: list[Tensor] = field(default_factory=list)
    largest_integer: float = 0.0


def scan(path: Path, *, full: bool = False) -> CheckpointScan:
    """Return what the weights at ``path`` hold.

    Reads every value once; runs no code of the checkpoint.

    ``full``: count everything in every chunk. Errors:
    ``NanstopError`` for what cannot be read whole.
    """
    began = time.perf_counter()
    opened = open_checkpoint(path)
    shapes = {stored.name: stored.shape for stored in opened.tensors}
    tables = _tables(shapes, opened)
    found = _measured(opened.tensors, tables, full=full)
    rows = tuple(_scanned(stored, found.get(at)) for at, stored in enumerate(opened.tensors))
    same = _duplicates(opened.tensors, rows)
    head, embedding = table_of(shapes, HEADS), table_of(shapes, TABLES)
    joined = tied(opened.config)
    if head is not None and any({head, embedding} <= set(group) for group in same):
        joined = True
    keys = (
        adapter_problems(shapes, opened.adapter)
        if opened.kind == "adapter"
        else key_problems(shapes, opened.config)
    )
    quantization = opened.config.get("quantization_config")
    return CheckpointScan(
        path=str(path),
        kind=opened.kind,
        files=tuple(file.name for file in opened.files),
        num_bytes=sum(file.stat().st_size for file in opened.files),
        tensors=rows,
        token_rows=_token_rows(opened, tables, found, is_tied=bool(joined)),
        duplicates=same,
        keys=(*opened.keys, *keys),
        architecture=_architecture(opened),
        model_type=_word(opened.config.get("model_type")),
        declared_dtype=_declared(opened.config),
        quantization=_word(quantization.get("quant_method"))
        if isinstance(quantization, dict)
        else None,
        tied=joined,
        notes=opened.notes,
        seconds=time.perf_counter() - began,
    )


def findings(found: CheckpointScan) -> tuple[Diagnosis, ...]:
    """Return what the rules conclude from a scan alone."""
    return diagnose(Evidence(facts=facts_of(found), checkpoint=found), "static")


def facts_of(found: CheckpointScan) -> RunFacts:
    """Return the standing facts that a checkpoint tells of any run that starts from it.

    Nothing of it is trained yet.
    """
    groups: dict[str, list[TensorScan]] = {}
    for tensor in found.tensors:
        groups.setdefault(tensor.stats.dtype, []).append(tensor)
    return RunFacts(
        host="checkpoint",
        param_groups=tuple(
            ParamGroup(
                dtype=dtype,
                trainable=False,
                num_tensors=len(members),
                num_elements=sum(one.num_elements for one in members),
                examples=tuple(one.name for one in members[:4]),
            )
            for dtype, members in groups.items()
        ),
        token_rows=found.token_rows,
        model_type=found.model_type,
        declared_dtype=found.declared_dtype,
    )


def _tables(shapes: dict[str, tuple[int, ...]], opened: Checkpoint) -> dict[str, int]:
    """Return token tables by name, with the width of their rows."""
    names = (table_of(shapes, TABLES), table_of(shapes, HEADS))
    formats = {stored.name: stored.dtype for stored in opened.tensors}
    usable = [
        name
        for name in names
        if name is not None
        and (dtype := formats[name]) is not None
        and dtype.is_floating_point
        and shapes[name][0] > MIN_ROWS
        and 0 < shapes[name][1] * max(dtype.itemsize, 4) <= CHUNK_BYTES
    ]
    return {name: shapes[name][1] for name in usable}


def _computed_size(dtype: torch.dtype) -> int:
    """Return the bytes that a value takes while it is counted."""
    return (computed_in(dtype) or dtype).itemsize


def _pieces(stored: Stored, width: int, *, full: bool) -> Iterator[_Piece]:
    dtype, total = stored.dtype, math.prod(stored.shape)
    assert dtype is not None
    chunk = CHUNK_BYTES // _computed_size(dtype)
    if width:  # whole rows, which fit the scratch memory in float32 too
        chunk = CHUNK_BYTES // max(dtype.itemsize, 4)
        chunk -= chunk % width
    full = full or total <= _WHOLE_CHUNKS * chunk
    step = max(1, PIECE_BYTES // (chunk * dtype.itemsize * _ONE_IN)) * chunk * _ONE_IN
    for start in range(0, total, step):
        yield _Piece(stored, start, min(total, start + step), chunk, full, width)


def _measured(
    tensors: Sequence[Stored], tables: dict[str, int], *, full: bool
) -> dict[int, _Found]:
    """Return what was counted in each tensor, by its place in ``tensors``."""
    pieces = [
        (at, piece)
        for at, stored in enumerate(tensors)
        if stored.dtype is not None and not stored.dtype.is_complex
        for piece in _pieces(stored, tables.get(stored.name, 0), full=full)
    ]
    found: dict[int, _Found] = {}
    for (at, _), part in zip(pieces, _in_threads([piece for _, piece in pieces]), strict=True):
        whole = found.setdefault(at, _Found())
        whole.tally.add(part.tally)
        whole.norms += part.norms
        whole.largest_integer = max(whole.largest_integer, part.largest_integer)
    return found


def _in_threads(pieces: Sequence[_Piece]) -> Iterator[_Found]:
    """Yield what each piece holds, in order, counted on as many threads as torch would use for
    one operation.
    """
    threads, memory = torch.get_num_threads(), threading.local()

    def count(piece: _Piece) -> _Found:
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


def _counted(piece: _Piece, scratch: Scratch) -> _Found:
    dtype = piece.stored.dtype
    assert dtype is not None
    source = computed_in(dtype)
    with piece.stored.opened(scratch.spare) as read:
        if source is None:
            return _Found(largest_integer=max(_largest(one) for _, one in _chunks(read, piece)))
        meter, norms = Meter(dtype, scratch), []
        for number, (start, values) in enumerate(_chunks(read, piece)):
            exact = values if values.dtype is source else values.to(source)
            if piece.rows_of:
                wide = scratch.magnitudes.view(torch.float32)[: len(exact)].copy_(exact)
                norms.append(row_norms(wide.view(-1, piece.rows_of)))
            meter.take(exact, start=start, part=_part(number, len(exact), piece))
        return _Found(tally=meter.tally(), norms=norms)


def _part(number: int, num: int, piece: _Piece) -> int:
    """Return in how many values of a chunk, the ``number``-th of its piece, small ones are
    counted.
    """
    if piece.full:
        return num
    return num // _OF_CHUNK if number % _ONE_IN == 0 else 0


def _chunks(read: Reader, piece: _Piece) -> Iterator[tuple[int, Tensor]]:
    for start in range(piece.start, piece.stop, piece.chunk):
        yield start, read(start, min(piece.stop, start + piece.chunk))


def _largest(values: Tensor) -> float:
    least, most = (int(one) for one in values.aminmax())
    return float(max(abs(least), abs(most)))


def _scanned(stored: Stored, found: _Found | None) -> TensorScan:
    """Return a tensor's row.

    Shape and format alone for what has no values or none that can be counted.
    """
    file, dtype = stored.file.name, stored.dtype
    if found is None or dtype is None:
        empty = 0 in stored.shape
        stats = TensorStats(shape=stored.shape, dtype=stored.dtype_name, name=stored.name)
        note = "no elements" if empty else "values of this format are not measured"
        return TensorScan(name=stored.name, file=file, stats=stats, measured=empty, note=note)
    if not dtype.is_floating_point:
        stats = TensorStats(
            shape=stored.shape,
            dtype=format_name(dtype),
            absmax=found.largest_integer,
            name=stored.name,
        )
        return TensorScan(name=stored.name, file=file, stats=stats, note="integers: range only")
    stats = stats_of(found.tally, stored.shape, dtype, stored.name)
    fits, (_, exact) = fits_of(found.tally, dtype), subnormal_count(found.tally, dtype)
    return TensorScan(name=stored.name, file=file, stats=stats, fits=fits, exact=exact)


def _token_rows(
    opened: Checkpoint, tables: dict[str, int], found: dict[int, _Found], *, is_tied: bool
) -> tuple[TokenRows, ...]:
    padding = text_config(opened.config).get("pad_token_id")
    rows = []
    for at, stored in enumerate(opened.tensors):
        if stored.name in tables and at in found:
            norms = torch.cat(found[at].norms)
            blocks = _Blocks(stored, tables[stored.name])
            pad = padding if isinstance(padding, int) else None
            rows.append(token_rows(stored.name, norms, blocks, padding=pad, tied=is_tied))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A table again from its file, block by block."""

    stored: Stored
    width: int

    def __call__(self) -> Iterable[Tensor]:
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        for piece in _pieces(self.stored, self.width, full=True):
            with self.stored.opened(buffer) as read:
                for _, values in _chunks(read, piece):
                    yield values.view(-1, self.width).float()


def _duplicates(
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
    pairs = (_pieces(one, 0, full=True) for one in (first, second))
    for mine, theirs in zip(*pairs, strict=True):
        with first.opened(buffers[0]) as read, second.opened(buffers[1]) as read_other:
            chunks = zip(_chunks(read, mine), _chunks(read_other, theirs), strict=True)
            if not all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in chunks
            ):
                return False
    return True


def _architecture(opened: Checkpoint) -> str | None:
    if opened.kind == "adapter":
        return _word(opened.adapter.get("peft_type"))
    names = opened.config.get("architectures")
    return _word(names[0]) if isinstance(names, list) and names else None


def _declared(config: Any) -> str | None:
    """Return the format that the config says it was trained in.

    ``dtype``, or ``torch_dtype`` of older versions.
    """
    for one in (config, text_config(config)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(one.get(key), str):
                return one[key].removeprefix("torch.")
    return None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None
