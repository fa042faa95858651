"""What every command shares: exit codes, what is printed, what is said when something fails."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import traceback
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any

import typer

from nanstop import wording
from nanstop.errors import NanstopError

OK, FINDINGS, USAGE, UNRESOLVED, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 70, 130

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]


def progress(line: str) -> None:
    """Print a line to the standard error stream."""
    typer.echo(printable(line), err=True)


def show(value: Any, text: str, as_json: bool) -> None:
    """Print ``text``, or ``value`` as JSON; non-finite numbers are strings, as everywhere."""
    if as_json:
        from pydantic_core import to_json

        text = to_json(value, inf_nan_mode="strings").decode()
    typer.echo(text)


def printable(value: Any) -> Any:
    """Return a record or text with every text in it ``wording.printable``."""
    if isinstance(value, str):
        return wording.printable(value)
    if isinstance(value, tuple):
        return tuple(printable(each) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: printable(getattr(value, each.name)) for each in fields(value)}
        )
    return value


def fail(error: NanstopError) -> int:
    """Print an error with what to do about it, and return the exit code 2."""
    typer.echo(printable(str(error)), err=True)
    return USAGE


def crashed(error: Exception) -> int:
    """Say in one line that nanstop itself failed, and write the details to a file to send."""
    details = "".join(traceback.format_exception(error))
    try:
        handle, place = tempfile.mkstemp(prefix="nanstop-bug-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(f"{shlex.join(sys.argv)}\n{details}")
    except OSError:
        place = "nowhere: no temporary file could be written"
    summary = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    typer.echo(printable(f"bug in nanstop: {summary} (details: {place})"), err=True)
    return INTERNAL
