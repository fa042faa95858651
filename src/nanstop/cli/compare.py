"""`nanstop compare`: lay two recorded runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, printable, show


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="Incident folder, or one with trainer_state.json.")
    ],
    second: Annotated[Path, typer.Argument(metavar="B", help="The run to compare it with.")],
    tolerance: Annotated[float, typer.Option(help="Relative difference that still agrees.")] = 0.01,
    as_json: AsJson = False,
) -> int:
    """Say where two recorded runs part: the first step, and the layer where it is known."""
    from nanstop.commands.compare import compare as runs

    found = runs.compare(runs.load_run(first), runs.load_run(second), tolerance=tolerance)
    show(found, printable(runs.render(found)), as_json)
    return OK if found.agrees else FINDINGS
