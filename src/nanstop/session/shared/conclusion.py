"""What a failure comes to, on the rank that looked into it and on those that it tells."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nanstop.decide.remembered import PolicyState
from nanstop.prove.bad_samples import atoms_for
from nanstop.prove.failing_step import FailingStep
from nanstop.records import Action, Atom, FailureKey, Report, codec
from nanstop.records.record import record
from nanstop.replay.step import ModelView


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What a failure comes to: its report, whose last entry says what to do, to be kept under
    ``key``.

    A new one has no id until it is ``named``; ``kept_in``: the machine and the folder that it is
    kept in then, as "machine:folder". ``atoms``: remedies by micro-batch of a window that
    is redone, of this rank. ``like_the_last``: it was folded unseen into one that was left alone.
    ``view``: of the model and the optimizer that remedies are for, None on other ranks.
    ``interrupt``: to be raised once it is written down. ``state``: what the policy remembers by
    now; ``optimizer``: the number that stands in it for the one that failed.
    """

    report: Report
    key: FailureKey
    state: PolicyState
    optimizer: int = 0
    kept_in: str = ""
    atoms: Mapping[int, tuple[Atom, ...]] = field(default_factory=dict[int, tuple[Atom, ...]])
    like_the_last: bool = False
    is_new: bool = False
    view: ModelView | None = None
    interrupt: KeyboardInterrupt | None = None

    @property
    def action(self) -> Action:
        return self.report.audit[-1].action

    def named(self, incident: str, folder: Path) -> Conclusion:
        """Return the same conclusion with this incident id in the report, the action and the
        proof. ``folder``: that of the incident.
        """
        report, action = self.report, self.action
        action = replace(action, proof=incident if action.proof is not None else None)
        return replace(
            self,
            kept_in=f"{platform.node()}:{folder.parent.absolute()}",
            report=replace(
                report,
                incident=replace(report.incident, id=incident),
                replay=report.replay and replace(report.replay, incident=incident),
                proof=report.proof and replace(report.proof, incident=incident),
                audit=(replace(report.audit[-1], action=action, incident=incident),),
            ),
        )

    def instead(self, action: Action) -> Conclusion:
        """Return it with another ``action``, of no remedy."""
        latest = replace(self.report.audit[-1], action=action)
        report = replace(self.report, audit=(*self.report.audit[:-1], latest))
        return replace(self, report=report, atoms={})


@record
class _Told:
    report: Report
    key: FailureKey
    state: PolicyState
    optimizer: int
    kept_in: str
    like_the_last: bool
    is_new: bool


def as_text(end: Conclusion | None) -> str:
    """Return what other ranks must know of a conclusion, "" for none."""
    if end is None:
        return ""
    return codec.to_json(_Told(**_fields_of_told(end)))


def from_text(text: str) -> Conclusion | None:
    """Return what another rank has concluded: remedies of its own micro-batches are left out.

    Errors: ``NanstopError`` for text of another version.
    """
    if not text:
        return None
    return Conclusion(**_fields_of_told(codec.from_json(_Told, text)))


def _fields_of_told(end: Conclusion | _Told) -> dict[str, Any]:
    return {one.name: getattr(end, one.name) for one in fields(_Told)}


def redone(action: Action, failing: FailingStep | None) -> Mapping[int, tuple[Atom, ...]]:
    """Return the remedies of each micro-batch of a window that is redone;
    one that is adopted is in force by then.
    """
    if action.kind not in ("redo", "quarantine") or failing is None:
        return {}
    return {micro: atoms_for(failing, action.atoms, micro) for micro in failing.micros}
