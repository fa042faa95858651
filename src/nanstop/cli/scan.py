"""`nanstop scan`: look into a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, printable, show


def scan(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A .safetensors or .bin file, or their folder."),
    ],
    full: Annotated[
        bool, typer.Option("--full", help="Count small values in every chunk; slower.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Read a checkpoint's weights: non-finite values, ranges, which formats they fit.

    None of its code is run.
    """
    from dataclasses import asdict

    from nanstop.commands.scan import scan as scanning
    from nanstop.commands.scan.text import render_scan

    found = scanning.scan(checkpoint, full=full)
    said = scanning.findings(found)
    value = asdict(found) | {"findings": said}
    show(value, render_scan(printable(found), printable(said)), as_json)
    return FINDINGS if said else OK
