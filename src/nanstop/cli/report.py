"""`nanstop report` and `nanstop view`: show what a run has met, and follow one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanstop.cli.terminal import OK, UNRESOLVED, AsJson, Lang, printable, progress
from nanstop.errors import NanstopError
from nanstop.records import Report

if TYPE_CHECKING:
    from nanstop.store.summary import Summary


def report(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="An incident, or all of them [$NANSTOP_DIR or .nanstop]."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every incident whole.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page to look at.")
    ] = None,
    show_text: Annotated[
        bool,
        typer.Option(
            "--show-text", help="In the page, messages of exceptions too: they may quote your data."
        ),
    ] = False,
    as_issue: Annotated[
        bool,
        typer.Option("--issue", help="Markdown to post: without secrets, folders and strings."),
    ] = False,
    _lang: Lang = None,
    as_json: AsJson = False,
) -> int:
    """Show an incident again, diagnosed by the rules of this version, or the runs of a folder.

    With --json: its report, or a list of all. With --html: as one file that needs no network and
    no script. With --issue: of a run, its newest.
    """
    from nanstop.diagnose.diagnose import diagnose_anew
    from nanstop.records.codec import to_json
    from nanstop.report.text.issue import issue
    from nanstop.report.text.runs import render_runs
    from nanstop.session.factory import incident_folder
    from nanstop.store.incidents import REPORT, incident_folders, load_report

    folder = incident_folder(folder)
    summary = _summary(folder)
    try:
        found = incident_folders(folder)
    except NanstopError:
        if summary is None or as_issue:  # of a run without an incident
            raise
        found = ()
    is_one = found == (folder,)
    reports = [diagnose_anew(load_report(one)) for one in found]
    records = [str(one / REPORT if one.is_dir() else one) for one in found]
    if html is not None:
        _write_page(html, folder, zip(reports, records, strict=True), show_text=show_text)
    if as_issue:
        shown = issue(reports[-1]).removesuffix("\n")
    elif as_json:
        texts = [to_json(one) for one in reports]
        shown = texts[0] if is_one else f"[{','.join(texts)}]"
    elif not is_one and not full:
        shown = _wrapped(render_runs(str(folder), reports, summary))
    else:
        shown = _whole(reports, records)
    typer.echo(shown)
    return OK if all(_is_resolved(one) for one in reports) else UNRESOLVED


def _wrapped(text: str) -> str:
    from nanstop.report.text.terminal import render_note

    return "\n".join(map(render_note, printable(text).splitlines()))


def _is_resolved(report: Report) -> bool:
    return report.proof is not None and report.proof.verdict in ("proven", "isolated")


def _whole(reports: Iterable[Report], records: Iterable[str]) -> str:
    from nanstop.report.text.terminal import render

    pairs = zip(reports, records, strict=True)
    return "\n\n".join(render(printable(report), record=record) for report, record in pairs)


def _write_page(
    file: Path, folder: Path, incidents: Iterable[tuple[Report, str]], *, show_text: bool
) -> None:
    from nanstop.report.html.charts import MISSING, are_available
    from nanstop.report.html.page import html_page
    from nanstop.report.html.run_record import run_record
    from nanstop.store.files import write_whole
    from nanstop.store.incidents import incident_folders

    known = tuple(incidents)
    reports, records = tuple(one for one, _ in known), tuple(path for _, path in known)
    run = folder.resolve()
    is_one = bool(reports) and incident_folders(folder) == (folder,)
    if is_one and run.name == reports[0].incident.id:
        run = run.parent
    shown = run_record(run, reports, records)
    summary = _summary(folder)
    if not is_one and summary is not None and summary.findings and not summary.incidents:
        shown = replace(
            run_record(run, (), ()), earlier=reports
        )  # the last run found, and met none
    page = html_page(shown, show_text=show_text)
    try:
        write_whole(file, page.encode(errors="replace"))
    except OSError as error:
        raise NanstopError(f"cannot write {file}: {error.strerror or error}") from error
    progress(f"written: {file}" if are_available() else f"written: {file}; {MISSING}")


def _summary(folder: Path) -> Summary | None:
    """Return what is written of the latest run, None where there is nothing that can be read."""
    from nanstop.store.incidents import SUMMARY, load_summary

    try:
        return load_summary(folder / SUMMARY)
    except NanstopError:
        return None


def view(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR", help="Incident folders, or what holds some [$NANSTOP_DIR or .nanstop]."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", help="The port [as before, else a free one].")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Follow runs in a browser: their numbers, incidents and investigations as they come.

    The page is served to this machine alone, until Ctrl-C. With --json its address is an object.
    """
    from nanstop.commands.view.view import view as serve
    from nanstop.session.factory import incident_folder

    def ready(address: str) -> None:
        typer.echo(json.dumps({"address": address}) if as_json else address)
        progress("Ctrl-C ends it")

    serve(folders or [incident_folder()], port=port, ready=ready)
    return OK
