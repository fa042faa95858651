"""`nanstop lr-range`: find a range of learning rates on a training of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, Lang, printable, show, waiting
from nanstop.language.translate import translated


def lr_range(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="SCRIPT or -m MODULE, with arguments.")
    ],
    low: Annotated[float, typer.Option(help="First learning rate.")] = 1e-7,
    high: Annotated[float, typer.Option(help="Last learning rate.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the sweep.")] = 100,
    _lang: Lang = None,
    as_json: AsJson = False,
) -> int:
    """Try rising learning rates on a script's own training, and suggest a range.

    Nothing is saved.
    """
    from nanstop.commands.lr_range import lr_range as sweeps

    with waiting("step") as follow:
        found = sweeps.lr_range(command, low=low, high=high, steps=steps, follow=follow)
    said = sweeps.render(found, str(sweeps.result_file()))
    show(found, printable(translated(said)), as_json)
    return OK if found.status == "found" else FINDINGS
