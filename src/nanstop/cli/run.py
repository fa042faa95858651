"""`nanstop run`: run a training command, watched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import AsJson


def run(  # noqa: PLR0913, PLR0917 - one for each option
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="SCRIPT, -m MODULE or a program, with its arguments."
        ),
    ],
    on_failure: Annotated[
        str, typer.Option(metavar="repair|skip|stop|observe", help="How far nanstop may go.")
    ] = "repair",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Incident folder [$NANSTOP_DIR or .nanstop].")
    ] = None,
    on_stop: Annotated[
        str,
        typer.Option(
            metavar="raise|end",
            help="A training that is stopped raises TrainingStopped, or ends as by early stopping.",
        ),
    ] = "raise",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Allow a remedy that changes training; repeatable."),
    ] = None,
    record: Annotated[
        bool,
        typer.Option("--record", help="Note every operation before it runs: names one that kills."),
    ] = False,
    series: Annotated[
        bool, typer.Option("--series", help="Keep the run's numbers, for nanstop compare.")
    ] = False,
    hang: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=1.0,
            help="End a run without a step for N median step times (60 s at least), with stacks.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run any training command, unchanged, watched. Its output and exit code stay its own.

    Only a training that nanstop stops makes it 3, unless the command catches TrainingStopped.
    """
    from nanstop.decide.policy import Policy

    policy = Policy(on_failure=on_failure, on_stop=on_stop, allow=tuple(allow or ()))  # type: ignore[arg-type]
    from nanstop.commands.run.launch import launch
    from nanstop.commands.run.supervise import Patience

    return launch(
        command,
        policy=policy,
        out=out,
        as_json=as_json,
        record=record,
        series=series,
        patience=Patience(steps=hang) if hang is not None else None,
    )
