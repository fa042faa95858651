"""``truth.toml`` as a record, checked when it is read."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = Path(__file__).parent

Cure = Literal[
    "precision", "kernel", "loss", "optimizer", "data", "weights", "config", "code", "none"
]


class Truth(BaseModel):
    """What is true of one case. Fields: ``README.md`` beside this file; ``name`` and ``folder``,
    where ``case.py`` and ``healthy.py`` lie, are those of the file that it was read from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    cause_class: str = Field(alias="class")
    codes: tuple[str, ...]
    also: tuple[str, ...] = ()
    kind: Literal["loud", "silent", "scary", "open"]
    phase: str | None = None
    op: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    step: int | None = None
    micro: int | None = None
    cure: Cure
    in_run: bool = False
    remedies: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    line: str = ""
    fix: str = ""
    links: tuple[str, ...] = ()
    note: str = ""
    folder: Path = Field(default=CASES, exclude=True)

    @property
    def only_isolated(self) -> bool:
        """Whether all that can be done in the run is to leave out what fails."""
        return bool(self.remedies) and all(one.startswith("drop_") for one in self.remedies)


def matches(value: str, patterns: tuple[str, ...]) -> bool:
    """Return whether one of the shell patterns is that of ``value``; no patterns match anything."""
    return not patterns or any(fnmatchcase(value, pattern) for pattern in patterns)


def load_truths(names: tuple[str, ...] = (), *, cases: Path = CASES) -> tuple[Truth, ...]:
    """Return the truths of all cases in the folder ``cases``, or of those named. Errors:
    ``SystemExit`` for a name that does not exist.
    """
    found = {path.parent.name: path for path in sorted(cases.glob("*/truth.toml"))}
    missing = [name for name in names if name not in found]
    if missing:
        raise SystemExit(f"no such case: {', '.join(missing)}")
    return tuple(_load(found[name]) for name in names or found)


def _load(path: Path) -> Truth:
    values = tomllib.loads(path.read_text())
    for name in ("op", "module"):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    return Truth.model_validate({**values, "name": path.parent.name, "folder": path.parent})
