"""The updates that follow under a cure: whether it lasts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from nanstop.prove.failing_step import FailingStep, Following
from nanstop.prove.forms.evidence import with_other_numbers
from nanstop.prove.reference.exact_update import (
    fault_of_update,
    is_same_update,
    moved_otherwise,
)
from nanstop.records import Atom, Trial
from nanstop.records.line_forms import are_forms
from nanstop.remedies.apply import applied
from nanstop.remedies.precision import reference
from nanstop.wording import counted

_FEWEST_UPDATES, _MOST_UPDATES = 4, 20
"""How many updates a cure must stand, the failing one among them: the fewest whatever they take,
more of them as long as there is time.
"""
_RUNS_AWAY = 10.0
"""A loss has run away that exceeds the first by this many times its size, or this much."""


class UpdatesAfter:
    """Updates of one failing step. Call inside ``failing.in_place()``.

    ``seconds``: how long those under one cure may take, by ``clock``.
    """

    def __init__(
        self,
        failing: FailingStep,
        *,
        seconds: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failing = failing
        self._seconds, self._clock = seconds, clock

    def under(self, atoms: tuple[Atom, ...]) -> Trial:
        """Apply this update and those after it on the same window, under ``atoms``: whether weights
        and losses stay.

        The update itself must be the step that its gradients make exactly, and under other forms
        of its lines move as before what has a value without them. What is finite now and
        ruins the forward after it has cured nothing, where float32 is ruined as well. Where it is
        not, what fails later is another failure of the format. Raises what the host's update
        raises.
        """
        began, cured = time.perf_counter(), partial(applied, self._failing.step.view, atoms)
        loss, message = None, fault_of_update(self._failing, cured) if self._failing.update else ""
        if self._failing.update and not message and are_forms(atoms):
            message = moved_otherwise(self._failing, cured) or self._hangs_on_numbers(atoms)
        if not message:
            following = self._failing.run_on(self._in_time(), under=cured)
            loss, message = _ruin(following)
            message = message and self._ruin_in_float32(following.num)
        return Trial(
            atoms=atoms,
            outcome="other_failure" if message else "pass",
            micro=self._failing.micro,
            loss=loss,
            seconds=time.perf_counter() - began,
            message=message,
        )

    def _hangs_on_numbers(self, atoms: tuple[Atom, ...]) -> str:
        """Return that the update is another one with other numbers where its lines have none, or
        "": how far an infinity was meant to move a weight, none of them says.
        """
        view, others = self._failing.step.view, with_other_numbers(atoms)
        is_same = others == atoms or is_same_update(
            self._failing, partial(applied, view, atoms), partial(applied, view, others)
        )
        return "" if is_same else "other numbers in place of infinities move the weights otherwise"

    def _in_time(self) -> Callable[[int], bool]:
        """Return whether another update is made after so many, from now on."""
        end = self._clock() + self._seconds
        return lambda num: num < (_MOST_UPDATES if self._clock() < end else _FEWEST_UPDATES)

    def _ruin_in_float32(self, num: int) -> str:
        """Return what as many updates ruin in float32, or more where there is time, or ""."""
        in_time = self._in_time()
        under = partial(reference, self._failing.step.view)
        return _ruin(self._failing.run_on(lambda made: made < num or in_time(made), under=under))[1]


def _ruin(following: Following) -> tuple[float, str]:
    """Return the worst loss of some updates, and what they ruin, or ""."""
    losses, broken = following.losses, following.broken
    first, worst = losses[0], math.nan if math.isnan(losses[-1]) else max(losses)
    after = counted(following.num, "update")
    if not worst - first <= _RUNS_AWAY * max(abs(first), 1.0):
        return worst, f"the loss goes from {first:.4g} to {worst:.4g} in {after}"
    return worst, f"{broken[0]} is not finite after {after}" if broken else ""
