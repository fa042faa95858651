"""``nanstop scan``: what is wrong with the numbers of a checkpoint, in one pass over its bytes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from nanstop.commands.scan.checkpoint_files import Checkpoint, Stored, open_checkpoint
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
    fits_of,
    stats_of,
    subnormal_count,
)
from nanstop.commands.scan.duplicates import duplicates
from nanstop.commands.scan.pieces import Blocks, Found, measured
from nanstop.diagnose.diagnose import diagnose
from nanstop.numerics.tensors import format_name
from nanstop.numerics.token_rows import MIN_ROWS, token_rows
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
    found = measured(opened.tensors, tables, full=full)
    rows = tuple(_scanned(stored, found.get(at)) for at, stored in enumerate(opened.tensors))
    same = duplicates(opened.tensors, rows)
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


def _scanned(stored: Stored, found: Found | None) -> TensorScan:
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
    opened: Checkpoint, tables: dict[str, int], found: dict[int, Found], *, is_tied: bool
) -> tuple[TokenRows, ...]:
    padding = text_config(opened.config).get("pad_token_id")
    rows = []
    for at, stored in enumerate(opened.tensors):
        if stored.name in tables and at in found:
            norms = torch.cat(found[at].norms)
            blocks = Blocks(stored, tables[stored.name])
            pad = padding if isinstance(padding, int) else None
            rows.append(token_rows(stored.name, norms, blocks, padding=pad, tied=is_tied))
    return tuple(rows)


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
