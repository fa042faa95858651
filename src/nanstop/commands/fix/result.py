"""What ``nanstop fix`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FixStatus = Literal["shown", "applied", "already applied", "not known", "no cure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedFile:
    """A file of the user's project with its change as a unified diff."""

    file: str
    diff: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A change of a file that is not the user's. ``code``: what their script can say in its place;
    "" where only the changed lines can be told.
    """

    file: str
    diff: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """The cure of one incident as code.

    ``proof``: how far it was tried. ``allow``: remedies of it that change training. ``words``: what
    is to be typed where no change of a file is known. ``undo``: the command that takes an applied
    change back.
    """

    incident: str
    status: FixStatus
    cure: str = ""
    proof: str = ""
    allow: tuple[str, ...] = ()
    supervised: bool = False
    files: tuple[FixedFile, ...] = ()
    overrides: tuple[Override, ...] = ()
    words: tuple[str, ...] = ()
    undo: str = ""
