"""`nanstop doctor`: find out which guards of a training act."""

from __future__ import annotations

from typing import Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, Lang, printable, show, waiting


def doctor(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="SCRIPT or -m MODULE, with arguments.")
    ],
    _lang: Lang = None,
    as_json: AsJson = False,
) -> int:
    """Plant failures in a copy of a script's training, and say which of its guards act.

    Nothing is saved.
    """
    from nanstop.commands.doctor.doctor import doctor as audit
    from nanstop.commands.doctor.text import render

    with waiting("short training") as follow:
        found = audit(command, follow)
    show(found, printable(render(found)), as_json)
    return FINDINGS if found.num_reaching else OK
