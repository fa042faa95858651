"""Reports for the terminal: colour and wrapping where there is one, plain lines elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TextIO

from nanstop.records import Diagnosis, Report
from nanstop.records.remedies import describe
from nanstop.report.text.blocks.block import Block
from nanstop.report.text.blocks.finding import finding_blocks, finding_label
from nanstop.report.text.blocks.incident import DONE, incident_blocks
from nanstop.report.text.spoken import spoken
from nanstop.report.text.wrapping import in_columns, narrowed, wrapped
from nanstop.wording import counted, number

STYLES: tuple[tuple[str, str], ...] = (
    (r"^error\[\w+\]", "bold red"),
    (r"^warning\[\w+\]", "bold yellow"),
    (r"^(help|in code|解决|代码)[:：]", "bold green"),
    (r"^(note(\[\w+\])?|附注)[:：]", "bold cyan"),
    (r"^  (-->|=)", "bold blue"),
    (r"^  \+ .*$", "green"),
    (r"[+-]Inf x \d+|NaN x \d+", "red"),
    (r"`[^`]+`", "bold"),
)


def render(
    report: Report,
    *,
    width: int | None = None,
    color: bool | None = None,
    record: str | None = None,
    stream: TextIO | None = None,
) -> str:
    """Return the incident as text.
    ``width`` None: that of the terminal, or no wrapping where there is none.

    ``color`` None: only on a terminal. ``record``: path of the full record, for the last line.
    ``stream``: where the text will go, stdout by default; it says whether there is a terminal.
    """
    from nanstop.report.text.in_code import code_blocks  # a healthy run ends with a note

    blocks = incident_blocks(report, record, code_blocks(report, record))
    return _text(blocks, width, color, stream)


def render_finding(diagnosis: Diagnosis, *, stream: TextIO | None = None) -> str:
    """Return a finding that is no failure (``warning[NS102]: ...``) as text; see ``render``."""
    return _text(finding_blocks(diagnosis), stream=stream)


def render_note(text: str, *, stream: TextIO | None = None) -> str:
    """Return a line that a run says beside its reports, wrapped between words. As ``render``."""
    return _text([Block("note", "", (text,))], stream=stream)


def render_table(text: str, *, stream: TextIO | None = None) -> str:
    """Return lines that are spoken already, those that are too long for a terminal broken between
    words, below the last column that leaves room.
    """
    terminal = stream or sys.stdout
    if not terminal.isatty():
        return text
    width = _columns(terminal)
    return "\n".join(one for line in text.splitlines() for one in in_columns(line, width))


def render_summary(
    reports: Sequence[Report],
    findings: Sequence[Diagnosis] = (),
    *,
    steps: int,
    seconds: float,
    stopped: bool = False,
) -> str:
    """Return the end of a run in a few lines: how long, what failed, what was done, found."""
    happened = counted(len(reports), "incident") if reports else "no incident"
    also = f", {counted(len(findings), 'finding')}" if findings else ""
    took = f"{counted(steps, 'step')} in {number(round(seconds, 1))} s"
    end = ", then stopped" if stopped else ""
    blocks = [Block("summary", "nanstop: ", (f"{took}{end}, {happened}{also}",))]
    blocks += [_incident_line(report) for report in reports]
    blocks += [_finding_line(finding) for finding in findings]
    return _text(blocks)


def _incident_line(report: Report) -> Block:
    code, title = "NS000", "cause not established"
    if report.diagnoses:
        code, title = report.diagnoses[0].code, report.diagnoses[0].title
    times = f" x {report.count}" if report.count > 1 else ""
    cells = [f"error[{code}]{times}", title, f"first at step {report.incident.at.step}"]
    proof = report.proof
    if proof is not None and proof.minimal:
        cells.append(f"{describe(proof.minimal)} [{proof.verdict}]")
    if report.audit:
        cells.append(DONE[report.audit[-1].action.kind])
    return Block("summary", "  ", tuple(cells), gap="  ")


def _finding_line(finding: Diagnosis) -> Block:
    return Block("summary", "  ", (finding_label(finding), finding.title, finding.cause), gap="  ")


def _text(
    blocks: Iterable[Block],
    width: int | None = None,
    color: bool | None = None,
    stream: TextIO | None = None,
) -> str:
    terminal = (stream or sys.stdout).isatty()
    if width is None and terminal:
        width = _columns(stream or sys.stdout)
    fitted = narrowed(list(spoken(blocks)), width)
    lines = "\n".join(line for block in fitted for line in wrapped(block, width))
    return _coloured(lines) if (terminal if color is None else color) else lines


def _columns(terminal: TextIO) -> int:
    """Return how wide a terminal is; that of stdout need not be the one that is written to."""
    with suppress(OSError, ValueError):
        width = os.get_terminal_size(terminal.fileno()).columns
        if width:
            return width
    return shutil.get_terminal_size().columns


def _coloured(text: str) -> str:
    import io

    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    for pattern, style in STYLES:
        styled.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=10_000)
    console.print(styled, soft_wrap=True, end="")
    return out.getvalue()
