"""A warning that torch gives inside a recorded op is shown at the script's own line, as it would
be unwatched.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.nn.modules import module as hooks

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
    if filename == hooks.__file__ and _was_shown_unhooked(message, category, lineno):
        return
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


def _was_shown_unhooked(message: Warning, category: type[Warning], lineno: int) -> bool:
    """Return whether what a module warns of has been shown, and comes from another line of torch
    because of hooks of nanstop alone: called with hooks, a module's forward stands elsewhere.
    """
    frame = _innermost(sys._getframe(2), hooks.__file__.__eq__)
    module = frame.f_locals.get("self") if frame is not None else None
    if frame is None or not isinstance(module, hooks.Module):
        return False
    shown = frame.f_globals.get("__warningregistry__", {})
    known = (key for key in shown if isinstance(key, tuple) and key[:2] == (str(message), category))
    own = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for name in own) or all(key[2] == lineno for key in known):
        return False
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    every = [hook for name in names for hook in getattr(hooks, name, {}).values()]
    return bool(every) and all(is_own(_file_of(hook)) for hook in every)


def _file_of(hook: Any) -> str:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return code.co_filename if code is not None else ""


def _innermost(frame: FrameType | None, wanted: Callable[[str], bool]) -> FrameType | None:
    """Return the innermost frame from this one on whose file is wanted."""
    while frame is not None and not wanted(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
