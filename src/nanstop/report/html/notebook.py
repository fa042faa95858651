"""Pages in a notebook cell: in a frame of their own, so that neither styles the other.

The frame runs no script and reaches nothing: all that a page needs is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nanstop.records import Diagnosis, PrecisionPlan, Report
from nanstop.report.html.page import html_page
from nanstop.report.html.run_record import RunRecord
from nanstop.report.html.sheet import Sheet, findings_sheet, lines_of, plan_tree, sheet_page

TALL, LOW = "36rem", "20rem"
"""Of a frame with charts, and of one without. Whoever looks may pull it longer."""


def framed(page: str, title: str, height: str = TALL) -> str:
    """Return a page as HTML for ``_repr_html_``."""
    style = f"width:100%;height:{height};border:1px solid #8886;resize:vertical;overflow:auto"
    return (
        f'<iframe sandbox="" title="{escape(title)}" style="{style}" srcdoc="{escape(page)}">'
        "</iframe>"
    )


def report_html(report: Report) -> str:
    """Return one incident as the page of a report."""
    return run_html(RunRecord(reports=(report,)))


def run_html(run: RunRecord) -> str:
    """Return the page of a run with incidents."""
    return framed(html_page(run, framed=True), "nanstop report")


def findings_html(findings: Sequence[Diagnosis], said: str) -> str:
    """Return what was found before a run, or without a failure."""
    page = sheet_page(findings_sheet(findings, said, title="nanstop check"))
    return framed(page, "nanstop check", LOW)


def plan_html(plan: PrecisionPlan, said: str) -> str:
    """Return a precision plan over the modules' tree, and ``said`` of it."""
    sheet = Sheet(title="Precision plan", said=(lines_of(said),), tree=plan_tree(plan))
    return framed(sheet_page(sheet), "nanstop plan", LOW)


def sheet_html(sheet: Sheet) -> str:
    """Return any other page."""
    return framed(sheet_page(sheet), sheet.title, TALL if sheet.panels else LOW)
