"""What each of several ranks does about a failure that they cannot meet over any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from nanstop.decide.policy import Policy, decide
from nanstop.decide.remembered import PolicyState
from nanstop.records import Action, FailureKey, Proof

ByItself = Literal["", "skip", "own", "stop"]
"""What each can do without asking: nothing, skip an update that is bad for all, or one that is bad
here and may not be elsewhere, or end a run whose weights this update would ruin.
"""
_SKIP = "the ranks cannot agree: each skips by itself an update that is bad for all of them"
_OWN = "the ranks have not met over this: this one skips by itself an update that ruins its weights"
_STOP = "the ranks cannot agree, and this update would ruin the weights of all of them"
_NO_REMEDY = Proof(incident="", verdict="none_found", minimal=())


def decide_apart(  # noqa: PLR0913 - called once, by name
    policy: Policy,
    state: PolicyState,
    by_itself: ByItself,
    *,
    key: FailureKey,
    at_step: int,
    optimizer: int,
    can_veto: bool,
    weights_broken: bool,
    harmless: bool,
) -> tuple[Action, PolicyState]:
    """Return what to do, and the state after it, as ``decide`` does: no remedy is tried, which
    would be another on each rank.
    """
    ruins = by_itself == "stop" and not weights_broken
    skips = _OWN if by_itself == "own" else _SKIP
    action, state = decide(
        policy,
        state,
        key=key,
        proof=_NO_REMEDY,
        at_step=at_step,
        optimizer=optimizer,
        can_veto=can_veto,
        weights_broken=weights_broken or ruins,
        harmless=harmless,
        no_redo=skips,
    )
    if action.kind == "stop" and ruins and policy.on_failure != "stop":
        return replace(action, reason=_STOP), state
    return (replace(action, reason=skips) if action.kind == "skip" else action), state
