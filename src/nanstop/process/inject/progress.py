"""How far the job of a dry run has come, as its process tells the one that waits for it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

PROGRESS = "NANSTOP_PROGRESS"
"""The file that a job writes down in how far it has come; unset, nobody looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """``done``: parts of the job that are over; ``total``: how many there are at least, 0 where
    that is not known. ``seconds_left``: None where the job does not know it.
    """

    done: int = 0
    total: int = 0
    seconds_left: float | None = None


class Follow(Protocol):
    """Shows how far a job is while one waits for it."""

    def __call__(self, progress: Progress, seconds: float) -> None:
        """``seconds``: since the process of the job began."""

    def clear(self) -> None:
        """Make room for what is written now."""


def tell(progress: Progress) -> None:
    """Say how far a job has come. Costs a small file where somebody waits, else nothing."""
    file = os.environ.get(PROGRESS)
    if file:
        Path(file).write_text(json.dumps(asdict(progress)), encoding="ascii")


def told(file: Path) -> Progress:
    """Return what was told last; a file that is not there, or half written, tells nothing."""
    try:
        return Progress(**json.loads(file.read_text(encoding="ascii")))
    except (OSError, ValueError, TypeError):
        return Progress()
