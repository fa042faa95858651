"""What is said of a run when it begins, where there is something to say."""

from __future__ import annotations

from collections.abc import Iterator

from nanstop.records import RunFacts
from nanstop.records.facts import BY_HAND


def said_at_start(facts: RunFacts) -> Iterator[str]:
    """Yield lines on the bad weights that an earlier training left, and on what nanstop cannot do
    in this one.
    """
    left = facts.left_weights
    if left:
        names = ", ".join(f"`{stats.name}`" for stats in left[:3])
        yield (
            f"an earlier training in this process left {len(left)} weights not finite or far "
            f"too large: {names}{' and more' if len(left) > 3 else ''}"
        )
    num = facts.world_size
    if num > 1 and not facts.ranks_agree:
        yield f"{num} processes train together without acting as one: no cure is applied"
    if facts.veto not in ("yes", BY_HAND):
        yield f"the update cannot be held back here: {facts.veto}"
