"""`nanstop fix`: the cure of an incident as a change of code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import OK, UNRESOLVED, AsJson, printable, show
from nanstop.errors import NanstopError


def fix(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="An incident, or a run: then its newest."),
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show the change; nothing is written.")] = (
        False
    ),
    apply: Annotated[
        bool, typer.Option("--apply", help="Write it, to files below this folder only.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show the cure of an incident as a change of your code, or apply it.

    Files of libraries are never written: for them it says what your script can say instead.
    """
    from dataclasses import asdict

    from nanstop.commands.fix import fix as fixing
    from nanstop.commands.fix.text import render

    if diff and apply:
        raise NanstopError("--diff shows and --apply writes", hint="give one of them")
    found = fixing.fix(folder, apply=apply)
    show(asdict(found), render(printable(found)), as_json)
    return UNRESOLVED if found.status in ("no cure", "not known") else OK
