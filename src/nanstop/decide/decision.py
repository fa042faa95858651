"""What an adapter is asked to do about a failing step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from nanstop.errors import TrainingStopped
from nanstop.frozen import frozen
from nanstop.records import Action, ActionKind, Atom, Report
from nanstop.wording import typed

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

STOPPED = 3
"""Exit code of a training that was stopped: its incident is unresolved."""


@frozen(kw_only=True)
class Decision:
    """``atoms``: remedies by micro-batch of the window that is redone.

    ``adopt``: remedies to switch on for the rest of the run once a rollback has put the snapshot
    back. ``code``: of what it is for, ``folder``: where its report is. ``on_stop``: as the policy
    says it.
    """

    kind: Kind
    atoms: Mapping[int, tuple[Atom, ...]] = field(default_factory=dict)
    adopt: tuple[Atom, ...] = ()
    reason: str = ""
    incident: str = ""
    code: str = "NS000"
    folder: str = ""
    on_stop: Literal["raise", "end"] = "raise"

    @property
    def stopped(self) -> str:
        """What is said where the training ends by it."""
        return f"training stopped: {self.reason}"

    @property
    def error(self) -> TrainingStopped:
        """What is raised where the training ends by it."""
        return TrainingStopped(
            self.stopped, incident=self.incident, code=self.code, folder=typed(self.folder)
        )

    @classmethod
    def to(
        cls,
        action: Action,
        report: Report,
        *,
        atoms: Mapping[int, tuple[Atom, ...]],
        on_stop: Literal["raise", "end"],
        folder: str = "",
    ) -> Decision:
        """Return how an action is carried out;
        one that is adopted is in force already, except after a rollback.
        """
        kind = _KINDS[action.kind]
        return cls(
            kind=kind,
            atoms=atoms,
            adopt=action.atoms if kind == "rollback" else (),
            reason=action.reason,
            incident=report.incident.id,
            code=report.diagnoses[0].code if report.diagnoses else "NS000",
            folder=folder,
            on_stop=on_stop,
        )
