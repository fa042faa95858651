"""What a script holds of what it has trained, told from what is held for looking at it."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

MOST_OBJECTS = 500_000
"""How many are walked: a script that has more within reach is taken to hold what is asked for."""
_SKIPPED = (type, ModuleType, FrameType, CodeType)
"""A module reaches everything, and none of them is part of what is trained."""


def is_held_elsewhere(objects: Sequence[ref[Any]], by: object) -> bool:
    """Return whether anything but ``by`` and what hangs on it keeps one of some objects alive.

    What has more references than all that ``by`` reaches has to it is held from outside, and so is
    what that reaches in turn; nothing is so that belongs to nanstop. Python's collector of cycles
    finds garbage by the same count:
    https://github.com/python/cpython/blob/main/InternalDocs/garbage_collector.md.
    No device work.
    """
    wanted = {id(one()) for one in objects}
    reached = _reached(by)
    if len(reached) > MOST_OBJECTS:
        return True
    known = {id(each) for each in reached}
    counts: Counter[int] = Counter()
    for each in reached:
        counts.update(id(one) for one in _referents(each))
    # What a look itself holds of anything is what it holds of something that nobody else does.
    reached.append([])
    spare = [sys.getrefcount(each) - counts[id(each)] for each in reached]
    from_outside = [
        each
        for each, num in zip(reached, spare, strict=True)
        if num > spare[-1] and not _is_own(each)
    ]
    alive: set[int] = set()
    while from_outside:
        each = from_outside.pop()
        if id(each) in alive or id(each) not in known or _is_own(each):
            continue
        if id(each) in wanted:
            return True
        alive.add(id(each))
        from_outside.extend(_referents(each))
    return False


def _reached(by: object) -> list[Any]:
    """Return all containers that one object reaches, itself first; more than ``MOST_OBJECTS`` are
    not all.
    """
    found, seen = [by], {id(by)}
    for each in found:
        for one in _referents(each):
            if id(one) not in seen and gc.is_tracked(one):
                seen.add(id(one))
                found.append(one)
        if len(found) > MOST_OBJECTS:
            break
    return found


def _referents(each: Any) -> Iterator[Any]:
    held: Iterable[Any] = gc.get_referents(each)
    if type(each) is FunctionType:  # not its globals
        held = each.__closure__ or ()
    # Not `isinstance`: it asks objects what they say their class is, which is code of theirs.
    return (one for one in held if not issubclass(type(one), _SKIPPED))


def _is_own(each: Any) -> bool:
    """Return whether an object is of one of nanstop's classes, or one of its functions."""
    while type(each) in (partial, MethodType):
        each = each.func if type(each) is partial else each.__func__
    named = each if type(each) is FunctionType else type(each)
    return (named.__module__ or "").partition(".")[0] == "nanstop"
