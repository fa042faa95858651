"""Python that means nothing to the training: decorators, contexts, other loops, other layout."""

from __future__ import annotations

import ast

from variants.script import Rewrite, Script, at_top, each_expression, expression, statements

_DECORATOR = """
def passed_on(function):
    import functools

    @functools.wraps(function)
    def passing(*args, **kwargs):
        return function(*args, **kwargs)

    return passing
"""


def respelled(script: Script) -> ast.Module:
    """Change nothing but the layout: no comments, a statement a line."""
    return script.tree()


def decorated(script: Script) -> ast.Module | None:
    """Put a decorator that passes everything on around every function of the script."""
    tree = script.tree()
    own = [one for one in tree.body if isinstance(one, ast.FunctionDef) and not one.decorator_list]
    for one in own:
        one.decorator_list = [expression("passed_on", one)]
    at_top(tree, _DECORATOR)
    return tree if own else None


def in_contexts(script: Script) -> ast.Module | None:
    """Put the body of every function into a context that does nothing."""
    tree = script.tree()
    own = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    for one in own:
        first = 1 if ast.get_docstring(one, clean=False) is not None else 0
        body = one.body[first:]
        if not body:
            continue
        (held,) = statements("with contextlib.nullcontext():\n    pass", body[0])
        assert isinstance(held, ast.With)
        held.body = body
        one.body[first:] = [held]
    at_top(tree, "import contextlib")
    return tree if own else None


def by_map(script: Script) -> ast.Module | None:
    """Write comprehensions over one thing as ``map``."""

    def change(node: ast.expr) -> ast.expr | None:
        if not isinstance(node, ast.ListComp | ast.DictComp) or len(node.generators) != 1:
            return None
        (over,) = node.generators
        if over.ifs or not isinstance(over.target, ast.Name):
            return None
        pair = isinstance(node, ast.DictComp)
        text = "dict(map(lambda: (KEY, VALUE), OVER))" if pair else "list(map(lambda: OF, OVER))"
        parts = {"KEY": node.key, "VALUE": node.value} if pair else {"OF": node.elt}
        made = expression(text, node, OVER=over.iter, **parts)
        function = next(one for one in ast.walk(made) if isinstance(one, ast.Lambda))
        function.args.args = [ast.copy_location(ast.arg(over.target.id), node)]
        return made

    return each_expression(script.tree(), change)


class _Whiles(ast.NodeTransformer):
    """Writes ``for x in y`` as ``while`` with an iterator; loops that jump are left."""

    def __init__(self) -> None:
        self.number = 0

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if node.orelse:
            return node
        self.number += 1
        text = (
            f"items_{self.number} = iter(OVER)\nwhile True:\n    try:\n        item_{self.number}"
        )
        text += f" = next(items_{self.number})\n    except StopIteration:\n        break"
        made = statements(text, node, OVER=node.iter)
        loop = made[1]
        assert isinstance(loop, ast.While)
        (given,) = statements(f"x = item_{self.number}", node)
        assert isinstance(given, ast.Assign)
        given.targets = [node.target]
        loop.body += [given, *node.body]
        return made


def by_while(script: Script) -> ast.Module | None:
    """Write loops with an iterator and ``while``."""
    tree = script.tree()
    walked = _Whiles()
    walked.visit(tree)
    return tree if walked.number else None


REWRITES = (
    Rewrite("respelled", respelled),
    Rewrite("decorated", decorated),
    Rewrite("in-contexts", in_contexts),
    Rewrite("comprehensions-by-map", by_map),
    Rewrite("loops-by-while", by_while),
)
