"""A report in a notebook cell: the terminal's text, escaped, in one box. No script."""

from __future__ import annotations

from html import escape

from nanstop.records import Report
from nanstop.report.text.blocks import Block, incident_blocks
from nanstop.report.text.in_code import code_blocks
from nanstop.report.text.terminal import wrapped

COLOURS = {"error": "#b3261e", "help": "#1b6e3c", "note": "#5f6368", "where": "#1a56a8"}
BOX = "font-family:monospace;font-size:90%;white-space:pre-wrap;overflow-x:auto;margin:0"


def html(report: Report, record: str | None = None) -> str:
    """Return HTML for ``_repr_html_``. Every text of the report is escaped."""
    blocks = incident_blocks(report, record, code_blocks(report, record))
    lines = "\n".join(_line(block) for block in blocks)
    return _box(lines)


def preformatted(text: str) -> str:
    """Return plain text as HTML, escaped."""
    return _box(escape(text))


def _box(lines: str) -> str:
    return f'<pre style="{BOX}">{lines}</pre>'


def _line(block: Block) -> str:
    text = escape("\n".join(wrapped(block, None)))
    colour = COLOURS.get(block.kind)
    return f'<span style="color:{colour}">{text}</span>' if colour else text
