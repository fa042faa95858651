"""What every command shares: exit codes, what is printed, what is said when something fails."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any

import typer

from nanstop import wording
from nanstop.errors import NanstopError, unknown
from nanstop.language.choice import LANGUAGES, VARIABLE
from nanstop.language.translate import translated
from nanstop.process.inject.progress import Follow, Progress
from nanstop.wording import counted

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
    _say(translated(line))


def _say(line: str) -> None:
    from nanstop.report.text.terminal import render_table

    typer.echo(render_table(printable(line), stream=sys.stderr), err=True)


@contextmanager
def waiting(part: str) -> Iterator[Follow | None]:
    """Give what says at the foot of a terminal how far a job in a child process is and how long it
    may take; None where the standard error stream is no terminal.

    ``part``: what the job is made of. The line is gone when the wait is over.
    """
    if not sys.stderr.isatty():
        yield None
        return
    line = _Line(part)
    try:
        yield line
    finally:
        line.clear()


class _Line:
    def __init__(self, part: str) -> None:
        self._part = part
        self._first: tuple[int, float] | None = None

    def __call__(self, progress: Progress, seconds: float) -> None:
        now, done = time.monotonic(), progress.done
        if progress == Progress():
            self.write(f"the script sets up its training, {seconds:.0f} s so far")
            return
        first, began = self._first = self._first or (done, now)
        left, total = progress.seconds_left, progress.total
        if not total:
            self.write(f"{counted(done, self._part)} so far, at most {left or 0.0:.0f} s left")
        elif done > first:
            rest = (now - began) / (done - first) * (total - done)
            said = f"working on {self._part} {done + 1} of {total}, about {rest:.0f} s left"
            self.write(said)
        else:
            self.write(f"working on {self._part} {done + 1} of {total}")

    def clear(self) -> None:
        self.write("")

    @staticmethod
    def write(text: str) -> None:
        """Show a text in the place of the one before."""
        shown = f"nanstop: {translated(text)}" if text else ""
        cut = shown[: shutil.get_terminal_size().columns - 1]
        with suppress(OSError):  # a terminal that is gone
            sys.stderr.write(f"\r\x1b[K{cut}")
            sys.stderr.flush()


def show(value: Any, text: str, as_json: bool, *, is_code: bool = False) -> None:
    """Print ``text``, or ``value`` as JSON; non-finite numbers are strings, as everywhere.

    ``is_code``: whether there is code in the text, of which no line is broken.
    """
    if not (as_json or is_code):
        from nanstop.report.text.terminal import render_table

        text = render_table(text)
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
    _say(f"error[{error.code}]: {translated(error.message)}")
    if error.hint:
        _say(translated(f"help: {error.hint}"))
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
