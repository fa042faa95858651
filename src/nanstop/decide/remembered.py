"""What the policy remembers of a run: which failures came how often, what stays on, and the updates
that were lost.
"""

from __future__ import annotations

from dataclasses import replace

from nanstop.frozen import frozen
from nanstop.records import Atom, FailureKey

Folded = tuple[str, str, str, str]


@frozen(kw_only=True)
class Occurrence:
    """One kind of failure: how often it came, and the remedy that was proven for it (empty:
    none).
    """

    folded: Folded
    count: int
    cure: tuple[Atom, ...] = ()


@frozen(kw_only=True)
class Losses:
    """The updates of one optimizer that were left out in the present training, and how many of
    them came last, one after another.
    """

    optimizer: int
    num: int = 0
    in_a_row: int = 0


@frozen(kw_only=True)
class PolicyState:
    """What the policy remembers of a run. ``adopted``: atoms that stay on for the rest of it.

    ``skips_in_a_row``: since the last update of any optimizer; ``lost``: of each that lost one, by
    the number that stands for it.
    """

    occurrences: tuple[Occurrence, ...] = ()
    adopted: tuple[Atom, ...] = ()
    skips_in_a_row: int = 0
    lost: tuple[Losses, ...] = ()

    def occurrence(self, key: FailureKey) -> Occurrence:
        """Return what is remembered of failures like ``key``, with count 0 for a new one."""
        new = Occurrence(folded=key.folded, count=0)
        return next((one for one in self.occurrences if one.folded == key.folded), new)

    def losses(self, optimizer: int) -> Losses:
        """Return how many updates an optimizer has lost, none for one that is not known."""
        none = Losses(optimizer=optimizer)
        return next((one for one in self.lost if one.optimizer == optimizer), none)

    def in_a_row(self, optimizer: int) -> int:
        """Return how many updates were left out since the last one of this optimizer, or of any."""
        return max(self.skips_in_a_row, self.losses(optimizer).in_a_row)


def completed(state: PolicyState, optimizer: int | None = None) -> PolicyState:
    """Return the state after an update of an optimizer (None: the only one) that was applied: its
    row of skips has ended, not that of another that takes turns with it.
    """
    state = replace(state, skips_in_a_row=0) if state.skips_in_a_row else state
    for lost in state.lost:
        if lost.in_a_row and optimizer in (None, lost.optimizer):
            state = _with_losses(state, replace(lost, in_a_row=0))
    return state


def begun(state: PolicyState) -> PolicyState:
    """Return the state with which another training begins:
    what is known of failures stays, nothing is lost yet.
    """
    return replace(state, skips_in_a_row=0, lost=())


def remember(state: PolicyState, now: Occurrence) -> PolicyState:
    """Return the state with what is known now of one kind of failure."""
    others = tuple(one for one in state.occurrences if one.folded != now.folded)
    return replace(state, occurrences=(*others, now))


def adopt(state: PolicyState, cure: tuple[Atom, ...]) -> PolicyState:
    """Return the state with atoms that stay on for the rest of the run."""
    added = tuple(atom for atom in cure if atom not in state.adopted)
    return replace(state, adopted=(*state.adopted, *added))


def left_out(state: PolicyState, lost: Losses) -> PolicyState:
    """Return the state with one more update lost, of the optimizer of ``lost``."""
    state = replace(state, skips_in_a_row=state.skips_in_a_row + 1)
    return _with_losses(state, replace(lost, num=lost.num + 1, in_a_row=lost.in_a_row + 1))


def _with_losses(state: PolicyState, lost: Losses) -> PolicyState:
    others = tuple(one for one in state.lost if one.optimizer != lost.optimizer)
    return replace(state, lost=(*others, lost))
