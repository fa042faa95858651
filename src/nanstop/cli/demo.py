"""`nanstop demo`: show a seed scenario."""

from __future__ import annotations

from collections.abc import Mapping
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
