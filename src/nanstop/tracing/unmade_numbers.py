"""Which line of a script makes numbers that are not finite out of finite ones, while something is
made again: the rows of a batch, by a data set and a collator.

NumPy says at which operation it divides by 0, or has no value, and goes on; torch says nothing, and
each of its results is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nanstop.numerics.tensors import by_torch_alone, tensors
from nanstop.own_code import is_library
from nanstop.replay.conditions import unwarned
from nanstop.replay.function_modes import OwnMode, is_crowded, on_stack
from nanstop.replay.rng import rng_kept
from nanstop.tracing.places import source_line, user_line

if TYPE_CHECKING:
    from nanstop.records import SourceLine

_MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Maker:
    """``code``: whose line it is. ``function``: the name of torch's function that does it, "" for
    an operation of NumPy's. ``makes_nan``: whether it makes NaN, not infinities alone.
    """

    code: CodeType
    function: str
    makes_nan: bool


@dataclass(frozen=True, slots=True)
class Unmade:
    """``makers``: the lines of the script at which numbers stop being finite, each with what does
    it. ``is_bad``: whether some of what is made is not finite.
    """

    makers: Mapping[SourceLine, Maker]
    is_bad: bool


def lines_that_unmake(make: Callable[[], Any]) -> Unmade:
    """Return the lines of the script at which numbers stop being finite while ``make`` runs.

    What it raises is no answer: no lines, and nothing bad. Random streams are as they were before.
    """
    seen = _Seen()
    on = nullcontext() if is_crowded() else on_stack(seen)
    try:
        with _told_by_numpy(seen.note), on:
            made = made_again(make)
    except Exception:  # code of the script, called at another time than it was written for
        return Unmade({}, is_bad=False)
    return Unmade(seen.makers, any(map(_is_bad, made)))


def made_again(make: Callable[[], Any]) -> list[Tensor]:
    """Return the tensors of what ``make`` returns; random streams are as they were before. Errors:
    those of ``make``.
    """
    with rng_kept(), unwarned(), torch.no_grad():
        made = make()
    with by_torch_alone():
        return tensors(made)


class _Seen(OwnMode):
    """Notes the lines whose results are not finite although all that they read is."""

    def __init__(self) -> None:
        super().__init__()
        self.makers: dict[SourceLine, Maker] = {}

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        with by_torch_alone():
            was_bad = any(map(_is_bad, tensors((args, kwargs)))) or _holds_bad(
                (*args, *kwargs.values())
            )
        result = func(*args, **kwargs)
        with by_torch_alone():
            made = [] if was_bad else [one for one in tensors((result, args)) if _is_bad(one)]
            if made:
                is_nan = any(bool(one.isnan().any()) for one in made)
                self._note(getattr(func, "__name__", ""), is_nan)
        return result

    def note(self, what: str, *_: Any) -> None:
        """Note the line of the script that is at work, by an operation of NumPy's."""
        self._note("", what.startswith("invalid"))

    def _note(self, function: str, makes_nan: bool) -> None:
        line = user_line()
        if line is not None and not is_library(line[0].co_filename):
            source = source_line(line)
            if source is not None:
                self.makers.setdefault(source, Maker(line[0], function, makes_nan))


def _is_bad(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() > _MOST_ELEMENTS:
        return False
    return not bool(tensor.isfinite().all())


def _holds_bad(given: Iterable[Any]) -> bool:
    """Return whether an array of NumPy's, or a number in a list, is not finite: one that is given
    by itself may be written by the line.
    """
    listed = (leaf for one in given if isinstance(one, list) for leaf in tree_leaves(one))
    if any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in listed):
        return True
    arrays = (one for one in given if getattr(getattr(one, "dtype", None), "kind", "") == "f")
    return not all(bool(torch.as_tensor(one).isfinite().all()) for one in arrays)


@contextmanager
def _told_by_numpy(note: Callable[..., None]) -> Iterator[None]:
    """Have NumPy call ``note`` where it divides by 0 or has no value, in the place of warning."""
    import numpy as np

    with np.errstate(divide="call", invalid="call", over="call", call=note):
        yield
