"""The rows of a bad batch made again, by its data set and its collator: which line of the script
made their numbers so, and how it is written where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import by_torch_alone, tensors
from nanstop.records import SourceLine
from nanstop.records.line_forms import BY_ARRAY, BY_NUMBER, FINITE, GUARDED, form_at
from nanstop.remedies.forms.recoded import recoded
from nanstop.replay.script_objects import reached
from nanstop.rewrite.files import FileChange, read
from nanstop.rewrite.forms.form_code import form_edits
from nanstop.rewrite.source import edited, source_of
from nanstop.tracing.source.bad_numbers import line_of_bad
from nanstop.tracing.unmade_numbers import Maker, lines_that_unmake, made_again

_WAYS = (GUARDED, BY_NUMBER, BY_ARRAY)
_FAR = next(iter(FINITE))
"""In place of an infinity that the line spells: 0 times it has no value."""
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
        return line, _mending(line, maker, making(rows))


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


def _mending(line: SourceLine, maker: Maker, make: Callable[[], Any]) -> str:
    """Return a form of a line with which what ``make`` returns is finite; "" where none is known.

    Each is run as the code that is typed for it.
    """
    text = read(line.file)
    source = source_of(text)
    if text is None or source is None:
        return ""
    plain, name = _made(make), maker.function.strip("_")
    op = "div" if not name or name.endswith(("div", "divide")) else name
    if op == "div" and any(bool(one.isinf().any()) for one in plain):
        return ""  # what it is to be in the place of an infinity nobody knows
    ways = [f"{way}:{op}" for way in (_WAYS if op == "div" else _WAYS[:1])]
    for value in (*ways, _FAR):
        atom = form_at(f"{line.file}:{line.line}", value)
        edits = form_edits(source, line.line, atom, None)
        change = FileChange(line.file, text, edited(text, edits))
        if edits and _is_mended(plain, make, maker.code, change):
            return atom.value
    return ""


def _is_mended(
    plain: list[Tensor], make: Callable[[], Any], code: CodeType, change: FileChange
) -> bool:
    """Return whether a changed file makes finite what was not, and all else as it was."""
    with recoded(code, change) as is_run:
        made = _made(make) if is_run else []
    with by_torch_alone():
        return len(made) == len(plain) > 0 and all(map(_is_finite_and_as, made, plain))


def _made(make: Callable[[], Any]) -> list[Tensor]:
    """Return the tensors that are made, none where it raises: a form that another kind of array
    has, a data set that gives a row once.
    """
    try:
        return made_again(make)
    except Exception:
        return []


def _is_finite_and_as(made: Tensor, plain: Tensor) -> bool:
    if made.shape != plain.shape or made.dtype is not plain.dtype:
        return False
    known = plain.isfinite() if plain.is_floating_point() else torch.ones_like(plain).bool()
    return bool(made.isfinite().all()) and torch.equal(made[known], plain[known])


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
