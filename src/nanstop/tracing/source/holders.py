"""What a script calls a tensor that no operation of a step has made, and the line that made it.

Asked of failures only: the variables of the script's frames are searched, and its source is read.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from nanstop.frozen import frozen
from nanstop.numerics.tensors import version
from nanstop.own_code import is_library, is_own
from nanstop.records import SourceLine
from nanstop.replay.untouched import address
from nanstop.tracing.source.assignments import (
    Assignment,
    attributes_given,
    bindings,
    bound_in_loop,
    function_at,
    is_bound,
    is_set_later,
    is_set_up_alone,
    line_of,
    tree_of,
    written_below,
)

_MAX_LOOKED_AT = 20_000
_MAX_DEPTH = 4
RUN = str(Path(__file__).parents[1] / "record_step.py")
"""Frames above its frames belong to the run that is recorded, those below to the script."""
_NO_OWNERS = (ModuleType, type, str, bytes, int, float, complex, nn.ParameterDict, nn.ParameterList)


@frozen
class Holder:
    """A variable of the script. ``name`` is what the script writes: ``loss_fn.weight``.

    ``line``: the one that gave it its value, None where the source does not say, or names several
    of which one has run.
    ``before``: whether that was before the step, as the structure of the source says: not where
    ``line`` writes in place to what a constructor has made.
    ``declared``: whether ``line`` is one of the class that has it as an attribute.
    """

    name: str
    line: SourceLine | None
    before: bool
    declared: bool = False


@frozen
class HeldVariable:
    """A tensor that a variable of the script holds by ``name``.

    ``is_local``: whether the variable is one of the function's own.
    """

    name: str
    tensor: Tensor
    place: Assignment
    is_local: bool


def holder_of(tensor: Tensor) -> Holder | None:
    """Return the script's variable that holds a tensor or another view of its memory, the nearest
    to the running operation; None where none does. Reads no values.
    """
    wanted = address(tensor)
    if not wanted:
        return None
    for frame, inside in script_frames():
        found = next((one for one in held_in(frame) if address(one.tensor) == wanted), None)
        if found is not None and not _is_argument(frame, found):
            place = found.place
            if any(is_set_later(*one) for one in place.within):
                return Holder(found.name, None, before=False)
            made = (written_below(place) if version(found.tensor) > 0 else None) or line_of(place)
            fresh = found.is_local and (inside or bound_in_loop(place, frame.f_lineno))
            if place.attribute:
                # A buffer that a method sets is state, be it written in place or replaced.
                moves = place.buffer or version(found.tensor) > 0
                is_written = moves and not is_set_up_alone(place)
                made = line_of(place, is_written=is_written)
                fresh = is_written or not is_bound(place)
            return Holder(found.name, made, not fresh, declared=place.attribute)
    return None


def _is_argument(frame: FrameType, held: HeldVariable) -> bool:
    """Return whether a variable is a parameter that its function gives other values: then its
    caller may have given it the one that it holds, and no line of the function is known to have.
    """
    code, place = frame.f_code, held.place
    is_given = place.variable in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    tree = tree_of(place.file) if is_given and held.name == place.variable else None
    lines = bindings(tree, place) if tree is not None else ()
    return tree is not None and any(function_at(tree, line) == code.co_name for line in lines)


def script_frames() -> Iterator[tuple[FrameType, bool]]:
    """Yield the running frames of the script, the innermost first, and whether each belongs to the
    run that is recorded.
    """
    inside = True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        inside = inside and frame.f_code.co_filename != RUN
        if not _is_foreign(frame):
            yield frame, inside
        frame = frame.f_back


def _is_foreign(frame: FrameType) -> bool:
    """Return whether a frame is a library's, or one that only stands for a line of the script."""
    name = str(frame.f_globals.get("__name__", ""))
    file = frame.f_code.co_filename
    return is_library(file) or (name.startswith("nanstop.") and is_own(_file_of(frame)))


def _file_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__file__", ""))


def _own_file(kind: type, constructor: CodeType | None) -> str:
    """Return the file of a class of the script's own that a library constructs, "" for any other:
    what its methods give to attributes has a line.
    """
    if constructor is not None and not is_library(constructor.co_filename):
        return ""
    codes = (getattr(one, "__code__", None) for one in vars(kind).values())
    files = (code.co_filename for code in codes if isinstance(code, CodeType))
    return next((file for file in files if not is_library(file)), "")


def held_in(frame: FrameType) -> Iterator[HeldVariable]:
    """Yield the tensors that a frame's variables hold, what is nearest first."""
    code, file = frame.f_code, frame.f_code.co_filename
    own = dict(frame.f_locals)
    if sys.version_info < (3, 13) and code.co_flags & CO_OPTIMIZED:
        frame.f_locals.clear()  # a copy that the frame keeps would hold the step's graph (PEP 667)
    every = {k: v for k, v in frame.f_globals.items() if k not in own} | own
    fresh = code.co_varnames if code.co_flags & CO_OPTIMIZED else tuple(own)
    queue: deque[tuple[str, Any, Assignment, str, int]] = deque()
    for variable in sorted(every, key=lambda name: name not in own):
        place = Assignment(file, frame.f_lineno, variable)
        queue.append((variable, every[variable], place, variable, 0))
    seen: set[int] = set()
    while queue and len(seen) < _MAX_LOOKED_AT:
        name, value, place, root, depth = queue.popleft()
        if isinstance(value, Tensor):
            yield HeldVariable(name, value, place, root in fresh)
            continue
        if isinstance(value, _NO_OWNERS) or id(value) in seen or root.startswith("__"):
            continue
        seen.add(id(value))
        if depth < _MAX_DEPTH:
            queue.extend((*part, root, depth + 1) for part in _parts(name, value, place))


def _parts(name: str, value: Any, place: Assignment) -> Iterator[tuple[str, Any, Assignment]]:
    """Yield what an object holds, by the name that a script would write for it."""
    if isinstance(value, Mapping):
        entries = value.items() if type(value) is dict else ()
        yield from ((f"{name}[{key!r}]", entry, place) for key, entry in entries)
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{i}]", entry, place) for i, entry in enumerate(value))
    elif isinstance(value, partial):
        yield from _parts(name, [value.func, *value.args, *value.keywords.values()], place)
    elif isinstance(value, MethodType):
        yield name.rpartition(".")[0] or name, value.__self__, place
    elif isinstance(value, FunctionType):
        yield from _held_by_function(value)
    else:
        yield from _attributes(name, value, place)


def _held_by_function(function: FunctionType) -> Iterator[tuple[str, Any, Assignment]]:
    code = function.__code__
    if is_library(code.co_filename):
        return
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # without a value yet
            continue
        yield variable, value, Assignment(code.co_filename, code.co_firstlineno, variable)
    names = code.co_varnames[: code.co_argcount][::-1]
    for variable, value in zip(names, (function.__defaults__ or ())[::-1], strict=False):
        yield variable, value, Assignment(code.co_filename, code.co_firstlineno, "")


def _attributes(name: str, value: Any, place: Assignment) -> Iterator[tuple[str, Any, Assignment]]:
    held = getattr(value, "__dict__", None)
    if type(held) is not dict:
        return
    code: CodeType | None = getattr(getattr(type(value), "__init__", None), "__code__", None)
    tables = ("_buffers", "_modules") if isinstance(value, nn.Module) else ()
    entries = [e for table in tables for e in held[table].items()]
    own_file = _own_file(type(value), code)
    entries += [e for e in held.items() if e[0] not in ("_parameters", *tables)]
    for attribute, entry in entries:
        # A library's attribute has no line of its own, only the variable that holds its owner.
        made = Assignment(place.file, place.at, "") if place.attribute else place
        made = replace(made, within=(*made.within, (type(value), attribute)))
        if own_file and attribute in attributes_given(own_file):
            made = Assignment(own_file, 0, attribute, attribute=True)
        if code is not None and not is_library(code.co_filename):
            made = Assignment(
                code.co_filename,
                code.co_firstlineno,
                attribute,
                attribute=True,
                buffer="_buffers" in tables and attribute in held["_buffers"],
            )
        yield f"{name}.{attribute}", entry, made
