"""A function of the user's, run with the code that a change of its file gives it: where its values
are no tensors of a step, and what it is given can be given again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType

from nanstop.rewrite.files import FileChange


@contextmanager
def recoded(code: CodeType, change: FileChange) -> Iterator[bool]:
    """Have the functions of a code object run inside as the changed file has them; the value is
    whether the collector knows any, and the file is what they were made of.
    """
    new = _counterpart(code, change)
    holders = gc.get_referrers(code) if new is not None else []
    functions = [one for one in holders if isinstance(one, FunctionType) and one.__code__ is code]
    if new is None or new.co_freevars != code.co_freevars:
        functions = []
    try:
        for one in functions:
            one.__code__ = new or code
        yield bool(functions)
    finally:
        for one in functions:
            one.__code__ = code


def _counterpart(code: CodeType, change: FileChange) -> CodeType | None:
    """Return what a code object is in the changed file; None where that is not known."""
    before, after = (_codes(text, change.file) for text in (change.before, change.after))
    if [one.co_name for one in before] != [one.co_name for one in after]:
        return None
    pairs = zip(before, after, strict=True)
    return next((new for old, new in pairs if _are_same(old, code)), None)


def _are_same(first: CodeType, second: CodeType) -> bool:
    """Return whether code objects are of the same text. What has run need not be equal to what has
    not (https://github.com/python/cpython/issues/101346).
    """
    names = ("co_name", "co_firstlineno", "co_code", "co_names", "co_varnames", "co_freevars")
    if any(getattr(first, name) != getattr(second, name) for name in names):
        return False
    return _constants(first) == _constants(second)


def _constants(code: CodeType) -> list[str]:
    return [repr(one) for one in code.co_consts if not isinstance(one, CodeType)]


def _codes(text: str, file: str) -> list[CodeType]:
    """Return all code objects of a file's text, in their order."""
    found = [compile(text, file, "exec", dont_inherit=True)]
    for one in found:
        found += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    return found
