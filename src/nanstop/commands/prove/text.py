"""What `nanstop prove` prints."""

from __future__ import annotations

from collections.abc import Iterator

from nanstop.commands.prove.result import Proved
from nanstop.commands.replay.text import notes
from nanstop.language.translate import translated
from nanstop.records.remedies import describe
from nanstop.report.text.terminal import render
from nanstop.wording import counted


def text(found: Proved) -> str:
    """Return the outcome as text: the failure that was met, if any, then whether the incident is
    gone.
    """
    report = found.replayed.report
    shown = [render(report)] if report is not None else []
    return "\n".join(
        [*shown, *map(translated, notes(found.replayed)), *map(translated, _lines(found))]
    )


def _lines(found: Proved) -> Iterator[str]:
    met, under = found.replayed, ""
    if found.cure:
        under = f" (cure: {describe(found.cure)})"
    place = f"{met.incident}{under}"
    if found.verdict == "gone":
        yield (
            f"{place}: gone: step {met.step} passes, and so did {counted(found.healthy, 'update')} "
            f"from there on"
        )
    elif found.verdict == "not comparable":
        yield f"{place}: not proven: nothing fails, but it is not the run that failed"
        yield "help: the failing data may not have come: keep seed, data and arguments as they were"
    elif found.verdict == "still there":
        step = met.report.incident.at.step if met.report is not None else met.step
        yield f"{place}: not gone: the script fails as it did, at step {step}"
    else:
        yield f"{place}: not gone: the script fails otherwise now, see above"
