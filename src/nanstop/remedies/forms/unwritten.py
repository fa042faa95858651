"""Memory that a line takes, or leaves in its result, without writing it: one number there. What is
written keeps its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nanstop.records.line_forms import UNEVEN
from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.held import Form, uneven


def filled_with(number: str) -> Form:
    """Return a form in which a call gives ``number`` for what it does not write."""

    def answer(call: Call, at_line: Callable[[], bool]) -> Any:
        form = _FORMS.get(call.name)
        return call.run() if form is None or not at_line() else form(call, number)

    return answer


def _taken(call: Call, number: str) -> Any:
    taken = call.run()
    if not isinstance(taken, Tensor):
        return taken
    return taken.copy_(uneven(taken)) if number == UNEVEN else taken.fill_(float(number))


def _grouped(call: Call, number: str) -> Any:
    """Return the products of the groups that ``offs`` ends, and numbers for rows behind the last
    one: neither they nor their gradients are written
    (https://github.com/pytorch/pytorch/issues/154557).
    """
    rows, ends = call.read, call.argument(2, "offs")
    if rows is None or rows.dim() != 2 or not isinstance(ends, Tensor):
        return call.run()
    num = int(ends[-1])
    written = call.of_another(rows[:num])
    if number != UNEVEN:
        return pad(written, (0, 0, 0, len(rows) - num), value=float(number))
    return torch.cat((written, uneven(written.new_empty(len(rows) - num, written.shape[1]))))


_FORMS: Mapping[str, Callable[[Call, str], Any]] = {
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "empty_permuted"), _taken),
    **dict.fromkeys(("new_empty", "new_empty_strided"), _taken),
    "grouped_mm": _grouped,
}
