"""An export in the terminal: a row for each format, what was written, and what it is worth."""

from __future__ import annotations

from collections.abc import Iterator

from nanstop.commands.export.result import Export, FormatTrial
from nanstop.wording import counted

_NEAR = 2.0
"""Values that can grow no further than by this factor are said to be near the end of a format."""


def render(found: Export) -> str:
    """Return an export as text."""
    return "\n".join(_lines(found))


def _lines(found: Export) -> Iterator[str]:
    what = "adapter" if found.is_adapter else "checkpoint"
    yield f"{what} {found.folder}, stored in {found.stored}"
    yield f"run without nanstop on {' and '.join(found.inputs)} ({found.device})"
    if found.needed:
        yield f"its run was kept finite by: {found.needed}"
    yield ""
    rows = [("format", "finite", "distance to float32", "")]
    rows += [_row(one) for one in found.trials]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        yield f"  {'  '.join(cells)}  {row[3]}".rstrip()
    yield ""
    yield from _outcome(found)


def _row(trial: FormatTrial) -> tuple[str, str, str, str]:
    name = f"{trial.dtype} with its plan" if trial.under_plan else trial.dtype
    if trial.problem:
        return name, "?", "", f"could not be run: {trial.problem}"
    if not trial.finite:
        return name, "no", "", f"first at {trial.first_bad}"
    far = "" if trial.distance is None else f"{trial.distance:.2%}"
    rest = f"largest value {trial.largest:.4g}"
    if trial.under_plan:  # what is largest may be in float32 by the plan
        return name, "yes", far, rest
    near = ": near its end" if trial.largest * _NEAR > trial.limit else ""
    return name, "yes", far, f"{rest}, {trial.dtype} ends at {trial.limit:.4g}{near}"


def _outcome(found: Export) -> Iterator[str]:
    if not found.dtype:
        yield f"nothing was written: {found.reason}"
        if found.needed:
            yield f'help: load it with its plan: nanstop.load_plan("{found.folder}").apply(model)'
        elif "weights themselves" in found.reason:
            yield f"help: `nanstop scan {found.folder}` says which"
        return
    size = f"{found.num_bytes / 1e6:.1f} MB"
    if found.is_adapter:
        yield f"written to {found.out} ({size}) as it is: load its base in {found.dtype}"
    else:
        yield f"written to {found.out} in {found.dtype} ({size}); it loads without nanstop"
    yield "loaded from there it gave the logits of its row above, bit for bit"
    if found.dtype == found.failed_in:
        yield (
            f"warning: its run was not finite in {found.dtype}; that these inputs are says little"
        )
    if found.rounded:
        values = counted(found.rounded, "value")
        yield f"note: {values} had to be rounded; `--dtype float32` rounds none"
    if found.left_out:
        yield f"left out, as no part of the model: {', '.join(found.left_out)}"
