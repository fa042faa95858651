"""What the accounts of an optimizer's gradients show, so that each rule states only its own
condition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nanstop.records import Contribution, Evidence, GradientAccount, OptimizerFacts, SourceLine

NOTHING = 1e-8
"""Share of the gradients from which nothing is left of them:
no loss scale divides by as much (2^24 is 6e-8).
"""


RESCALED = 50.0
"""Factor that is no weight any more, up or down."""
CLIPPED = 0.999
"""Factor below which gradients were made smaller."""
TAKEN = 0.15
"""Share of the weights that an update takes away from which little of them stays: usual decays
take 1e-6 to 1e-3.
"""
GROWS = 2.0
"""Share beyond which what an update takes away leaves more than there was, of the other sign."""
_MOST_DECAY = 0.5
"""The largest weight decay that is usual: where no larger one makes weights grow, the rate does."""
DECAYED = "decayed"
"""The series of such shares."""


def has_usual_decay(optimizer: OptimizerFacts | None) -> bool:
    """Return whether an optimizer has a weight decay that is usual."""
    return optimizer is not None and 0.0 < (optimizer.weight_decay or 0.0) <= _MOST_DECAY


def repeated(accounts: tuple[GradientAccount, ...], num: int) -> tuple[GradientAccount, ...]:
    """Return the last ``num`` accounts, () where there are fewer."""
    return accounts[-num:] if len(accounts) >= num else ()


def has_signal(account: GradientAccount) -> bool:
    """Return whether gradients arrived that are finite and not zero throughout."""
    return math.isfinite(account.arrived) and account.arrived > 0.0


def is_swallowed(account: GradientAccount) -> bool:
    """Return whether next to nothing of what arrived was consumed."""
    if not has_signal(account):
        return False
    return account.consumed <= NOTHING * account.arrived / max(account.scale, 1.0)


def same(values: Sequence[float | None]) -> bool:
    """Return whether all numbers have the same magnitude, to 1 in 1000; None counts as 0."""
    known = [abs(value or 0.0) for value in values]
    return max(known) - min(known) <= 1e-3 * max(known)


def is_rescaled(account: GradientAccount) -> bool:
    """Return whether what the optimizer takes is far from the gradient of the mean that its loss is
    a multiple of, and no count of the backwards says why.
    """
    if not account.factor or not account.loss_factor or account.scale != 1.0:
        return False
    num = max(len(account.contributions), 1)  # a sum of as many means is divided by it, or not
    is_far = not 1.0 / RESCALED / num < abs(account.factor * account.loss_factor) < RESCALED
    is_count = same((account.factor, 1.0 / num))
    return is_far and not is_count and not same((account.factor, 1.0))


def follows_size(accounts: tuple[GradientAccount, ...]) -> bool:
    """Return whether the optimizer was seen to make its updates as long as gradients are, by a rate
    of its own: not 1, which leaves the rate to whoever multiplies the gradients.
    """
    rates = [account.rate for account in accounts if account.rate is not None]
    return bool(rates) and not any(same((rate, 1.0)) for rate in rates)


def clipped_by_hand(accounts: tuple[GradientAccount, ...]) -> bool:
    """Return whether updates show gradients that were clipped while they bore the factor of their
    loss: made smaller by another number each time, then divided by that factor, to one and the same
    norm of all of them.
    """
    norms = [account.norm_consumed for account in accounts]
    if not accounts or not all(norms) or not same(norms):
        return False
    clips = [_clip_ahead(account) for account in accounts]
    return None not in clips and not same(clips)


def _clip_ahead(account: GradientAccount) -> float | None:
    """Return what gradients were multiplied by ahead of the division by their loss's factor."""
    first = next((factor for factor in account.stages if factor is not None), None)
    undone = 1.0 / (account.loss_factor or math.inf)
    places = [n for n, factor in enumerate(account.stages) if factor and same((factor, undone))]
    is_clip = first is not None and first < CLIPPED and not same((first, undone))
    return first if is_clip and places and places[0] > 0 else None


def thrown_away(account: GradientAccount) -> tuple[Contribution, ...]:
    """Return what an accumulation window lost of what its backwards gave, () where none of it
    was meant to reach the update.

    All come from one line, which gave what the update consumed as well; they are finite, nothing
    was asked of them or computed with them, and no weight or other optimizer has moved meanwhile.
    """
    given = account.contributions
    lost = tuple(one for one in given if one.is_lost)
    alike = len({one.source for one in given}) == 1
    plain = not any(one.num_bad or one.reached_others for one in given)
    if account.was_read or not (lost and alike and plain and account.is_only):
        return ()
    still = account.were_weights_still and not given[-1].is_lost
    used = still and account.factor is not None and account.factor > 0.0
    return lost if used and len(lost) == len(given) - 1 else ()


def doubled(account: GradientAccount) -> Contribution | None:
    """Return what the same loss gave a second time, where the update consumed both."""
    used = account.factor is not None and account.factor > 0.0
    twice = (one for one in account.contributions if one.is_again and not one.is_lost)
    return next(twice, None) if used else None


def shown(source: SourceLine | None) -> str:
    """Return ``train.py:31``, "" where there is no line."""
    return source.short if source is not None else ""


def quoted(source: SourceLine | None) -> str:
    """Return a line with its text, "" where there is none."""
    return source.quoted if source is not None else ""


def update_line(evidence: Evidence) -> SourceLine | None:
    """Return the line that asked for the latest update, as far as one was seen."""
    seen = [account.updated_at[-1] for account in evidence.accounts if account.updated_at]
    return seen[-1] if seen else None


def changed_last(accounts: tuple[GradientAccount, ...]) -> SourceLine | None:
    """Return the last line that wrote to gradients before an update, as far as one was seen."""
    seen = [account.changed_at[-1] for account in accounts if account.changed_at]
    return seen[-1] if seen else None


def since(accounts: tuple[GradientAccount, ...]) -> int | None:
    """Return the step of the first of some accounts."""
    return accounts[0].at.step if accounts else None
