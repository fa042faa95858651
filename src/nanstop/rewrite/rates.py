"""What a script gives the groups of an optimizer, when it is made and since."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

from nanstop.records import OptimizerFacts, Report
from nanstop.rewrite.definitions import definition
from nanstop.rewrite.source import Edit, Source

KEY = "lr"
"""What every optimizer of torch calls its rate."""


def settings(tree: ast.AST) -> list[ast.Subscript]:
    """Return what is written to under the key of a rate: a log has rates, too."""
    return [node for node in _rates(tree) if isinstance(node.ctx, ast.Store)]


def settings_of_groups(tree: ast.AST) -> list[ast.Subscript]:
    """Return those of an optimizer's group, as its loop or its index says."""
    return [node for node in settings(tree) if _is_of_a_group(tree, node)]


def is_set_since(optimizer: OptimizerFacts | None) -> bool:
    """Return whether an optimizer has another rate than it was made with, which no schedule of
    torch's has made of that.
    """
    if optimizer is None or optimizer.scheduled or not (optimizer.lr and optimizer.given):
        return False
    return not math.isclose(optimizer.lr, optimizer.given, rel_tol=1e-6)


def is_of_a_schedule(report: Report) -> bool:
    """Return whether the rate of the update that failed is a schedule's own: higher than the one
    that it counts from, or all groups have another than the optimizer was made with. What the
    optimizer is given is then not what it comes to.
    """
    optimizer, at = report.incident.facts.optimizer, report.incident.at.step
    if optimizer is None or not optimizer.scheduled:
        return False
    known = [one for one in report.incident.history if one.name == KEY]
    pairs = (pair for one in known for pair in zip(one.steps, one.values, strict=False))
    rate = next(iter([value for step, value in pairs if step <= at][-1:]), 0.0)
    if rate > optimizer.scheduled * (1 + 1e-6):
        return True
    is_one = optimizer.highest is None and bool(optimizer.given)
    return is_one and not math.isclose(optimizer.given or 0.0, optimizer.scheduled, rel_tol=1e-6)


def of_groups(source: Source, call: ast.Call, name: str) -> tuple[list[ast.expr], bool]:
    """Return what the groups that an optimizer is made with have under a name of their own, and
    whether each has: what the optimizer itself is given is then nobody's.
    """
    groups: ast.AST | None = parameters_given(call)
    if groups is None:
        return [], False
    if isinstance(groups, ast.Name):
        given = definition(source, groups, source.statement_of(call))
        groups = given.value if given is not None else groups
    made = [one for one in map(_entries, ast.walk(groups)) if "params" in one]
    own = [one[name] for one in made if name in one]
    return own, bool(own) and len(own) == len(made)


def parameters_given(call: ast.Call) -> ast.expr | None:
    """Return what an optimizer is made with to train, None where it is given nothing."""
    named = next((one.value for one in call.keywords if one.arg == "params"), None)
    return call.args[0] if call.args else named


def _entries(node: ast.AST) -> dict[str, ast.expr]:
    """Return what a dictionary, in braces or by ``dict``, holds under names that stand there."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(k.value): value for k, value in pairs if isinstance(k, ast.Constant)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return {one.arg: one.value for one in node.keywords if one.arg is not None}
    return {}


def set_anew(source: Source, changed: Callable[[ast.expr], str]) -> list[Edit] | None:
    """Return the edit of the only line that sets a rate to what is no multiple of the one before;
    none where several do, None where no line does.
    """
    targets = set(map(id, settings_of_groups(source.tree)))
    values = [
        node.value
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign) and any(id(one) in targets for one in node.targets)
    ]
    fresh = [one for one in values if not _rates(one)]
    if not fresh:
        return None
    return [Edit(*source.span(fresh[0]), changed(fresh[0]))] if len(fresh) == 1 else []


def _rates(tree: ast.AST) -> list[ast.Subscript]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == KEY
    ]


def _is_of_a_group(tree: ast.AST, node: ast.Subscript) -> bool:
    held = node.value
    if not isinstance(held, ast.Name):
        return _names_groups(held)
    loops = (one for one in ast.walk(tree) if isinstance(one, ast.For | ast.comprehension))
    names = [
        (name.id, loop.iter)
        for loop in loops
        for name in ast.walk(loop.target)
        if isinstance(name, ast.Name)
    ]
    return any(name == held.id and _names_groups(iterated) for name, iterated in names)


def _names_groups(node: ast.AST) -> bool:
    named = (one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute))
    return "param_groups" in named
