"""Whether an optimizer has the rate that it was made with, and nothing is going to set another.

Asked of rates that are 0, or no finite number: the sources of the script are read.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanstop.own_code import is_library
from nanstop.records import SourceLine
from nanstop.rewrite.rates import KEY, settings, settings_of_groups
from nanstop.tracing.source.assignments import function_at, tree_of
from nanstop.tracing.source.holders import script_frames

if TYPE_CHECKING:
    from torch.optim import Optimizer


def is_as_made(optimizer: Optimizer) -> bool:
    """Return whether every group holds the very number that the optimizer was given as its rate,
    and no file of the script sets a rate: a warm-up by hand, or a library's, puts another object
    there.
    """
    given = optimizer.defaults.get(KEY)
    held = [group.get(KEY) for group in optimizer.param_groups]
    if given is None or not all(one is given for one in held):
        return False
    return not any(_sets_a_rate(file) for file in _files())


def line_that_sets_a_rate() -> SourceLine | None:
    """Return the only line of the script's files that sets a rate, of an optimizer's group as its
    loop or its index says; None where several may do so.
    """
    trees = ((file, tree_of(file)) for file in _files())
    lines = [(file, node) for file, tree in trees if tree for node in settings_of_groups(tree)]
    if len({(file, node.lineno) for file, node in lines}) != 1:
        return None
    file, node = lines[0]
    text, tree = linecache.getline(file, node.lineno).strip(), tree_of(file)
    function = function_at(tree, node.lineno) if tree is not None else ""
    return SourceLine(file=file, line=node.lineno, function=function, text=text)


def _files() -> Iterator[str]:
    """Yield the files of the running functions of the script and of the modules beside it."""
    found = [frame.f_code.co_filename for frame, _ in script_frames()]
    found += [str(getattr(module, "__file__", "") or "") for module in [*sys.modules.values()]]
    yield from (file for file in dict.fromkeys(found) if file and not is_library(file))


def _sets_a_rate(file: str) -> bool:
    if tree_of(file) is None:
        return file.endswith(".py")
    return bool(_settings(file))


def _settings(file: str) -> list[ast.Subscript]:
    tree = tree_of(file)
    return settings(tree) if tree is not None else []
