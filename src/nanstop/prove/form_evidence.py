"""What speaks for another form of a line, beside the numbers of an exact run: that it leaves alone
what has a value; and what is tried next where the failure moves on to another line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace

from nanstop.prove.exact import ExactRuns
from nanstop.prove.failing_step import FailingStep
from nanstop.records import Atom, Localization
from nanstop.remedies.forms.mode import compared
from nanstop.replay.conditions import Under

_MOST_LINES = 3


def next_form(held: tuple[Atom, ...], place: Localization | None) -> tuple[Atom, ...] | None:
    """Return the forms with that of the line where the step fails under them; None where there is
    no other line, or they are many.
    """
    event = place.first_bad if place is not None else None
    if event is None or event.source is None or len(held) >= _MOST_LINES:
        return None
    target = f"{event.source.file}:{event.source.line}"
    if any(atom.target == target for atom in held):
        return None
    return (*held, replace(held[0], target=target))


def values_unchanged(failing: FailingStep, atoms: tuple[Atom, ...]) -> bool | None:
    """Return whether guards leave alone what has a value and a derivative in the failing
    micro-batch, call by call; None of other remedies, and where nothing has one.
    """
    if not atoms or any(atom.remedy != "form" for atom in atoms):
        return None
    with ExitStack() as scope:
        found = [scope.enter_context(compared(atom)) for atom in atoms]
        failing.attempt(under=nullcontext)
    said = [one.unchanged for one in found if one.unchanged is not None]
    return all(said) if said else None


def window_unchanged(failing: FailingStep, under: Under) -> bool | None:
    """Return whether the last micro-batch before, with the weights of today, keeps loss and
    gradients; None where there is none.
    """
    earlier = next(windows_before(failing), None)
    return None if earlier is None else ExactRuns(earlier).is_unchanged(earlier.micro, under)


def windows_before(failing: FailingStep) -> Iterator[FailingStep]:
    """Yield the last micro-batch of each window before as if it were the one that failed, the
    latest first.
    """
    for step in reversed(failing.before):
        micro = len(step.batches) - 1
        yield replace(failing, step=step, micro=micro, micros=(micro,), before=())
