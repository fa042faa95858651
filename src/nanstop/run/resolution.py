"""What an adapter is asked to do about a failing step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nanstop.records import Action, ActionKind, Atom
from nanstop.run.case import Case
from nanstop.run.rows import atoms_for

Kind = Literal["proceed", "redo", "skip", "rollback", "stop"]

_KINDS: Mapping[ActionKind, Kind] = {
    "continue": "proceed",
    "observe": "proceed",
    "redo": "redo",
    "adopt": "redo",
    "quarantine": "redo",
    "rollback": "rollback",
    "skip": "skip",
    "stop": "stop",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """``atoms``: remedies by micro-batch of the window that is redone.

    ``adopt``: remedies to switch on for the rest of the run once a rollback has put the snapshot back.
    """

    kind: Kind
    atoms: Mapping[int, tuple[Atom, ...]] = field(default_factory=dict)
    adopt: tuple[Atom, ...] = ()
    reason: str = ""
    incident: str = ""


def resolution_of(action: Action, case: Case | None, incident: str) -> Resolution:
    """Return how an action is carried out; one that is adopted is in force already, except after a rollback."""
    kind = _KINDS[action.kind]
    atoms: dict[int, tuple[Atom, ...]] = {}
    if kind == "redo" and action.kind != "adopt" and case is not None:
        atoms = {micro: atoms_for(case, action.atoms, micro) for micro in case.failing}
    return Resolution(
        kind=kind,
        atoms=atoms,
        adopt=action.atoms if kind == "rollback" else (),
        reason=action.reason,
        incident=incident,
    )
