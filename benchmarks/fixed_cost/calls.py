"""Which of nanstop's functions are called in a healthy step, and how often."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.fixed_cost.trainings import Training

import nanstop

OWN = str(Path(nanstop.__file__).parent)
FIRST = 40
"""The first step that is counted: by then a run looks at every 2^n-th step alone."""


def calls_a_step(training: Training, num_steps: int = 15) -> dict[str, int]:
    """Return calls of nanstop's functions in a healthy step, by file and name, of a watched
    training: those of the step with which a quarter of ``num_steps`` has no more.

    A look that is due by the clock falls into few of them, on a machine under load into more.
    Comprehensions and generators count each time they go on.
    """
    steps: list[Counter[str]] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OWN):
            steps[-1][f"{code.co_filename[len(OWN) + 1 :]}:{code.co_name}"] += 1

    def after(step: int) -> None:
        sys.setprofile(None)
        if FIRST <= step + 1 < FIRST + num_steps:
            steps.append(Counter())
            sys.setprofile(count)

    training(FIRST + num_steps + 1, True, after)
    usual = sorted(steps, key=lambda one: one.total())[num_steps // 4]
    return dict(usual.most_common())
