"""`nanstop check`: say what will break, before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, Lang, printable, show


def check(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="A script or command with its arguments, a config file of trl, or a checkpoint.",
        ),
    ],
    static: Annotated[
        bool, typer.Option("--static", help="Look at facts only: run no first window.")
    ] = False,
    machine: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What `nanstop env --json` says where the run will really be."
        ),
    ] = None,
    sarif: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the findings as SARIF 2.1.0, for code review."),
    ] = None,
    _lang: Lang = None,
    as_json: AsJson = False,
) -> int:
    """Say what will go wrong with a run, before its first step.

    Nothing is trained, saved or pushed.
    """
    from nanstop.commands.check import check
    from nanstop.commands.check.text import render

    there = check.read_machine(machine) if machine is not None else None
    target = None
    if check.is_config(command):
        target = Path(command[0])
        found = check.check_config(target, there)
    elif check.is_checkpoint(command):
        target = Path(command[0])
        found = check.check_checkpoint(target)
    else:
        found = check.check_script(command, static=static, machine=there)
    show(found, printable(render(found)), as_json)
    if sarif is not None:
        from nanstop import __version__
        from nanstop.commands.check.sarif import checked_file, write_sarif

        write_sarif(sarif, found, target or checked_file(command), version=__version__)
    return FINDINGS if found.findings else OK
