"""A finding that is no failure as plain sentences."""

from __future__ import annotations

from typing import Literal

from nanstop.records import Diagnosis
from nanstop.report.text.blocks.block import Block, certainty, pointer
from nanstop.report.text.blocks.help import untried
from nanstop.report.text.blocks.place import place_blocks

REASSURING = ("NS802",)
"""Findings that say that all is well."""


def severity(code: str) -> Literal["note", "warning"]:
    """Return how a finding that is no failure is shown: what is no fault is no warning."""
    return "note" if code in REASSURING else "warning"


def finding_label(diagnosis: Diagnosis) -> str:
    """Return ``warning[NS102]`` or ``note[NS802]``."""
    return f"{severity(diagnosis.code)}[{diagnosis.code}]"


def finding_blocks(diagnosis: Diagnosis) -> tuple[Block, ...]:
    """Return the blocks of a finding that is no failure."""
    texts = (diagnosis.cause, *diagnosis.lines, *certainty(diagnosis, "this finding"))
    return (
        Block("warning", f"{finding_label(diagnosis)}: ", (_finding_headline(diagnosis),)),
        *place_blocks(diagnosis.where),
        *(Block("evidence", "  = ", (text,)) for text in texts if text),
        *untried(diagnosis.remedies),
        pointer(diagnosis.code, None),
    )


def mended_too(finding: Diagnosis, by: str) -> str:
    """Return the line of a finding whose help another one, of the code ``by``, has told."""
    place = f" at `{finding.where}`" if finding.where else ""
    told = f"{finding.code}, {finding.title}{place}"
    return f"also {told}: {finding.cause}; the help of {by} mends it too"


def _finding_headline(finding: Diagnosis) -> str:
    seen = finding.seen
    if seen is None:
        return finding.title
    micro = f"micro-batch {seen.micro}" if seen.micro is not None else ""
    parts = (finding.title, seen.phase, f"step {seen.step}", micro)
    return ", ".join(part for part in parts if part)
