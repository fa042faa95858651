"""Whether an optimizer has the rate that it was made with, and nothing is going to set another.

Asked of rates that are 0: the sources of the script are read.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanstop.own_code import is_library
from nanstop.tracing.holders import script_frames, tree_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

KEY = "lr"
"""What every optimizer of torch calls its rate."""


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


def _files() -> Iterator[str]:
    """Yield the files of the running functions of the script and of the modules beside it."""
    found = [frame.f_code.co_filename for frame, _ in script_frames()]
    found += [str(getattr(module, "__file__", "") or "") for module in [*sys.modules.values()]]
    yield from (file for file in dict.fromkeys(found) if file and not is_library(file))


def _sets_a_rate(file: str) -> bool:
    tree = tree_of(file)
    if tree is None:
        return file.endswith(".py")
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == KEY
        for node in ast.walk(tree)
    )
