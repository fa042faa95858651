"""`nanstop export`: a checkpoint that computes finite without nanstop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, printable, show


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint's folder, with its plan or without.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder to write; it must not exist.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Write this format: float16, bfloat16 or float32."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Token ids to run it on, one sequence a line; else texts."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Try a checkpoint in every format without nanstop, and write it in one that is finite.

    The weights are rounded at most, nothing else of the model changes; none of its code is run.
    """
    from dataclasses import asdict

    from nanstop.commands.export import export as exporting
    from nanstop.commands.export.text import render

    found = exporting.export(folder, out, dtype=dtype, data=data)
    show(asdict(found), render(printable(found)), as_json)
    return OK if found.dtype else FINDINGS
