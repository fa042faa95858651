"""What samples of gradients and weights, taken from one update to the next, say of each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanstop.measure.accounts.samples import Backward, Samples, number_of
from nanstop.measure.loss_graph import LEAST_SCALE
from nanstop.records import Contribution, GradientAccount, SourceLine, StepId

_COLLINEAR = 0.01
"""Share of a vector that may be off a multiple of another: half precision rounds by 0.004."""
_UNDONE = 0.01
"""Share of an update that may be left where it was undone: a slow average takes up as little."""
_LEAST_OF_UPDATE = 1e-3
_APART = 0.9
"""Cosine above which gradients and weights point the same way."""


def balance(samples: Samples, at: StepId, optimizer: str, **known: Any) -> GradientAccount | None:
    """Return the account of samples that lie on the host, None where there was no update.

    Pure: no device work. ``known``: further fields of the account.
    """
    taken, weights, updated = samples.consumed, samples.weights, samples.updated
    if taken is None or weights is None or updated is None:
        return None
    backwards = samples.backwards
    arrived = backwards[-1].arrived if backwards else torch.zeros_like(taken)
    is_lost = _lost(backwards)
    still = all(torch.equal(one.weights, weights) for one in backwards)
    until_unscale = samples.at_unscale
    return GradientAccount(
        at=at,
        optimizer=optimizer,
        num_elements=taken.numel(),
        contributions=tuple(
            _contribution(one, before, samples.left, is_lost=lost)
            for one, before, lost in zip(
                backwards, [None, *backwards][: len(backwards)], is_lost, strict=True
            )
        ),
        arrived=float(arrived.norm()),
        consumed=float(taken.norm()),
        factor=factor_between(arrived, taken),
        scale=float(samples.scale) if samples.scale is not None else 1.0,
        loss_factor=samples.loss_factor,
        are_means=all(one.is_mean for one in backwards),
        is_scaled_apart=bool(backwards) and all(one.is_scaled_apart for one in backwards),
        stages=_stages(arrived, samples.stages),
        norm_consumed=number_of(samples.norm_consumed),
        num_replaced=samples.num_replaced,
        num_unheld=samples.num_unheld,
        was_reached=samples.was_reached,
        given_rate=samples.given_rate,
        num_at_the_end=samples.num_at_the_end,
        num_with_gradient=samples.num_with_gradient,
        rate=factor_between(taken, weights - updated),
        is_carried=_is_carried(samples, is_lost),
        num_hidden=int((~arrived.isfinite() & taken.isfinite()).sum()),
        until_unscale=factor_between(arrived, until_unscale) if until_unscale is not None else None,
        norm_at_unscale=number_of(samples.norm_at_unscale),
        share_moved=float((updated != weights).double().mean()),
        share_lost=_share_lost(taken, weights, updated),
        shrunk=_shrunk(taken, weights, updated),
        updated_at=(samples.updated_at,) if samples.updated_at is not None else (),
        is_put_back=_is_put_back(samples),
        rounded_to=_rounded_to(samples),
        share_undone=_share_undone(samples),
        rewritten_at=tuple(dict.fromkeys(reversed(samples.rewritten_at)))[::-1],
        were_weights_still=still,
        changed_at=_changed_at(samples, arrived),
        called_at=tuple(dict.fromkeys(samples.called_at)),
        is_changed_alike=bool(samples.are_fixed) and all(samples.are_fixed),
        overflowed_at=tuple(dict.fromkeys(samples.overflowed_at)),
        was_read=samples.was_read,
        **known,
    )


def _share_lost(taken: Tensor, weights: Tensor, updated: Tensor) -> float:
    """Return how many of the weights with a gradient an update left as they were."""
    should = taken != 0.0
    return float(((updated == weights) & should).sum() / should.sum().clamp(min=1))


def _shrunk(taken: Tensor, weights: Tensor, updated: Tensor) -> float:
    """Return by which share of themselves an update made the weights smaller beyond what it made of
    their gradients; 0.0 where the two cannot be told apart, or it is no more of the update than
    what rounding makes of the rest.
    """
    both = torch.stack([weights, taken], dim=1)
    sizes = both.norm(dim=0)
    moved = (weights - updated)[:, None]
    is_known = bool(both.isfinite().all()) and bool(moved.isfinite().all())
    if not is_known or not bool((sizes > 0.0).all()):
        return 0.0
    scaled = both / sizes
    if abs(float(scaled[:, 0] @ scaled[:, 1])) > _APART:
        return 0.0
    found = torch.linalg.lstsq(scaled, moved).solution[:, 0]
    is_seen = abs(float(found[0])) > _LEAST_OF_UPDATE * float(moved.norm())
    return float(found[0] / sizes[0]) if is_seen else 0.0


def _stages(arrived: Tensor, stages: Sequence[Tensor]) -> tuple[float | None, ...]:
    """Return by what each change of the first parameter's gradient multiplied it."""
    each = [arrived[: stages[0].numel()], *stages] if stages else []
    pairs = pairwise(each)
    return tuple(factor_between(a, b) for a, b in pairs if not torch.equal(a, b))


def _changed_at(samples: Samples, arrived: Tensor) -> tuple[SourceLine, ...]:
    """Return the lines that changed gradients; those of hooks alone where they did it all, or took
    away what was not finite.
    """
    hooked, later = dict.fromkeys(samples.hooked_at), dict.fromkeys(samples.changed_at)
    assert samples.consumed is not None
    if hooked:
        after = samples.backwards[-1].after
        are_hidden = bool((~arrived.isfinite() & after.isfinite()).any())
        if are_hidden or torch.equal(after, samples.consumed):
            return tuple(hooked)
    return (*hooked, *later)


def is_even(account: GradientAccount) -> bool:
    """Return whether an update consumed the sum of the backwards' gradients, unchanged and once."""
    if account.is_carried or account.num_hidden or account.is_put_back or account.rounded_to:
        return False
    if any(one.is_lost or one.is_again for one in account.contributions):
        return False
    if account.factor is None or account.factor < 1e-3:
        return False
    known = account.loss_factor if account.scale == 1.0 else None
    least = 0.02 / max(len(account.contributions), 1)
    return known is None or (known < LEAST_SCALE and least < known * account.factor < 50.0)


def factor_between(first: Tensor, second: Tensor) -> float | None:
    """Return the number that makes the first vector the second one, None where there is none."""
    square = float(first @ first)
    if not square or not torch.isfinite(first).all() or not torch.isfinite(second).all():
        return None
    factor = float(first @ second) / square
    off = float((second - factor * first).norm())
    return factor if off <= _COLLINEAR * float(second.norm()) else None


def _lost(backwards: Sequence[Backward]) -> list[bool]:
    """Return of each backward whether nothing of what it left was there at the next one."""
    pairs = pairwise(backwards)
    gone = [bool(one.after.any()) and not bool(after.before.any()) for one, after in pairs]
    lost_later = [any(gone[place:]) for place in range(len(gone))]
    return [*lost_later, False] if backwards else []


def _contribution(
    one: Backward, before: Backward | None, left: Tensor | None, *, is_lost: bool
) -> Contribution:
    given = one.arrived - one.before
    if before is not None:
        again = one.is_of_last_loss and _alike(given, before.arrived - before.before)
    else:  # what lies there may come from a call of ``torch.autograd.grad``
        again = _alike(given, one.before) and not (left is None or torch.equal(left, one.before))
    return Contribution(
        norm=float(given.norm()),
        num_bad=int((~one.arrived.isfinite()).sum()),
        is_lost=is_lost,
        is_again=again,
        reached_others=one.reached_others,
        source=one.source,
    )


def _alike(first: Tensor, second: Tensor) -> bool:
    """Return whether what two backwards added is equal but for the rounding of the sum."""
    size = float(second.norm())
    return size > 0.0 and float((first - second).norm()) <= 1e-3 * size


def _is_carried(samples: Samples, is_lost: Sequence[bool]) -> bool:
    left, backwards = samples.left, samples.backwards
    if left is None or not backwards or not bool(left.any()) or any(is_lost):
        return False
    pairs = pairwise(backwards)
    untouched = all(torch.equal(one.after, after.before) for one, after in pairs)
    added = any(bool((one.after != one.before).any()) for one in backwards)
    begins = torch.equal(backwards[0].before, left)
    assert samples.consumed is not None
    kept = factor_between(backwards[-1].after, samples.consumed) is not None
    return begins and untouched and added and kept


def _is_put_back(samples: Samples) -> bool:
    was, became, met = samples.was, samples.became, samples.met
    if was is None or became is None or met is None:
        return False
    if bool((was == was[0]).all()):
        return False  # at a bound, at which a projection keeps them: no state that is copied
    changed = float((became - was).norm())
    return changed > 0.0 and float((met - was).norm()) <= _UNDONE * changed


def _rounded_to(samples: Samples) -> str:
    """Return the narrow format that all weights were rounded to since the update before."""
    became, met = samples.became, samples.met
    if became is None or met is None or torch.equal(became, met):
        return ""
    narrow = (torch.float16, torch.bfloat16)
    found = (one for one in narrow if torch.equal(became.float().to(one).double(), met))
    return next((str(one).removeprefix("torch.") for one in found), "")


def _share_undone(samples: Samples) -> float:
    was, became, met = samples.was, samples.became, samples.met
    if was is None or became is None or met is None:
        return 0.0
    changed = became != was
    return float((met == was)[changed].double().mean()) if bool(changed.any()) else 0.0
