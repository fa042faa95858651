"""Runs the python blocks of a page, and compares what their comments say with what comes out.

The convention: a comment behind an expression of the top level is its output (its ``repr``, or what
it prints; ``...`` stands for anything); one that begins with the name of an exception is what the
last statement raises. Other comments explain.
"""

import ast
import contextlib
import io
import re
import tokenize

import pytest

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RAISES = re.compile(r"[A-Z]\w*(Error|Exception): ")
NOT_RUN = re.compile(
    r"# Not run by the tests: ([\w ]+ needs (?:several processes|a GPU|a network|a notebook))\.\n"
)


def comments(source):
    """The comment on each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.removeprefix("# ")
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def outcome(statement, names):
    """What a statement shows: its value as Python's prompt would print it, and what it printed
    itself.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), "<page>", "eval"), names)
        else:
            value = exec(compile(ast.Module([statement], []), "<page>", "exec"), names)
    return printed.getvalue() + ("" if value is None else repr(value))


def same(said, came):
    """Whether a comment is what came: without regard to blanks, ``...`` being anything."""
    parts = ["".join(part.split()) for part in said.split("...")]
    return re.fullmatch(".*".join(map(re.escape, parts)), "".join(came.split())) is not None


def run(block):
    """Run a block; return the number of outputs that were compared."""
    said, names, compared = comments(block), {"__name__": "__page__"}, 0
    *others, last = ast.parse(block).body
    for statement in others:
        came, comment = outcome(statement, names), said.get(statement.end_lineno, "")
        if isinstance(statement, ast.Expr) and comment:
            assert same(comment, came), f"line {statement.lineno}: {comment!r}, and it is {came!r}"
            compared += 1
        assert not RAISES.match(comment), "what raises ends an example"
    comment = said.get(last.end_lineno, "")
    if RAISES.match(comment):
        name, _, message = comment.partition(": ")
        with pytest.raises(Exception, match=re.escape(message)) as raised:
            outcome(last, names)
        assert raised.type.__name__ == name, f"{raised.type.__name__!r} == {name!r}"
        return compared + 1
    came = outcome(last, names)
    if isinstance(last, ast.Expr) and comment:
        assert same(comment, came), f"line {last.lineno}: {comment!r}, and it is {came!r}"
        compared += 1
    return compared
