"""`nanstop bisect`: find the difference that makes a training fail."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, Lang, printable, progress, show
from nanstop.language.translate import translated


def bisect(  # noqa: PLR0913, PLR0917 - one for each option
    bad: Annotated[
        str, typer.Argument(metavar="BAD", help="A config that fails, or a quoted command line.")
    ],
    good: Annotated[
        str, typer.Argument(metavar="GOOD", help="One that does not, of the same script.")
    ],
    script: Annotated[
        Path | None, typer.Option(metavar="SCRIPT", help="The script that reads the configs.")
    ] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", help="Trials side by side.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds a trial may take.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="MB", help="Memory of a trial.")] = None,
    limit: Annotated[int | None, typer.Option(help="Trials in all.")] = None,
    executor: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Trials fork from a process that has imported torch (fork), start by themselves "
            "(spawn), or are handed to a Ray cluster (ray).",
        ),
    ] = "fork",
    _lang: Lang = None,
    as_json: AsJson = False,
) -> int:
    """Find the smallest difference between a training that fails and one that does not.

    Both are run, and mixtures of the two.
    """
    from nanstop.commands.bisect.bisect import run_bisect
    from nanstop.commands.bisect.configs import read_pair
    from nanstop.commands.bisect.result import render
    from nanstop.commands.bisect.trials import Limits

    memory_bytes = None if memory is None else int(memory * 2**20)
    limits = Limits(timeout=timeout, memory_bytes=memory_bytes, jobs=jobs, trials=limit)
    pair = read_pair(bad, good, None if script is None else str(script))
    result = run_bisect(pair, limits=limits, where=executor, announce=progress)
    show(result, printable(translated(render(result))), as_json)
    return OK if result.status == "found" else FINDINGS
