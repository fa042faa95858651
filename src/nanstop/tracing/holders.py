"""What a script calls a tensor that no operation of a step has made, and the line that made it.

Asked of failures only: the variables of the script's frames are searched, and its source is read.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from nanstop.frozen import frozen
from nanstop.numerics.tensors import is_in_place, version
from nanstop.own_code import is_library, is_own
from nanstop.records import SourceLine
from nanstop.replay.untouched import address
from nanstop.rewrite.source import nodes_around

_MAX_LOOKED_AT = 20_000
_MAX_DEPTH = 4
RUN = str(Path(__file__).with_name("record_step.py"))
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
class Assignment:
    """``file``, ``at``: a line in the scope in which ``variable`` was given its value.

    ``attribute``: whether it is one of ``self``. ``buffer``: and a module's buffer. ``within``: the
    attributes of a library's objects by which the variable holds what is looked for, each with the
    class of its object.
    """

    file: str
    at: int
    variable: str
    attribute: bool = False
    buffer: bool = False
    within: tuple[tuple[type, str], ...] = ()


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
            if any(_is_set_later(*one) for one in place.within):
                return Holder(found.name, None, before=False)
            made = (_written_below(place) if version(found.tensor) > 0 else None) or _line_of(place)
            fresh = found.is_local and (inside or _bound_in_loop(place, frame.f_lineno))
            if place.attribute:
                # A buffer that a method sets is state, be it written in place or replaced.
                moves = place.buffer or version(found.tensor) > 0
                is_written = moves and not _is_set_up_alone(place)
                made = _line_of(place, is_written=is_written)
                fresh = is_written or not _is_bound(place)
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
    entries += [e for e in held.items() if e[0] not in ("_parameters", *tables)]
    for attribute, entry in entries:
        # A library's attribute has no line of its own, only the variable that holds its owner.
        made = Assignment(place.file, place.at, "") if place.attribute else place
        made = replace(made, within=(*made.within, (type(value), attribute)))
        if code is not None and not is_library(code.co_filename):
            made = Assignment(
                code.co_filename,
                code.co_firstlineno,
                attribute,
                attribute=True,
                buffer="_buffers" in tables and attribute in held["_buffers"],
            )
        yield f"{name}.{attribute}", entry, made


# ---- the source


def _line_of(place: Assignment, *, is_written: bool = False) -> SourceLine | None:
    """Return the line that gave a variable its value: the last one in its scope, before the line
    that runs if there is one. Of an attribute that of the constructor, where no other line gives it
    one; or where ``is_written`` the only one that has written to it since.
    """
    tree = tree_of(place.file)
    found = [] if tree is None else list(bindings(tree, place))
    if tree is None or not found:
        return None
    if place.attribute:
        later = [line for line in found if function_at(tree, line) != "__init__"]
        numbers = later if is_written else [] if later else found[:1]
        if len(numbers) != 1:
            return None
        number = numbers[0]
    else:
        number = max([line for line in found if line <= place.at] or found)
        if _is_one_of_several(tree, number, found, place.at):
            return None
    return _source_line(place.file, tree, number)


def _is_one_of_several(tree: ast.AST, number: int, found: list[int], at: int) -> bool:
    """Return whether another arm of an ``if`` around a line gives the value as well: which one ran
    is not known, but where line ``at``, which runs, lies in the arm of the first.
    """
    for node in nodes_around(tree, number, ast.If):
        first, *_ = node.orelse or (None,)
        start, end = (first.lineno, node.end_lineno or 0) if first is not None else (0, 0)
        is_else = start <= number <= end
        others = [n for n in found if node.lineno <= n <= (node.end_lineno or 0)]
        apart = any((start <= n <= end) != is_else for n in others)
        inside = node.lineno <= at <= (node.end_lineno or 0)
        if apart and not (inside and (start <= at <= end) == is_else):
            return True
    return False


def _written_below(place: Assignment) -> SourceLine | None:
    """Return the line further down that wrote last to what a variable holds, if the loop around the
    line that runs gives it no value before that one: it did in the round before.
    """
    tree = tree_of(place.file)
    loops = nodes_around(tree, place.at, ast.For, ast.While) if tree is not None else []
    if tree is None or not loops or place.attribute:
        return None
    inner = max(loops, key=lambda node: node.lineno)
    lines = list(bindings(tree, place))
    found = [line for line in lines if inner.lineno <= line <= (inner.end_lineno or 0)]
    if not found or min(found) <= place.at or len(lines) > len(found) + 1:
        return None  # or it was written to before the loop as well
    return _source_line(place.file, tree, max(found))


def _source_line(file: str, tree: ast.AST, number: int) -> SourceLine:
    text, function = linecache.getline(file, number).strip(), function_at(tree, number)
    return SourceLine(file=file, line=number, function=function, text=text)


def is_assignment(line: SourceLine) -> bool:
    """Return whether a line is of a statement that computes what it gives to a variable."""
    tree = tree_of(line.file)
    return tree is not None and bool(nodes_around(tree, line.line, ast.Assign, ast.AnnAssign))


def function_at(tree: ast.AST, line: int) -> str:
    around = max(_functions(tree, line), key=lambda f: f.lineno, default=None)
    return around.name if around is not None else "<module>"


def _functions(tree: ast.AST, line: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions that a line lies in."""
    return nodes_around(tree, line, ast.FunctionDef, ast.AsyncFunctionDef)


def _is_set_up_alone(place: Assignment) -> bool:
    """Return whether nothing but a constructor gives an attribute a value."""
    tree = tree_of(place.file)
    lines = list(bindings(tree, place)) if tree is not None else []
    return all(function_at(tree, line) == "__init__" for line in lines if tree is not None)


def _is_set_later(kind: type, attribute: str) -> bool:
    """Return whether a method of a class, or of one that it is made of, gives an attribute a value
    after the constructor: the line that made the object says nothing of it then.
    """
    for one in kind.__mro__:
        file = getattr(sys.modules.get(one.__module__), "__file__", None)
        tree = tree_of(file) if file is not None and file.endswith(".py") else None
        if tree is None:
            continue
        place = Assignment(str(file), 0, attribute, attribute=True)
        bodies = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        mine = [n for n in bodies if n.name == one.__name__]
        later = (line for line in bindings(tree, place) if function_at(tree, line) != "__init__")
        if any(n.lineno <= line <= (n.end_lineno or 0) for line in later for n in mine):
            return True
    return False


def _is_bound(place: Assignment) -> bool:
    """Return whether the source gives a variable a value anywhere."""
    tree = tree_of(place.file)
    return tree is not None and any(bindings(tree, place))


def _bound_in_loop(place: Assignment, at: int) -> bool:
    """Return whether the innermost loop around line ``at`` gives the variable a value."""
    tree = tree_of(place.file)
    loops = [] if tree is None else nodes_around(tree, at, ast.For, ast.While)
    if tree is None or not loops:
        return False
    inner = max(loops, key=lambda n: n.lineno)
    return any(inner.lineno <= line <= (inner.end_lineno or 0) for line in bindings(tree, place))


def bindings(tree: ast.AST, place: Assignment) -> Iterator[int]:
    """Yield the lines that give a variable, or elements of it, a value in the innermost scope that
    does so.
    """
    visible = {f.lineno for f in _functions(tree, place.at)} | {0}
    found: dict[int, list[int]] = {}
    for node in ast.walk(tree):
        if not _binds(node, place):
            continue
        line: int = getattr(node, "lineno", 0)
        scope = max((f.lineno for f in _functions(tree, line)), default=0)
        if place.attribute or scope in visible:
            found.setdefault(0 if place.attribute else scope, []).append(line)
    yield from sorted(found[max(found)]) if found else ()


def _held_by(target: ast.expr) -> ast.expr:
    """Return what holds an entry that is written: x of ``x[3]["y"][0] = ...``."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target


def _binds(node: ast.AST, place: Assignment) -> bool:
    target = _written_by_call(node) or node
    if place.attribute and target is node and isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        first = node.args[0] if node.args else None
        named = isinstance(first, ast.Constant) and first.value == place.variable
        return called == "register_buffer" and named
    if isinstance(target, ast.Subscript) and isinstance(target.ctx, ast.Store):
        target = _held_by(target)
    if target is node and not isinstance(getattr(node, "ctx", None), ast.Store):
        return False
    if place.attribute:
        return isinstance(target, ast.Attribute) and target.attr == place.variable
    return isinstance(target, ast.Name) and target.id == place.variable


def _written_by_call(node: ast.AST) -> ast.AST | None:
    """Return what a call such as ``x.lerp_(y)`` writes to."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    return node.func.value if is_in_place(node.func.attr) else None


def tree_of(file: str) -> ast.AST | None:
    """Return the syntax of a source file, None where it is none of Python. It is shared: a script
    is asked about in each step, and to parse it takes longer than a step of a small model.
    """
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=8)
def _parsed(source: str) -> ast.AST | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None
