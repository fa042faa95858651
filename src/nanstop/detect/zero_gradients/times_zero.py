"""Whether a loss is a multiple of 0 by a number that its line spells: no weight has a gradient.

A term that is multiplied by 0 is usual, beside others that are not. It is told where nothing else
of the loss hangs on what is trained: where it is taken out of the graph, no backward is left.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.replay.conditions import eager
from nanstop.replay.function_modes import FunctionMode
from nanstop.rewrite.source import nodes_around
from nanstop.tracing.places import source_line, user_line
from nanstop.tracing.source.assignments import tree_of
from nanstop.tracing.source.written import is_unchosen_in_its_function

if TYPE_CHECKING:
    from nanstop.records import SourceLine
    from nanstop.replay.step import Step
    from nanstop.tracing.places import Line


def times_zero(step: Step) -> SourceLine | None:
    """Return the line by which all that a loss is made of is 0, None where there is none.

    Undone bitwise; runs the first micro-batch once more for each such line, and raises what that
    raises. Synchronises the device.
    """
    plain = _TimesZero(None)
    with step.isolated(), eager(), plain:
        step.run(0)
    lines = [line for line in plain.lines if line is not None and _spells_zero(line)]
    return next((source_line(line) for line in reversed(lines) if _is_all(step, line)), None)


def _is_all(step: Step, line: Line) -> bool:
    """Return whether a loss without what a line makes has nothing to train."""
    cut = _TimesZero(line)
    try:
        with step.isolated(), eager(), cut:
            step.run(0)
    except RuntimeError:
        return cut.num_cut > 0
    return False


def _spells_zero(line: Any) -> bool:
    """Return whether a line multiplies by a 0 that stands in it, in each call of its function."""
    code, number = line
    tree = tree_of(code.co_filename)
    if tree is None or not is_unchosen_in_its_function(tree, number):
        return False
    statements = nodes_around(tree, number, ast.stmt)
    node = min(statements, key=lambda one: (one.end_lineno or one.lineno) - one.lineno)
    return any(
        isinstance(one, ast.Constant) and type(one.value) in (int, float) and one.value == 0
        for one in ast.walk(node)
    )


def _is_always_zero(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function of torch makes zeros of other tensors, too, on both sides of 0."""
    for value in (1.0, -1.0):
        other = [
            torch.full_like(one, value).detach() if isinstance(one, Tensor) else one for one in args
        ]
        if bool(func(*other, **kwargs).any()):
            return False
    return True


class _TimesZero(FunctionMode):
    """Keeps the lines that make zeros of what is not by a number that is 0; takes what the given
    one makes out of the graph.
    """

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self.lines: list[Line] = []
        self.num_cut = 0

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not any(type(one) in (int, float) and one == 0 for one in args):
            return result
        given = [one for one in args if isinstance(one, Tensor)]
        is_made = isinstance(result, Tensor) and result.requires_grad and bool(given)
        if not is_made or bool(result.any()) or not any(bool(one.any()) for one in given):
            return result
        if not _is_always_zero(func, args, kwargs):  # a hinge is 0 on one side
            return result
        line = user_line()
        if line not in self.lines:
            self.lines.append(line)
        if line != self._line:
            return result
        self.num_cut += 1
        return result.detach()
