"""Frames of nanstop between those of a script and its libraries: which a reader of a traceback need
not see, and which stand for the script's own line.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

_CALLING = frozenset(("handle", "_unrecorded", "_read"))
"""Methods of function modes that make a call of the script's: what is written in C has no frame."""


def passes_through(excinfo: Any) -> bool:
    """Return whether an exception only passed through nanstop: it was raised by other code.

    As ``__tracebackhide__`` of a module, pytest asks it for each of the module's frames, with its
    ``ExceptionInfo``.
    """
    traceback = excinfo.value.__traceback__
    if traceback is None:
        return True
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = traceback.tb_frame.f_globals.get("__name__", "")
    is_own = raised_in.partition(".")[0] == __name__.partition(".")[0]
    return not is_own or traceback.tb_frame.f_code.co_name in _CALLING


def raised_in(error: BaseException) -> str:
    """Return the file whose code raised an exception, or called what did so without code of
    Python's; "" where there is no traceback.
    """
    traceback, file = error.__traceback__, ""
    while traceback is not None:
        file, traceback = traceback.tb_frame.f_code.co_filename, traceback.tb_next
    return file


def relay(line: tuple[CodeType, int] | None, instruction: int = -1) -> Callable[..., Any]:
    """Return a caller whose frame is the script's line, so that whoever looks at the stack finds
    it; ``instruction``: see ``place_of``.
    """
    if line is None:
        return lambda function, args, kwargs: function(*args, **kwargs)
    code, number = line
    moved = _relay.__code__.replace(
        co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=number
    )
    return FunctionType(moved, globals(), argdefs=((code, instruction),))


def place_of(frame: FrameType) -> tuple[CodeType, int]:
    """Return the code that a frame runs and the instruction that it has come to (-1: not known), of
    a relay those of the call that it makes again.
    """
    if _ORIGIN not in frame.f_code.co_varnames:  # to read its variables would hold them (PEP 667)
        return frame.f_code, frame.f_lasti
    return frame.f_locals[_ORIGIN]


_ORIGIN = "_nanstops_origin"
# On one line: the line of its frame is then the line at which it is said to begin.
_relay = lambda function, args, kwargs, _nanstops_origin=None: function(*args, **kwargs)  # noqa: E731
