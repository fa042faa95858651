"""What `nanstop check` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nanstop.commands.check.result import Preflight
from nanstop.language.translate import translated
from nanstop.records import Atom, Diagnosis
from nanstop.report.text.blocks.finding import mended_too
from nanstop.report.text.terminal import render_finding, render_note
from nanstop.wording import counted


def render(found: Preflight) -> str:
    """Return the text of a check: a block for each finding, then notes and what was looked at."""
    blocks = list(_told(found.findings))
    notes = [f"note: {failure}" for failure in found.failures]
    return "\n\n".join([*blocks, translated("\n".join([*notes, _closing(found)]))])


def _told(findings: Iterable[Diagnosis]) -> Iterator[str]:
    """Yield each finding, one whose help was told with another in a line: they have one cause."""
    helped: dict[tuple[tuple[Atom, ...], ...], str] = {}
    for one in findings:
        by = helped.setdefault(one.remedies, one.code) if one.remedies else one.code
        yield render_finding(one) if by == one.code else render_note(mended_too(one, by))


def _closing(found: Preflight) -> str:
    probed = found.probe is not None
    looked = "facts and a probe of the first window" if probed else "facts alone, nothing was run"
    number = counted(len(found.findings), "finding") if found.findings else "nothing found"
    return f"nanstop: {found.facts.host or 'model'}: {number} ({looked}, {found.seconds:.1f} s)"
