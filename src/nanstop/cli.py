"""The ``nanstop`` command. Whatever is heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanstop.command_line import Commands, RunCommand, UsageProblem, usage_error
from nanstop.errors import NanstopError

if TYPE_CHECKING:
    from nanstop.demo.scenario import Scenario

OK, FINDINGS, USAGE, UNRESOLVED, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 70, 130

app = typer.Typer(
    name="nanstop",
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tuning that does not stop for NaN.",
    epilog="Exit codes: 0 ok, 1 findings, 2 usage, 3 incident unresolved, 70 a bug of nanstop.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]


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


@app.command()
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
        _show(*_scenario_list(scenarios.SCENARIOS), as_json)
        return OK
    result = scenarios.run_scenario(
        name or next(iter(scenarios.SCENARIOS)),
        variant=variant,
        echo=None if as_json else typer.echo,
    )
    _show(result, scenarios.render(result), as_json)
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


@app.command(cls=RunCommand)
def run(
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
    """Run any training command, unchanged, watched. Its output and exit code stay its own."""
    from nanstop.run.policy import Policy

    policy = Policy(on_failure=on_failure, allow=tuple(allow or ()))  # type: ignore[arg-type]
    from nanstop.run.launch import launch
    from nanstop.run.supervise import Patience

    return launch(
        command,
        policy=policy,
        out=out,
        as_json=as_json,
        record=record,
        series=series,
        patience=Patience(steps=hang) if hang is not None else None,
    )


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="An incident folder, or all of a run.")
    ],
    as_json: AsJson = False,
) -> int:
    """Show an incident again, diagnosed by the rules of this version. With --json: its report, or a list of a run's."""
    from nanstop.report.codec import to_json
    from nanstop.report.text import render
    from nanstop.rules.diagnose import diagnose_anew
    from nanstop.run.store import REPORT, incident_folders, load_report

    found = incident_folders(folder)
    reports = [diagnose_anew(load_report(one)) for one in found]
    if as_json:
        texts = [to_json(one) for one in reports]
        typer.echo(texts[0] if found == (folder,) else f"[{','.join(texts)}]")
    else:
        records = [str(one / REPORT if one.is_dir() else one) for one in found]
        shown = (
            render(_printable(one), record=record)
            for one, record in zip(reports, records, strict=True)
        )
        typer.echo("\n\n".join(shown))
    proven = all(one.proof is not None and one.proof.verdict == "proven" for one in reports)
    return OK if proven else UNRESOLVED


@app.command("bisect")
def bisect_configs(
    bad: Annotated[
        str, typer.Argument(metavar="BAD", help="A config that fails, or a quoted command line.")
    ],
    good: Annotated[
        str, typer.Argument(metavar="GOOD", help="One that does not, of the same script.")
    ],
    script: Annotated[
        str | None, typer.Option(metavar="SCRIPT", help="The script that reads the configs.")
    ] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", help="Trials side by side.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds a trial may take.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="MB", help="Memory of a trial.")] = None,
    limit: Annotated[int | None, typer.Option(help="Trials in all.")] = None,
    as_json: AsJson = False,
) -> int:
    """Find the smallest difference between a training that fails and one that does not, by running both."""
    from nanstop.run.bisect_result import render
    from nanstop.run.bisect_run import Limits, run_bisect
    from nanstop.run.settings import read_pair

    memory_bytes = None if memory is None else int(memory * 2**20)
    limits = Limits(timeout=timeout, memory_bytes=memory_bytes, jobs=jobs, trials=limit)
    result = run_bisect(read_pair(bad, good, script), limits=limits, announce=_progress)
    _show(result, _printable(render(result)), as_json)
    return OK if result.status == "found" else FINDINGS


@app.command("lr-range", cls=RunCommand)
def lr_range(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="SCRIPT or -m MODULE, with arguments.")
    ],
    low: Annotated[float, typer.Option(help="First learning rate.")] = 1e-7,
    high: Annotated[float, typer.Option(help="Last learning rate.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the sweep.")] = 100,
    as_json: AsJson = False,
) -> int:
    """Try rising learning rates on a script's own training, and suggest a range. Nothing is saved."""
    from nanstop.run import lr_range as sweeps

    found = sweeps.lr_range(command, low=low, high=high, steps=steps)
    _show(found, sweeps.render(found, str(sweeps.result_file())), as_json)
    return OK if found.status == "found" else FINDINGS


@app.command()
def compare(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="Incident folder, or one with trainer_state.json.")
    ],
    second: Annotated[Path, typer.Argument(metavar="B", help="The run to compare it with.")],
    tolerance: Annotated[float, typer.Option(help="Relative difference that still agrees.")] = 0.01,
    as_json: AsJson = False,
) -> int:
    """Lay two recorded runs side by side: the first step at which they part, and the layer where it is known."""
    from nanstop.run import compare as runs

    found = runs.compare(runs.load_run(first), runs.load_run(second), tolerance=tolerance)
    _show(found, _printable(runs.render(found)), as_json)
    return OK if found.agrees else FINDINGS


@app.command()
def explain(
    code: Annotated[str, typer.Argument(metavar="CODE", help="NS201, or fp16-overflow.")],
    run_it: Annotated[
        bool, typer.Option("--run", help="Run the planted fault and its healthy twin too.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Print the page of a finding: what happened, why, and how to fix it."""
    from nanstop import pages

    rule, page = pages.find_rule(code), pages.explain(code)
    row = {"code": rule.code, "name": rule.slug, "title": rule.title, "page": page}
    if as_json or not sys.stdout.isatty():
        row |= _exhibits(rule.code)[0] if run_it and as_json else {}
        _show(row, page.rstrip(), as_json)
    else:
        from rich.console import Console
        from rich.markdown import Markdown

        Console(width=min(100, Console().width)).print(Markdown(page))
    if run_it and not as_json:
        typer.echo(_exhibits(rule.code)[1])
    return OK


def _exhibits(code: str) -> tuple[dict[str, Any], str]:
    """Return what the planted fault and its healthy twin show when they are run: as values, and as text."""
    from nanstop.exhibit import exhibits

    parts = dict(zip(("fault", "healthy"), exhibits(code), strict=True))
    values = {
        name: {"codes": one.codes, "losses": one.losses, "ended": one.ended}
        for name, one in parts.items()
    }
    titles = {"fault": "The planted fault, run and watched", "healthy": "Its healthy twin"}
    return values, "\n".join(f"\n## {titles[name]}\n{one.text}" for name, one in parts.items())


@app.command()
def rules(as_json: AsJson = False) -> int:
    """List every finding."""
    from nanstop.rules.catalogue import CATALOGUE

    rows = [
        {"code": rule.code, "name": rule.slug, "title": rule.title, "when": list(rule.when)}
        for rule in CATALOGUE
    ]
    width = max(len(rule.slug) for rule in CATALOGUE)
    lines = [f"{rule.code}  {rule.slug:{width}}  {rule.title}" for rule in CATALOGUE]
    _show(rows, "\n".join(lines), as_json)
    return OK


@app.command()
def env(as_json: AsJson = False) -> int:
    """Print versions, devices and settings that decide how numbers come out."""
    from dataclasses import asdict

    from nanstop.run.environment import environment

    facts = asdict(environment(import_torch=True))
    for name in ("packages", "flags", "env_vars"):
        facts[name] = dict(facts[name])
    _show(facts, "\n".join(_lines(facts)), as_json)
    return OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. No exception leaves."""
    try:
        return app(args=arguments, prog_name="nanstop", standalone_mode=False) or OK
    except NanstopError as error:
        return _fail(error)
    except UsageProblem as error:
        return _fail(usage_error(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        return _crashed(error)


def _progress(line: str) -> None:
    typer.echo(_printable(line), err=True)


def _show(value: Any, text: str, as_json: bool) -> None:
    """Print ``text``, or ``value`` as JSON with non-finite numbers as strings, as everywhere in nanstop."""
    from pydantic_core import to_json

    typer.echo(to_json(value, inf_nan_mode="strings").decode() if as_json else text)


def _lines(facts: dict[str, Any]) -> list[str]:
    flat = {}
    for name, value in facts.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return [f"{name:28} {value}" for name, value in flat.items() if value is not None]


def _printable(value: Any) -> Any:
    """Return a record or text without control characters: what strangers wrote must not steer the terminal."""
    if isinstance(value, str):
        return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in value)
    if isinstance(value, tuple):
        return tuple(_printable(each) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: _printable(getattr(value, each.name)) for each in fields(value)}
        )
    return value


def _fail(error: NanstopError) -> int:
    typer.echo(_printable(str(error)), err=True)
    return USAGE


def _crashed(error: Exception) -> int:
    """Say in one line that nanstop itself failed, and write the details where they can be sent from."""
    details = "".join(traceback.format_exception(error))
    try:
        handle, place = tempfile.mkstemp(prefix="nanstop-bug-", suffix=".txt")
        with os.fdopen(handle, "w") as stream:
            stream.write(f"{shlex.join(sys.argv)}\n{details}")
    except OSError:
        place = "nowhere: no temporary file could be written"
    summary = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    typer.echo(_printable(f"bug in nanstop: {summary} (details: {place})"), err=True)
    return INTERNAL
