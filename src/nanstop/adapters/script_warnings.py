"""A warning that torch gives inside a recorded op is shown at the script's own line, as it would be unwatched."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from nanstop.adapters import OWN

_RECORDER = str(Path(__file__).with_name("tape.py"))
_RECORDING = "nanstop.adapters.tape"


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

    C code warns at the innermost Python frame: that of the recorder, which hands the op on. The warning is given once
    more at the frame before it, under the filters and the registry of the module there.
    """
    frame = _caller() if filename == _RECORDER else None
    if frame is None:
        shown(message, category, filename, lineno, *rest, **options)
        return
    # What was shown once at the recorder's line has not been shown at every line that it stands for.
    vars(sys.modules[_RECORDING]).get("__warningregistry__", {}).clear()
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _caller() -> FrameType | None:
    """Return the innermost frame that is neither nanstop's nor that of the ``warnings`` module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OWN) and file != warnings.__file__:
            return frame
        frame = frame.f_back
    return None
