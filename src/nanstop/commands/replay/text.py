"""What `nanstop replay` prints."""

from __future__ import annotations

from collections.abc import Iterator

from nanstop.commands.replay.result import Replayed
from nanstop.language.translate import translated
from nanstop.report.text.terminal import render
from nanstop.wording import typed


def text(found: Replayed) -> str:
    """Return the failure that was met, and in a last line what that says of the incident."""
    shown = [render(found.report)] if found.report is not None else []
    return "\n".join([*shown, *map(translated, _lines(found))])


def _lines(found: Replayed) -> Iterator[str]:
    yield from notes(found)
    if found.met == "same":
        at = found.report.incident.at.step if found.report is not None else found.step
        yield f"{found.incident}: the script still fails as it did, at step {at}"
    elif found.met == "other":
        yield f"{found.incident}: the script does not fail as it did, but otherwise: see above"
    else:
        yield f"{found.incident}: step {found.step} passes now, nothing fails"
        yield f"help: whether it holds: `nanstop prove {typed(found.incident)} SCRIPT`"


def notes(found: Replayed) -> Iterator[str]:
    """Yield the differences between the run now and the run that failed, a line each."""
    one = found.differs
    if one is not None:
        yield (
            f"note: the run is another one before that: at step {one.step} the loss is "
            f"{one.now:.4g}, it was {one.before:.4g}"
        )
