"""The one error of nanstop: a code, what is wrong, and what to do about it."""

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
