"""What a seed scenario is: a plain trainer set-up that fails in the published way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run of a scenario.

    ``float32``: the reference run, the same data in the same order with everything in float32.
    ``variant``: which cause is planted, of a scenario that has several. ``out``: an empty folder
    for the trainer's files.
    """

    out: Path
    steps: int
    float32: bool = False
    variant: str | None = None


def _never(setup: Setup) -> Any:
    raise NotImplementedError(f"{setup}: this scenario is played")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """``build`` returns a trainer that knows nothing of nanstop;
    building twice gives the same run twice.

    ``symptom``: what was published, of a run that is not watched. ``steps`` of the watched run and
    of the reference, ``symptom_steps`` of the run that shows the symptom. ``allow``: remedies that
    change training and that this scenario's true cause needs (``Policy.allow``). ``variants``: name
    and true cause of each planted variant.
    """

    name: str
    title: str
    symptom: str
    build: Callable[[Setup], Any] = _never
    steps: int
    symptom_steps: int
    allow: tuple[str, ...] = ()
    variants: tuple[tuple[str, str], ...] = ()
    play: Callable[[Scenario, Callable[[str], None]], dict[str, Any]] | None = None
    """In place of ``build``, for a scenario whose process does not live to tell:
    returns the whole result.
    """
