"""What the accounts of an optimizer's gradients show, so that each rule states only its own
condition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nanstop.frozen import frozen
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
LOST = 0.95
"""Share of the weights with a gradient from which an update leaves them as they were."""
_LARGEST_VANISHING = 1e-6
"""A learning rate by which float32 may still round updates away."""
_USUAL_GRADIENT = 1e-5
"""A size from which an element of a gradient moves a weight at a usual rate of SGD."""
_TWO, _FOUR, _FIVE = 2, 4, 5
"""Looks in a row: at a rate that has become 0, at a decay or at what stays, and at a rate of 0 from
the start."""
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


@frozen
class Shown:
    """A setting that updates show to be out of range, what it does, the looks that show it, and the
    line that made it so, None for that of the update.
    """

    setting: str
    effect: str
    seen: tuple[GradientAccount, ...]
    made_at: SourceLine | None = None


def own_rate_of_0(accounts: tuple[GradientAccount, ...]) -> Shown | None:
    """Return that an update which a script makes by itself adds 0 to every weight: since the first,
    or where earlier ones did not.
    """
    if not accounts or not all(one.is_own and has_signal(one) for one in accounts):
        return None
    still = [one.asked == 0.0 and one.share_moved == 0.0 for one in accounts]
    num = next((n for n, stands in enumerate(reversed(still)) if not stands), len(still))
    seen = accounts[len(accounts) - num :]
    if num == len(still) and num >= _FIVE:
        every = f"the script's own update adds 0 to every sampled weight, {num} looks in a row"
        return Shown("a rate of 0 in the script's own update", every, seen)
    if num < _TWO or num == len(still):
        return None
    since = seen[0].at.step
    effect = f"from update {since} at the latest the script's own update adds 0 to every weight"
    return Shown("a rate that has come to 0", f"{effect}, and gradients still arrive", seen)


def great_decay(
    accounts: tuple[GradientAccount, ...], optimizer: OptimizerFacts | None
) -> Shown | None:
    """Return that each update takes much of the weights away beside what it makes of gradients."""
    accounts = repeated(accounts, _FOUR)
    least = min((one.shrunk for one in accounts), default=0.0)
    if least < TAKEN or (least > GROWS and has_usual_decay(optimizer)):
        return None
    if least > GROWS:
        effect = f"each update multiplies every weight by {1 - least:.2g}, beside its gradient"
        return Shown("weight decay", f"{effect}: they grow, and change their sign", accounts)
    effect = f"each update takes {100 * least:.2g} % or more of every weight away"
    effect = f"{effect}, beside its gradient: what is learned does not stay"
    return Shown("weight decay", effect, accounts)


def vanishing_rate(
    accounts: tuple[GradientAccount, ...], optimizer: OptimizerFacts | None
) -> Shown | None:
    """Return that updates at one and the same rate leave nearly all weights as they were, by
    gradients that a usual one would move them with.
    """
    seen = repeated(accounts, _FOUR)
    rates = {one.given_rate for one in seen}
    if len(rates) != 1 or optimizer is None:
        return None
    rate = rates.pop()
    peak = max(rate or 0.0, optimizer.scheduled or 0.0)
    if not rate or peak > _LARGEST_VANISHING or any(map(_stays_otherwise, seen)):
        return None
    if optimizer.per_rate is None and not all(_size(one) >= _USUAL_GRADIENT for one in seen):
        return None
    least = min(one.share_lost for one in seen)
    effect = (
        f"an update leaves {100 * least:.3g} % of the sampled weights that have a gradient as they "
        "are: it is smaller than what rounding takes away"
    )
    made_at = seen[-1].made_at if rate == optimizer.given else None
    return Shown(f"learning rate {rate:g}", effect, seen, made_at)


def _stays_otherwise(account: GradientAccount) -> bool:
    """Return whether an update moves weights, or something else keeps them where they are."""
    moves = account.is_own or account.share_lost < LOST
    is_taken = account.is_put_back or bool(account.rounded_to) or is_swallowed(account)
    return moves or is_taken or not has_signal(account)


def _size(account: GradientAccount) -> float:
    """Return the typical size of an element of the gradients that an update took."""
    return account.consumed / math.sqrt(max(account.num_elements, 1))


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
