"""Memory that a line takes, or leaves in its result, without writing it: one number there. What is
written keeps its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.held import Form


def filled_with(number: float) -> Form:
    """Return a form in which a call gives ``number`` for what it does not write."""

    def answer(call: Call, at_line: Callable[[], bool]) -> Any:
        form = _FORMS.get(call.name)
        return call.run() if form is None or not at_line() else form(call, number)

    return answer


def _taken(call: Call, number: float) -> Any:
    taken = call.run()
    return taken.fill_(number) if isinstance(taken, Tensor) else taken


def _grouped(call: Call, number: float) -> Any:
    """Return the products of the groups that ``offs`` ends, and numbers for rows behind the last
    one: neither they nor their gradients are written
    (https://github.com/pytorch/pytorch/issues/154557).
    """
    rows, ends = call.read, call.argument(2, "offs")
    if rows is None or rows.dim() != 2 or not isinstance(ends, Tensor):
        return call.run()
    num = int(ends[-1])
    return pad(call.of_another(rows[:num]), (0, 0, 0, len(rows) - num), value=number)


_FORMS: Mapping[str, Callable[[Call, float], Any]] = {
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "empty_permuted"), _taken),
    **dict.fromkeys(("new_empty", "new_empty_strided"), _taken),
    "grouped_mm": _grouped,
}
