"""A warning that torch gives inside a recorded op is shown at the script's own line, as it would
be unwatched.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from nanstop.own_code import is_own


def show_at_script(
    shown: Callable[..., Any],
    message: Warning,
    category: type[Warning],
    filename: str,
    lineno: int,
    *rest: Any,
    **options: Any,
) -> None:
    """Stand in for ``warnings.showwarning``; ``shown`` is what it was.

    C code warns at the innermost Python frame: that of the recorder, which hands the op on. The
    warning is given once more at the script's frame before it, under the filters and the registry
    of the module there.
    """
    warned = _innermost(sys._getframe(1), filename.__eq__) if is_own(filename) else None
    frame = _innermost(warned, lambda file: not is_own(file))
    if warned is None or frame is None:
        shown(message, category, filename, lineno, *rest, **options)
        return
    # What was shown once at the recorder's line has not been shown at every line that it stands
    # for.
    warned.f_globals.get("__warningregistry__", {}).clear()
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _innermost(frame: FrameType | None, wanted: Callable[[str], bool]) -> FrameType | None:
    """Return the innermost frame from this one on whose file is wanted."""
    while frame is not None and not wanted(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
