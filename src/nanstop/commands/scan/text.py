"""A scanned checkpoint as text.

What it is, its ranges, which formats it fits, what is equal, what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from nanstop.records import CheckpointScan, Diagnosis, FormatFit, TensorScan
from nanstop.report.text.terminal import render_finding
from nanstop.wording import counted, listed, number

_MOST = 3
_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def render_scan(found: CheckpointScan, findings: Sequence[Diagnosis]) -> str:
    """Return the whole scan, its findings last."""
    floats = [tensor for tensor in found.tensors if tensor.fits]
    sections = (
        ("stored", _stored(found)),
        ("ranges", _ranges(floats)),
        ("fits", _fits(floats)),
        ("equal", _equal(found)),
        ("keys", _keys(found)),
        ("notes", _notes(found)),
    )
    lines = [line for title, texts in sections for line in _section(title, texts)]
    shown = [render_finding(finding) for finding in findings]
    return "\n".join([*lines, *(f"\n{text}" for text in shown)])


def _section(title: str, texts: Iterable[str]) -> Iterable[str]:
    for place, text in enumerate(texts):
        yield f"{title if place == 0 else '':<10}{text}".rstrip()


def _stored(found: CheckpointScan) -> Iterable[str]:
    formats: dict[str, int] = {}
    for tensor in found.tensors:
        formats[tensor.stats.dtype] = formats.get(tensor.stats.dtype, 0) + tensor.num_elements
    kind = found.architecture or found.kind
    holds = ", ".join(f"{dtype} x {size}" for dtype, size in formats.items())
    size, files = _size(found.num_bytes), counted(len(found.files), "file")
    yield f"{kind}: {counted(len(found.tensors), 'tensor')}, {size} in {files}: {holds}"
    if found.declared_dtype:
        others = [
            dtype for dtype in formats if dtype != found.declared_dtype and "int" not in dtype
        ]
        differs = f", and stored here are {', '.join(others)}" if others else ""
        yield f"trained in {found.declared_dtype}, as its config says{differs}"
    if found.quantization:
        yield (
            f"quantised by {found.quantization}: "
            "packed weights are integers, whose range says nothing"
        )


def _ranges(floats: Sequence[TensorScan]) -> Iterable[str]:
    finite = [tensor for tensor in floats if tensor.stats.absmax > 0.0]
    if not finite:
        return
    largest = max(finite, key=lambda tensor: tensor.stats.absmax)
    smallest = min(finite, key=lambda tensor: tensor.stats.absmin_nonzero)
    yield f"largest   {_short(largest.stats.absmax)} in `{largest.name}`"
    yield f"smallest  {_short(smallest.stats.absmin_nonzero)} in `{smallest.name}`"
    zeros = sum(tensor.stats.zeros for tensor in floats)
    tiny = sum(tensor.stats.subnormal for tensor in floats)
    about = "" if all(tensor.exact for tensor in floats) else "about "
    yield f"zeros {zeros}, subnormal in their own format {about if tiny else ''}{tiny}"


def _fits(floats: Sequence[TensorScan]) -> Iterable[str]:
    formats = tuple(dict.fromkeys(fit.format for tensor in floats for fit in tensor.fits))
    if not formats:
        return
    total = sum(tensor.num_elements for tensor in floats)
    heads = f"{'headroom':>10} {'overflow':>10} {'subnormal':>12} {'to zero':>12}"
    yield f"{'format':<15} {heads}   least headroom in"
    for name in formats:
        rows = [
            (fit, tensor.name) for tensor in floats for fit in tensor.fits if fit.format == name
        ]
        yield _fit_line(name, rows, total)


def _fit_line(name: str, rows: Sequence[tuple[FormatFit, str]], total: int) -> str:
    worst, where = min(rows, key=lambda row: row[0].headroom_bits)
    about = "" if all(fit.exact for fit, _ in rows) else "~"
    bits = "-" if math.isinf(worst.headroom_bits) else f"{worst.headroom_bits:.1f} bits"
    small, zero = (
        sum(each) for each in zip(*((fit.subnormal, fit.zero) for fit, _ in rows), strict=True)
    )
    over = sum(fit.overflow for fit, _ in rows)
    cells = f"{_share(small, total, about):>12} {_share(zero, total, about):>12}"
    return f"{name:<15} {bits:>10} {over:>10} {cells}   `{where}`"


def _share(count: int, total: int, about: str) -> str:
    """Return a count, or its share where it is large."""
    if count < 10_000:
        return f"{about if count else ''}{count}"
    return f"{about}{100 * count / total:.2g} %"


def _equal(found: CheckpointScan) -> Iterable[str]:
    for group in found.duplicates[:_MOST]:
        yield f"the same bytes: {listed(group)}"
    if len(found.duplicates) > _MOST:
        yield f"and {counted(len(found.duplicates) - _MOST, 'more group')}"
    if found.tied is not None and found.kind == "model":
        yield f"embedding and head are {'tied' if found.tied else 'not tied'}"


def _keys(found: CheckpointScan) -> Iterable[str]:
    """Yield what is unexpected; what is missing is a finding below."""
    odd = [problem for problem in found.keys if not problem.new_on_load]
    for problem in odd[:_MOST]:
        yield f"{problem.kind}: `{problem.name}`, {problem.detail}"
    if len(odd) > _MOST:
        yield f"and {len(odd) - _MOST} more"


def _notes(found: CheckpointScan) -> Iterable[str]:
    yield from found.notes
    unread = [tensor for tensor in found.tensors if not tensor.measured]
    if unread:
        formats = ", ".join(sorted({tensor.stats.dtype for tensor in unread}))
        yield f"not measured: {counted(len(unread), 'tensor')} in {formats}"
    if any(not fit.exact for tensor in found.tensors for fit in tensor.fits):
        yield "~ counted in 1 of 32 values of large tensors; --full counts all"


def _size(num_bytes: int) -> str:
    for unit, name in _SIZES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def _short(value: float) -> str:
    return number(float(f"{value:.4g}"))
