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
from nanstop.errors import NanstopError, unknown
from nanstop.language.choice import LANGUAGES, VARIABLE
from nanstop.language.translate import translated

OK, FINDINGS, USAGE, UNRESOLVED, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 70, 130


def _speak(lang: str | None) -> str | None:
    """Have this command, and the processes that it starts, speak a language."""
    if lang is not None:
        if lang not in LANGUAGES:
            raise unknown("language", lang, LANGUAGES)
        os.environ[VARIABLE] = lang
    return lang


Lang = Annotated[
    str | None,
    typer.Option(
        "--lang",
        metavar="en|zh",
        callback=_speak,
        is_eager=True,
        expose_value=False,
        help="English or Chinese [$NANSTOP_LANG, or the locale].",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]


def progress(line: str) -> None:
    """Print a line to the standard error stream."""
    typer.echo(printable(translated(line)), err=True)


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
    typer.echo(printable(f"error[{error.code}]: {translated(error.message)}"), err=True)
    if error.hint:
        typer.echo(printable(translated(f"help: {error.hint}")), err=True)
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
    progress(f"bug in nanstop: {summary} (details: {place})")
    return INTERNAL
