"""`nanstop check`: say what will break, before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, printable, show


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
    as_json: AsJson = False,
) -> int:
    """Say what will go wrong with a run, before its first step.

    Nothing is trained, saved or pushed.
    """
    from nanstop.commands.check import check
    from nanstop.commands.check.text import render

    there = check.read_machine(machine) if machine is not None else None
    if check.is_config(command):
        found = check.check_config(Path(command[0]), there)
    elif check.is_checkpoint(command):
        found = check.check_checkpoint(Path(command[0]))
    else:
        found = check.check_script(command, static=static, machine=there)
    show(found, printable(render(found)), as_json)
    return FINDINGS if found.findings else OK
