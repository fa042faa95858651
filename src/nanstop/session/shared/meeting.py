"""The ranks that have met over one failure: one of them looks into it, all do the same about it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from nanstop.decide.agreement import ONE_RANK, Ranks
from nanstop.decide.policy import Policy
from nanstop.errors import NanstopError
from nanstop.numerics.tensors import has_bad
from nanstop.records import codec
from nanstop.records.record import record
from nanstop.replay.collectives import communicates
from nanstop.replay.rerun import attempt
from nanstop.replay.step import Step
from nanstop.session.shared.conclusion import Conclusion, as_text, from_text

_log = logging.getLogger("nanstop")


@record
class _Part:
    """What one rank says of its own part of a failing window. ``fails``: whether it does so by
    itself, None where that cannot be tried; ``bad_loss``: whether a loss was not finite.
    """

    fails: bool | None
    bad_loss: bool
    num_micros: int
    step: int
    policy: Policy


@dataclass(frozen=True, slots=True)
class Meeting:
    """``leader``: the rank that looks into the failure, the first of those that it was ``born_on``
    (None: nobody was asked, or could tell).
    """

    ranks: Ranks = ONE_RANK
    leader: int = 0
    born_on: tuple[int, ...] | None = None

    @property
    def agreed(self) -> bool:
        """Whether several ranks have met."""
        return self.ranks.size > 1

    @classmethod
    def over(cls, ranks: Ranks, step: Step | None, policy: Policy) -> Meeting:
        """Return the meeting over a window that fails, each rank's own part of which is run again,
        undone; of this rank alone where the others cannot be met.
        """
        if ranks.size == 1 or step is None:
            return cls()
        try:
            told = ranks.gather("part", codec.to_json(_own_part(step, policy)), patient=True)
            parts = [codec.from_json(_Part, one) for one in told]
            _require_alike(parts)
        except NanstopError as error:
            ranks.leave(error.message)
            return cls()
        born_on = tuple(rank for rank, part in enumerate(parts) if part.fails)
        bad_losses = (rank for rank, part in enumerate(parts) if part.bad_loss)
        leader = (*born_on, *bad_losses, 0)[0]
        asked = born_on or all(part.fails is not None for part in parts)
        return cls(ranks, leader, born_on if asked else None)

    def conclusion(
        self, own: Callable[[], Conclusion | None], follow: Callable[[Conclusion], None]
    ) -> Conclusion | None:
        """Return what all ranks come to: what the leader's ``own`` look does, which the others
        ``follow``; None: nothing is left to decide, or the leader did not come to an end.
        """
        if not self.agreed:
            return own()
        leads = self.leader == self.ranks.rank
        try:
            end = own() if leads else None
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: the failure was not investigated (%s)", error)
            self.ranks.leave(f"rank {self.leader} could not look at the failure")
            return None
        try:
            told = self.ranks.gather("conclusion", as_text(end), patient=True)
            if not leads:
                end = from_text(told[self.leader])
        except NanstopError as error:
            self.ranks.leave(error.message)
            return end.observed(error.message) if end is not None else None
        if end is not None and not leads:
            follow(end)
        return end


ALONE = Meeting()


def _own_part(step: Step, policy: Policy) -> _Part:
    try:
        alone = step.is_local and not communicates(step)
        fails = any(attempt(step, m).failed for m in range(len(step.batches))) if alone else None
    except Exception:  # it cannot be run again
        fails = None
    bad_loss = any(loss is not None and has_bad(loss) for loss in step.losses)
    return _Part(
        fails=fails,
        bad_loss=bad_loss,
        num_micros=len(step.batches),
        step=step.id.step,
        policy=policy,
    )


def _require_alike(parts: list[_Part]) -> None:
    """Errors: ``NanstopError`` where ranks differ in what they must have in common."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if part.policy != first.policy:
            raise NanstopError(f"ranks 0 and {rank} have different policies")
        if (part.step, part.num_micros) != (first.step, first.num_micros):
            raise NanstopError(
                f"rank 0 is at step {first.step} of {first.num_micros} micro-batches, rank {rank} "
                f"at step {part.step} of {part.num_micros}"
            )
