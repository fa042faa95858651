"""The errors of nanstop: a code, what is wrong, what to do about it, and the nearest valid name."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

_MAX_BRIEF = 240


class NanstopError(Exception):
    """Printed as ``error[CODE]: message`` with ``help: hint``, never as a traceback."""

    def __init__(self, message: str, *, code: str = "NS001", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint

    def __str__(self) -> str:
        tail = f"\nhelp: {self.hint}" if self.hint else ""
        return f"error[{self.code}]: {self.message}{tail}"


def brief(error: BaseException) -> str:
    """Return type and message of an exception on one line: torch's may list all kernels it has."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", _MAX_BRIEF, placeholder=" ...")


class TrainingStopped(NanstopError):  # noqa: N818 - no error of anybody's
    """Raised out of ``train()``, or of a loop's update, where a training is not worth going on
    with.

    Its updates were lost again and again, or the policy stops at a failure: the weights are those
    that it had before. ``incident``: the id of what stopped it, ``folder``: where its report is,
    as it is typed in the working folder. ``code``: its finding.
    """

    def __init__(
        self, message: str, *, incident: str = "", code: str = "NS000", folder: str = ""
    ) -> None:
        hint = f"what failed and what to change: `nanstop report {folder}`" if folder else ""
        super().__init__(message, code=code, hint=hint)
        self.incident = incident


class ShortOfMemoryError(NanstopError):
    """A run of a step that ended for want of memory: it says nothing of the step."""

    def __init__(self) -> None:
        super().__init__("memory is short: a run of the micro-batch could not be completed")


def unknown(
    what: str, given: object, choices: Iterable[str], *, meant: str | None = None
) -> NanstopError:
    """Return ``unknown WHAT: `GIVEN``` with a did-you-mean where a choice is near, or ``meant`` is
    one, and the choices where they are few.
    """
    known = list(choices)
    near = [meant] if meant in known else difflib.get_close_matches(str(given), known, n=1)
    hints = [f"did you mean `{near[0]}`?"] if near else []
    if known and len(known) <= 24:
        hints.append(f"known: {', '.join(known)}")
    return NanstopError(f"unknown {what}: `{given}`", hint=" ".join(hints))
