"""From an incident to a script without it: `nanstop replay`, `nanstop fix` and `nanstop prove`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import OK, UNRESOLVED, AsJson, Lang, printable, show
from nanstop.errors import NanstopError

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="An incident, or a run: then its newest.")
]
Command = Annotated[
    list[str],
    typer.Argument(metavar="COMMAND", help="SCRIPT or -m MODULE, with the arguments that it had."),
]


def replay(folder: Folder, command: Command, _lang: Lang = None, as_json: AsJson = False) -> int:
    """Run a script again up to the step of an incident, and say whether it still fails there.

    Its training ends there. Nothing is saved.
    """
    from nanstop.commands.replay import replay as replaying
    from nanstop.commands.replay.text import text

    found = replaying.replay(folder, command)
    show(found, text(printable(found)), as_json)
    return OK if found.met == "nothing" else UNRESOLVED


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
    _lang: Lang = None,
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
    show(asdict(found), render(printable(found)), as_json, is_code=True)
    return UNRESOLVED if found.status in ("no cure", "not known") else OK


def prove(
    folder: Folder,
    command: Command,
    cured: Annotated[
        bool, typer.Option("--cure", help="With the cure that the incident's report names.")
    ] = False,
    steps: Annotated[
        int, typer.Option(min=0, help="Updates after the incident's that have to be healthy.")
    ] = 20,
    _lang: Lang = None,
    as_json: AsJson = False,
) -> int:
    """Run a changed script to the step of an incident and beyond; say whether its failure is gone.

    The run before that step has to be the one that failed, by its losses. Nothing is saved.
    """
    from nanstop.commands.prove import prove as proving
    from nanstop.commands.prove.text import text

    found = proving.prove(folder, command, steps=steps, cured=cured)
    show(found, text(printable(found)), as_json)
    return OK if found.verdict == "gone" else UNRESOLVED
