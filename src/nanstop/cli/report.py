"""`nanstop report`: show an incident again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import OK, UNRESOLVED, AsJson, printable


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="An incident folder, or all of a run.")
    ],
    as_json: AsJson = False,
) -> int:
    """Show an incident again, diagnosed by the rules of this version.

    With --json: its report, or a list of a run's.
    """
    from nanstop.diagnose.diagnose import diagnose_anew
    from nanstop.records.codec import to_json
    from nanstop.report.text.terminal import render
    from nanstop.store.incidents import REPORT, incident_folders, load_report

    found = incident_folders(folder)
    reports = [diagnose_anew(load_report(one)) for one in found]
    if as_json:
        texts = [to_json(one) for one in reports]
        typer.echo(texts[0] if found == (folder,) else f"[{','.join(texts)}]")
    else:
        records = [str(one / REPORT if one.is_dir() else one) for one in found]
        shown = (
            render(printable(one), record=record)
            for one, record in zip(reports, records, strict=True)
        )
        typer.echo("\n\n".join(shown))
    known = ("proven", "isolated")
    resolved = all(one.proof is not None and one.proof.verdict in known for one in reports)
    return OK if resolved else UNRESOLVED
