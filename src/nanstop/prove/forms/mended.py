"""How a line of the script is written that makes numbers that are not finite, where what reads it
can be made again: a row of a data set, a variable.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import by_torch_alone
from nanstop.records import SourceLine
from nanstop.records.line_forms import BY_ARRAY, BY_NUMBER, FINITE, GUARDED, form_at
from nanstop.remedies.forms.recoded import recoded
from nanstop.rewrite.files import FileChange, read
from nanstop.rewrite.forms.form_code import form_edits
from nanstop.rewrite.source import edited, source_of
from nanstop.tracing.unmade_numbers import Maker, made_again

Make = Callable[[], Any]

_WAYS = (GUARDED, BY_NUMBER, BY_ARRAY)
FAR = next(iter(FINITE))
"""In place of an infinity that the line spells: 0 times it has no value."""


def mended(
    line: SourceLine,
    maker: Maker,
    make: Make,
    changed: Callable[[FileChange], Make | None] = lambda _: None,
    spelled: tuple[str, ...] = (FAR,),
) -> str:
    """Return a form of a line with which what ``make`` returns is finite; "" where none is known.
    ``changed``: makes it with the file changed, where the line is not of a function. ``spelled``:
    what is tried in place of an infinity that the line spells.

    Each is run as the code that is typed for it.
    """
    text = read(line.file)
    source = source_of(text)
    if text is None or source is None:
        return ""
    plain, name = made_or_none(make), maker.function.strip("_")
    op = "div" if not name or name.endswith(("div", "divide")) else name
    if op == "div" and any(bool(one.isinf().any()) for one in plain):
        return ""  # what it is to be in the place of an infinity nobody knows
    ways = [f"{way}:{op}" for way in (_WAYS if op == "div" else _WAYS[:1])]
    for value in (*ways, *spelled):
        atom = form_at(f"{line.file}:{line.line}", value)
        edits = form_edits(source, line.line, atom, None)
        change = FileChange(line.file, text, edited(text, edits))
        if edits and _is_mended(plain, make, maker.code, change, changed):
            return atom.value
    return ""


def _is_mended(
    plain: list[Tensor],
    make: Make,
    code: CodeType,
    change: FileChange,
    changed: Callable[[FileChange], Make | None],
) -> bool:
    """Return whether a changed file makes finite what was not, and all else as it was."""
    if code.co_name == "<module>":
        new = changed(change)
        made = made_or_none(new) if new is not None else []
    else:
        with recoded(code, change) as is_run:
            made = made_or_none(make) if is_run else []
    with by_torch_alone():
        return len(made) == len(plain) > 0 and all(map(_is_finite_and_as, made, plain))


def made_or_none(make: Make) -> list[Tensor]:
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
