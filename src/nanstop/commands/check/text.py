"""What `nanstop check` prints."""

from __future__ import annotations

from nanstop.commands.check.result import Preflight
from nanstop.language.translate import translated
from nanstop.report.text.terminal import render_finding
from nanstop.wording import counted


def render(found: Preflight) -> str:
    """Return the text of a check: a block for each finding, then notes and what was looked at."""
    blocks = [render_finding(one) for one in found.findings]
    notes = [f"note: {failure}" for failure in found.failures]
    return "\n\n".join([*blocks, translated("\n".join([*notes, _closing(found)]))])


def _closing(found: Preflight) -> str:
    probed = found.probe is not None
    looked = "facts and a probe of the first window" if probed else "facts alone, nothing was run"
    number = counted(len(found.findings), "finding") if found.findings else "nothing found"
    return f"nanstop: {found.facts.host or 'model'}: {number} ({looked}, {found.seconds:.1f} s)"
