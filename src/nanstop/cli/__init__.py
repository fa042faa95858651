"""The ``nanstop`` command. Whatever is heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from nanstop.cli.bisect import bisect
from nanstop.cli.check import check
from nanstop.cli.command_line import (
    AgainCommand,
    CheckCommand,
    Commands,
    OwnCommand,
    RunCommand,
    UsageProblem,
    asked,
    usage_error,
)
from nanstop.cli.compare import compare
from nanstop.cli.demo import demo
from nanstop.cli.doctor import doctor
from nanstop.cli.export import export
from nanstop.cli.fix import fix, prove, replay
from nanstop.cli.lr_range import lr_range
from nanstop.cli.plan import plan
from nanstop.cli.reference import env, explain, rules
from nanstop.cli.report import report, view
from nanstop.cli.run import run
from nanstop.cli.scan import scan
from nanstop.cli.terminal import (
    FINDINGS,
    INTERNAL,
    INTERRUPTED,
    OK,
    UNRESOLVED,
    USAGE,
    crashed,
    fail,
)
from nanstop.errors import NanstopError
from nanstop.language.choice import VARIABLE

__all__ = ["FINDINGS", "INTERNAL", "INTERRUPTED", "OK", "UNRESOLVED", "USAGE", "app", "main"]

app = typer.Typer(
    name="nanstop",
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tuning that does not stop for NaN.",
    epilog="Exit codes: 0 ok, 1 findings, 2 usage, "
    "3 incident unresolved (run: training was stopped), 70 a bug of nanstop.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from nanstop import __version__

        typer.echo(f"nanstop {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def nanstop(
    ctx: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Fine-tuning that does not stop for NaN."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


app.command(cls=OwnCommand)(demo)
app.command(cls=RunCommand)(run)
app.command(cls=CheckCommand)(check)
app.command(cls=OwnCommand)(report)
app.command(cls=OwnCommand)(view)
app.command(cls=AgainCommand)(replay)
app.command(cls=OwnCommand)(fix)
app.command(cls=AgainCommand)(prove)
app.command(cls=OwnCommand)(export)
app.command(cls=OwnCommand)(scan)
app.command(cls=OwnCommand)(bisect)
app.command("lr-range", cls=RunCommand)(lr_range)
app.command(cls=RunCommand)(doctor)
app.command(cls=OwnCommand)(plan)
app.command(cls=OwnCommand)(compare)
app.command(cls=OwnCommand)(explain)
app.command(cls=OwnCommand)(rules)
app.command(cls=OwnCommand)(env)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. No exception leaves."""
    spoken = os.environ.get(VARIABLE)
    try:
        return app(args=arguments, prog_name="nanstop", standalone_mode=False) or OK
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, UsageProblem):  # options may not have been read as far as that
            os.environ.update(asked(sys.argv[1:] if arguments is None else arguments))
        return ended(error)
    finally:
        os.environ.pop(VARIABLE, None)
        os.environ.update({VARIABLE: spoken} if spoken is not None else {})


def ended(error: Exception | KeyboardInterrupt) -> int:
    """Say what ended a command, and return the exit code for it."""
    if isinstance(error, NanstopError):
        return fail(error)
    if isinstance(error, UsageProblem):
        return fail(usage_error(error))
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    return crashed(error)
