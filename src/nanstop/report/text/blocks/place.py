"""Where it is: the layer, the line of source code, and the tensors that the op read and made."""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import bad_counts
from nanstop.records import FORMAT_MAX, OpEvent, TensorStats
from nanstop.report.text.blocks.block import Block
from nanstop.wording import counted, number

MAX_TENSORS = 6
MAX_OUTPUTS = 3
MAX_SOURCE = 100


def place_blocks(where: str) -> tuple[Block, ...]:
    """Return the place of a finding: a module, a parameter, or the loop; none of no place."""
    place = "the training loop of the script" if where == "loop" else _layer(where)
    return (Block("where", "  --> ", (place,)),) if place else ()


def event_blocks(event: OpEvent, where: str) -> tuple[Block, ...]:
    """Return the place of an operation and its source, and a row for each of its tensors."""
    own = event.phase != "loss" and event.source is not None and event.source.function == "forward"
    outside = "the model's own forward" if own else "outside any module"
    layer = _layer(event.module, event.module_class) if event.module else _layer(where)
    place: tuple[str, ...] = (layer or outside,)
    if event.source is not None:
        file = event.source.file.replace("\\", "/").rsplit("/", 1)[-1]
        place = (*place, f"{file}:{event.source.line}", _shortened(event.source.text.strip()))
    return (Block("where", "  --> ", tuple(cell for cell in place if cell)), *_tensors(event))


def _layer(name: str, kind: str = "") -> str:
    """Return the name of a module or a parameter, said as a layer where it is a number alone. A
    module that a container counts is told with its ``kind``, the name of its class.
    """
    beginning, end = name.partition(".")[0], name.rpartition(".")[2]
    said = name
    if beginning.isdigit():
        said = f"layer {name} of the model" if name == end else f"{name} of the model"
    return f"{said} ({kind})" if kind and end.isdigit() else said


def _shortened(line: str) -> str:
    """Return a line of source code, its end left out where it is very long."""
    return line if len(line) <= MAX_SOURCE else f"{line[: MAX_SOURCE - 3].rstrip()}..."


def _tensors(event: OpEvent) -> tuple[Block, ...]:
    """Return a row of facts a tensor, in columns; outputs last, because they are what went wrong.

    Of an op with many outputs only the bad ones are shown.
    """
    bad = [stats for stats in event.outputs if not stats.finite]
    outputs = list(dict.fromkeys(_row("output", s) for s in bad or event.outputs))[:MAX_OUTPUTS]
    inputs = list(dict.fromkeys(_row("input", s) for s in event.inputs))
    left_out = len(inputs) - (MAX_TENSORS - len(outputs))
    rows = [*inputs[: MAX_TENSORS - len(outputs)], *outputs]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    blocks = [Block("tensor", "      ", tuple(_aligned(row, widths))) for row in rows]
    if left_out > 0:
        blocks.append(Block("tensor", "      ", (f"and {counted(left_out, 'more input')}",)))
    return tuple(blocks)


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
    cells[-1] = cells[-1].rstrip()
    return [*cells, *row[len(widths) :]]


def _row(role: str, stats: TensorStats) -> tuple[str, ...]:
    shape = f"{stats.dtype} [{', '.join(str(size) for size in stats.shape)}]"
    named = (f"`{stats.name}`",) if stats.name else ()
    if stats.finite:
        return (role, shape, f"max {number(stats.absmax)}", "finite", *named)
    limit = FORMAT_MAX.get(stats.dtype)
    overflowed = role == "output" and (stats.posinf or stats.neginf)
    end = f"limit {number(limit)}" if overflowed and limit is not None else ""
    return (role, shape, bad_counts(stats), end, *named)
