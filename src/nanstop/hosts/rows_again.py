"""The rows of a bad batch made again, by its data set and its collator: which line of the script
made their numbers so, and how it is written where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor

from nanstop.numerics.tensors import tensors
from nanstop.prove.forms.mended import mended
from nanstop.records import SourceLine
from nanstop.replay.script_objects import reached
from nanstop.tracing.source.bad_numbers import line_of_bad
from nanstop.tracing.unmade_numbers import lines_that_unmake

_MOST_AROUND = 4
"""Data sets around another one that are looked through."""


def unmade_at(
    dataset: Any, collate: Callable[[Any], Any], rows: Sequence[int], bad: Sequence[bool]
) -> tuple[SourceLine | None, str]:
    """Return the only line of the script that makes numbers of the rows of a bad batch that are not
    finite, where they are made again, and of its healthy rows none; and the guarded form of that
    line with which all of them are finite and what was finite is as it was, "" for none. ``bad``:
    of each row. Where no line does, the data set holds them so, or a variable that its code reads:
    the statement that made them.

    Copies of rows are collated: a collator may write to what a data set holds.
    """
    healthy = [row for row, one in zip(rows, bad, strict=True) if not one]

    def making(chosen: Sequence[int]) -> Callable[[], Any]:
        return lambda: collate([deepcopy(dataset[row]) for row in chosen])

    with _attributes_kept(dataset, collate):
        found = lines_that_unmake(making(rows))
        makers = dict(found.makers) if found.is_bad else {}
        if makers and healthy:
            for line in lines_that_unmake(making(healthy)).makers:
                makers.pop(line, None)
        elif of_nan := {line: one for line, one in makers.items() if one.makes_nan}:
            makers = of_nan  # infinities beside them may be meant, as those of a mask
        if found.is_bad and not found.makers:
            held = (*tensors(_held_by(dataset)), *_read_by(dataset, collate))
            return line_of_bad(held), ""
        if len(makers) != 1:
            return None, ""
        ((line, maker),) = makers.items()
        return line, mended(line, maker, making(rows))


def _held_by(dataset: Any) -> list[Any]:
    """Return what a data set holds, or the one that it takes rows of."""
    for _ in range(_MOST_AROUND):
        dataset = getattr(dataset, "dataset", dataset)
    return list(getattr(dataset, "__dict__", {}).values())


def _read_by(dataset: Any, collate: Callable[[Any], Any]) -> list[Tensor]:
    """Return the tensors that the script's own code of a data set, or of its collator, reads of
    variables around it.
    """
    read = getattr(type(dataset), "__getitem__", None)
    return [tensor for one in (read, collate) for tensor in reached(one)[1]]


@contextmanager
def _attributes_kept(*objects: Any) -> Iterator[None]:
    """Have the attributes of objects, counters perhaps, on exit as they are now."""
    tables = [table for one in objects if isinstance(table := getattr(one, "__dict__", None), dict)]
    noted = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, was in noted:
            table.clear()
            table.update(was)
