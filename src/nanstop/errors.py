"""The errors of nanstop: a code, what is wrong, and what to do about it."""

from __future__ import annotations


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


class TrainingStopped(NanstopError):  # noqa: N818 - no error of anybody's
    """Raised out of ``train()``, or of a loop's update, where a training is not worth going on with.

    Its updates were lost again and again, or the policy stops at a failure: the weights are those that it had before.
    ``incident``: the id of what stopped it.
    """

    def __init__(self, message: str, *, incident: str = "") -> None:
        hint = f"incident {incident}: `nanstop report`" if incident else ""
        super().__init__(message, code="NS000", hint=hint)
        self.incident = incident
