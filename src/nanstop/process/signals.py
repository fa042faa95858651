"""Signals that end processes, by name."""

from __future__ import annotations

import signal

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
