"""Where numbers that are not finite came into what a script holds: from one of its variables back
to those that its statement reads, as they are now.

Asked of failures only: the variables of the script's frames are searched, and its source is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from torch import Tensor

from nanstop.numerics.tensors import by_torch_alone
from nanstop.records import SourceLine
from nanstop.rewrite.source import nodes_around
from nanstop.tracing.source.assignments import Assignment, line_of, tree_of
from nanstop.tracing.source.holders import held_in, holder_of, script_frames

_MOST_STATEMENTS = 8


def line_of_bad(held: Iterable[Tensor]) -> SourceLine | None:
    """Return the statement that gave its value to the first variable of those that tensors came to
    be not finite by: the one that holds them, or one that they were computed of; None where no
    variable of the script holds a bad one. Synchronises the device.
    """
    for tensor in held:
        holder = holder_of(tensor) if _is_bad(tensor) else None
        if holder is not None and holder.line is not None:
            return _first_of(holder.line)
    return None


def _first_of(line: SourceLine) -> SourceLine:
    for _ in range(_MOST_STATEMENTS):
        earlier = _read_bad(line)
        if earlier is None or earlier.line >= line.line:
            break
        line = earlier
    return line


def _read_bad(line: SourceLine) -> SourceLine | None:
    """Return the statement of a variable that another one reads, and that is not finite now."""
    tree = tree_of(line.file)
    statements = nodes_around(tree, line.line, ast.Assign, ast.AnnAssign) if tree else []
    if not statements:
        return None
    nodes = [n for n in ast.walk(statements[-1]) if isinstance(n, ast.Name)]
    given = {n.id for n in nodes if isinstance(n.ctx, ast.Store)}
    names = {n.id for n in nodes} - given  # what is given anew is no longer what was read
    for frame, _ in script_frames():
        if frame.f_code.co_filename != line.file or frame.f_code.co_name != line.function:
            continue
        for one in held_in(frame):
            if one.name in names and _is_bad(one.tensor):
                return line_of(Assignment(line.file, line.line, one.name))
    return None


def _is_bad(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    with by_torch_alone():
        return not bool(tensor.detach().isfinite().all())
