"""Signals that end processes, by name."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

FATAL = ("SIGFPE", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL")
ASKED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals by which a person or a scheduler ends a process."""


def signal_name(code: int) -> str:
    """Return the signal of an exit code, as ``Popen`` (-8) or a shell (136) says it.

    "" for none that ends a process.
    """
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return "" if code >= 0 else f"signal {number}"
    return name if code < 0 or name in (*FATAL, *ASKED, "SIGKILL") else ""


def stay_interrupted() -> None:
    """Have the interpreter end by SIGINT where a KeyboardInterrupt that nobody caught ends it; the
    last to be called at exit.

    It forgets that one was when another string is executed after it, as the making of every
    dataclass is, and exits with 1 (CPython's ``run_eval_code_obj`` in Python/pythonrun.c).
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1"):
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # what it forgets by reminds it
