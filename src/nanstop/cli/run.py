"""`nanstop run`: run a training command, watched."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import AsJson, Lang, progress

Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Allow a remedy that changes training; repeatable."),
]
Series = Annotated[
    bool, typer.Option("--series", help="Keep the run's numbers, for nanstop compare.")
]
ShowText = Annotated[
    bool, typer.Option("--show-text", help="Show the training text around a failure.")
]
Live = Annotated[
    bool, typer.Option("--live", help="Serve a page that follows the run, as nanstop view does.")
]
Hang = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        min=1.0,
        help="End a run without a step for N median step times (60 s at least), with stacks.",
    ),
]
Audit = Annotated[
    int,
    typer.Option(
        "--audit-devices",
        metavar="N",
        min=0,
        help="Every N steps run one micro-batch on each rank's device and compare (4 runs of it).",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing at the end of a run.")]


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
    allow: Allow = None,
    record: Annotated[
        bool,
        typer.Option("--record", help="Note every operation before it runs: names one that kills."),
    ] = False,
    series: Series = False,
    hang: Hang = None,
    audit_devices: Audit = 0,
    show_text: ShowText = False,
    quiet: Quiet = False,
    live: Live = False,
    _lang: Lang = None,
    as_json: AsJson = False,
) -> int:
    """Run any training command, unchanged, watched. Its output and exit code stay its own.

    Only a training that nanstop stops makes it 3, unless the command catches TrainingStopped.
    """
    from nanstop.decide.policy import Policy

    said = {"quiet": quiet, "show_text": show_text, "allow": tuple(allow or ())}
    said |= {"audit_devices": audit_devices}
    policy = Policy(on_failure=on_failure, on_stop=on_stop, **said)  # type: ignore[arg-type]
    from nanstop.commands.run.launch import launch
    from nanstop.commands.view.beside import beside
    from nanstop.process.crash.standing_still import Patience
    from nanstop.session.factory import incident_folder

    with beside(incident_folder(out), progress) if live else nullcontext():
        return launch(
            command,
            policy=policy,
            out=out,
            as_json=as_json,
            record=record,
            series=series,
            patience=Patience(steps=hang) if hang is not None else None,
        )
