"""What a reader of a traceback need not see:
frames of nanstop between those of a script and its libraries.
"""

from __future__ import annotations

from typing import Any


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
    return raised_in.partition(".")[0] != __name__.partition(".")[0]
