"""What a line of a script says by itself.

Numbers that are not finite: `float("-inf")`, `math.nan`, `1e999`. What a line only brings in was
computed before it, where no operation is seen. And whether it does the same in each step: no
condition chooses it, and no number goes into it that a later step may have otherwise.

Asked of failures, and of what has left nothing of gradients: the source is read.
"""

from __future__ import annotations

import ast
import builtins
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import CO_OPTIMIZED
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.numerics.graph import is_leaf
from nanstop.own_code import is_library
from nanstop.records import SourceLine
from nanstop.rewrite.operations import end_of_format
from nanstop.rewrite.source import LOOPS, nodes_around
from nanstop.tracing.source.assignments import tree_of
from nanstop.tracing.source.holders import script_frames

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_CHOICES = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.Match)
_LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_CALLED = (ModuleType, type, FunctionType, BuiltinFunctionType)


def writes_down(line: SourceLine, *, is_nan: bool, most: float = math.inf) -> bool:
    """Return whether the statement of a line, or the lambda in it, holds NaN, or else an infinity,
    by its own text: a constant, or one that a module has under a name that the file imports.
    ``most``: the largest number of the format in which it is one: -1e9 is -Inf in float16.
    """
    tree = tree_of(line.file)
    code = [] if tree is None else nodes_around(tree, line.line, ast.stmt, ast.Lambda)
    if tree is None or not code:
        return False
    imported = _imported(tree)
    least = min(map(_length, code))  # several statements may share a line
    held = (node for one in code if _length(one) == least for node in ast.walk(one))
    numbers = (value for node in held if (value := _number(node, imported)) is not None)
    if is_nan:
        return any(map(math.isnan, numbers))
    return any(math.isinf(value) or abs(value) > most for value in numbers)


def _length(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return (node.end_lineno or 0) - node.lineno, isinstance(node, ast.stmt)


def _imported(tree: ast.AST) -> Mapping[str, Any]:
    """Return what the imports of a file gave names to, as far as it is imported by now."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                module = one.name if one.asname else one.name.partition(".")[0]
                found[one.asname or module] = sys.modules.get(module)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            held = vars(sys.modules[node.module]) if node.module in sys.modules else {}
            found |= {one.asname or one.name: held.get(one.name) for one in node.names}
    return found


def _number(node: ast.AST, imported: Mapping[str, Any]) -> float | None:
    """Return the number that an expression is without a variable of the script, None where it is
    none.
    """
    value: Any = None
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
        value = end_of_format(node)
    elif isinstance(node, ast.Name):
        value = imported.get(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        module = imported.get(node.value.id)
        value = getattr(module, "__dict__", {}).get(node.attr)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        value = _parsed(node.args[0]) if node.func.id == "float" else None
    return value if isinstance(value, float) else None


def _parsed(node: ast.AST) -> float | None:
    text = node.value if isinstance(node, ast.Constant) else None
    try:
        return float(text) if isinstance(text, str) else None
    except ValueError:
        return None


def is_fixed_here() -> bool:
    """Return whether the line of the script that runs now does the same in each pass of its loop.

    False where that is not known: it is in no loop, or the source is not there.
    """
    frames = [frame for frame, _ in script_frames()]
    if not frames:
        return False
    known: dict[str, Any] = {}
    for frame in reversed(frames):
        known |= _variables(frame)
    tree, line = tree_of(frames[0].f_code.co_filename), frames[0].f_lineno
    statements = [] if tree is None else nodes_around(tree, line, ast.stmt, ast.Lambda)
    if not statements or not _reads_no_number(min(statements, key=_lines_of), known):
        return False
    return _are_unchosen(frames[::-1])


def is_fixed_hook(hook: Any) -> bool:
    """Return whether a hook makes the same of each gradient, as far as its source says it."""
    while isinstance(hook, partial) and not hook.args and not hook.keywords:
        hook = hook.func
    if isinstance(hook, BuiltinFunctionType):  # torch's own: it has nothing but the gradient
        return True
    if not isinstance(hook, FunctionType) or hook.__defaults__ or hook.__kwdefaults__:
        return False
    code = hook.__code__
    if is_library(code.co_filename):
        return False
    tree = tree_of(code.co_filename)
    made = [] if tree is None else nodes_around(tree, code.co_firstlineno, *_FUNCTIONS)
    own = [node for node in made if node.lineno == code.co_firstlineno]
    if len(own) != 1 or any(isinstance(node, _CHOICES) for node in ast.walk(own[0])):
        return False
    cells = zip(code.co_freevars, hook.__closure__ or (), strict=True)
    known = {**hook.__globals__, **{name: cell.cell_contents for name, cell in cells}}
    return _reads_no_number(own[0], known)


def is_unchosen_in_its_function(tree: ast.AST, line: int) -> bool:
    """Return whether no condition of its own function, or of the outermost loop that it lies in
    where it is in none, stands over a line.
    """
    begin = max((node.lineno for node in nodes_around(tree, line, *_FUNCTIONS)), default=0)
    if not begin:
        begin = min((loop.lineno for loop in nodes_around(tree, line, *LOOPS)), default=0)
    return not any(node.lineno >= begin for node in nodes_around(tree, line, *_CHOICES))


def _lines_of(node: ast.AST) -> int:
    found: Any = node
    return (found.end_lineno or found.lineno) - found.lineno


def _variables(frame: FrameType) -> dict[str, Any]:
    found = {**frame.f_globals, **frame.f_locals}
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        frame.f_locals.clear()  # a copy that the frame keeps would hold the step's graph (PEP 667)
    return found


def _reads_no_number(code: ast.AST, known: Mapping[str, Any]) -> bool:
    """Return whether all that some code reads is trained or trains: weights, models, optimizers,
    and functions that it calls.
    """
    nodes = [*ast.walk(code)]
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    free = {node.id for node in names} - bound
    held = {name: known.get(name, getattr(builtins, name, None)) for name in free}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    owned = ((_held_by_name(node.value, held), node.attr) for node in attributes)
    parts = (_part_of(one, name) for one, name in owned if isinstance(one, nn.Module))
    return all(map(_trains, (*held.values(), *parts)))


def _held_by_name(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return what a name is, or a part of a model by its name, None for all else."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _held_by_name(node.value, known)
    return _part_of(owner, node.attr) if isinstance(owner, nn.Module) else None


def _part_of(model: nn.Module, name: str) -> Any:
    """Return what a model has under a name, without a call of what its class defines."""
    for table in (model._parameters, model._modules, vars(model), vars(nn.Module)):
        if name in table:
            return table[name]
    return next((vars(kind)[name] for kind in type(model).__mro__ if name in vars(kind)), None)


def _trains(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_leaf(value) and value.requires_grad
    if isinstance(value, (list, tuple)):
        return all(map(_trains, value))
    return isinstance(value, (nn.Module, Optimizer, *_CALLED))


def _are_unchosen(frames: Sequence[FrameType]) -> bool:
    """Return whether, from the outermost loop of some running functions on, the outermost first,
    no condition stands over the lines that they are at.
    """
    is_in_loop = False
    for frame in frames:
        tree, line = tree_of(frame.f_code.co_filename), frame.f_lineno
        if tree is None:
            return False
        functions = nodes_around(tree, line, *_FUNCTIONS)
        begin = max((node.lineno for node in functions), default=0)
        loops = [one.lineno for one in nodes_around(tree, line, *LOOPS) if one.lineno >= begin]
        if not is_in_loop and not loops:
            continue
        begin = begin if is_in_loop else min(loops)
        is_in_loop = True
        choices = nodes_around(tree, line, *_CHOICES)
        leaves = (node for node in ast.walk(tree) if isinstance(node, _LEAVES))
        if any(node.lineno >= begin for node in choices):
            return False
        if any(begin <= node.lineno < line for node in leaves):
            return False
    return is_in_loop
