"""Commands that train: a seed scenario, or the user's own run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanstop.cli.terminal import OK, UNRESOLVED, AsJson, show

if TYPE_CHECKING:
    from nanstop.demo.scenario import Scenario


def demo(
    name: Annotated[str | None, typer.Argument(help="A scenario of --list.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the scenarios.")] = False,
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which planted cause, where there are several."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run a seed scenario on a tiny real model: it fails, is explained, cured and finishes."""
    from nanstop.demo import scenarios

    if show_list:
        show(*_scenario_list(scenarios.SCENARIOS), as_json)
        return OK
    result = scenarios.run_scenario(
        name or next(iter(scenarios.SCENARIOS)),
        variant=variant,
        echo=None if as_json else typer.echo,
    )
    show(result, scenarios.render(result), as_json)
    return OK if result["verdict"] == "proven" else UNRESOLVED


def _scenario_list(scenarios: Mapping[str, Scenario]) -> tuple[list[dict[str, Any]], str]:
    """Return the scenarios as rows and as text, each with its variants below it."""
    rows, lines = [], []
    for name, one in scenarios.items():
        variants = dict(one.variants)
        rows.append(
            {"name": name, "title": one.title, "symptom": one.symptom, "variants": variants}
        )
        lines.append(f"{name:28} {one.title}")
        lines += [f"  --variant {each:16} {cause}" for each, cause in variants.items()]
    return rows, "\n".join(lines)


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
            help="End the run, with all stacks, after N median step times (60 s at least) without a step.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run any training command, unchanged, watched. Its output and exit code stay its own.

    Only a training that nanstop stops makes it 3, unless the command catches nanstop.TrainingStopped.
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
