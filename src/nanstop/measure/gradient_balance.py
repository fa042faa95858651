"""What samples of gradients and weights, taken from one update to the next, say of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanstop.records import Contribution, GradientAccount, SourceLine, StepId

_COLLINEAR = 0.01
"""Share of a vector that may be off a multiple of another: half precision rounds by 0.004."""


@dataclass(slots=True)
class Backward:
    """Samples around one backward. ``is_of_last_loss``: called on the loss of the one before."""

    before: Tensor
    after: Tensor
    weights: Tensor
    source: SourceLine | None = None
    is_of_last_loss: bool = False
    reached_others: bool = False


@dataclass(slots=True)
class Samples:
    """What is known of one optimizer's gradients from one update to the next: 1-d tensors of one
    length and format, scalars for norms. ``was``, ``became``: weights around the update before;
    ``met``: at the next forward after that; ``left``: gradients when it was over.
    """

    backwards: list[Backward] = field(default_factory=list)
    was: Tensor | None = None
    became: Tensor | None = None
    met: Tensor | None = None
    left: Tensor | None = None
    at_unscale: Tensor | None = None
    norm_at_unscale: Tensor | None = None
    scale: Tensor | None = None
    consumed: Tensor | None = None
    weights: Tensor | None = None
    updated: Tensor | None = None
    changed_at: list[SourceLine] = field(default_factory=list)
    was_read: bool | None = None


def on_host(samples: Samples) -> Samples:
    """Return the samples in float64 on the host. Synchronises their device once."""
    places: dict[int, Tensor] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            places[id(value)] = value

    for owner in (samples, *samples.backwards):
        for one in fields(owner):
            collect(getattr(owner, one.name))
    vectors = {key: value for key, value in places.items() if value.dim()}
    scalars = {key: value for key, value in places.items() if not value.dim()}
    flat = [*vectors.values(), *(value.reshape(1) for value in scalars.values())]
    if not flat:
        return samples
    read = torch.cat([one.to(flat[0].device, flat[0].dtype) for one in flat]).cpu().double()
    parts = read.split([one.numel() for one in flat])
    host = dict(zip((*vectors, *scalars), parts, strict=True))

    def moved(owner: Any) -> Any:
        names = [one.name for one in fields(owner)]
        given = {name: getattr(owner, name) for name in names}
        return replace(owner, **{n: host[id(v)] for n, v in given.items() if isinstance(v, Tensor)})

    return replace(moved(samples), backwards=[moved(one) for one in samples.backwards])


def balance(samples: Samples, at: StepId, optimizer: str, **known: Any) -> GradientAccount | None:
    """Return the account of samples that lie on the host, None where there was no update.

    Pure: no device work. ``known``: further fields of the account.
    """
    taken, weights, updated = samples.consumed, samples.weights, samples.updated
    if taken is None or weights is None or updated is None:
        return None
    backwards = samples.backwards
    arrived = backwards[-1].after if backwards else torch.zeros_like(taken)
    is_lost = _lost(backwards)
    still = all(torch.equal(one.weights, weights) for one in backwards)
    until_unscale = samples.at_unscale
    return GradientAccount(
        at=at,
        optimizer=optimizer,
        num_elements=taken.numel(),
        contributions=tuple(
            _contribution(one, before, is_lost=lost)
            for one, before, lost in zip(
                backwards, [None, *backwards][: len(backwards)], is_lost, strict=True
            )
        ),
        arrived=float(arrived.norm()),
        consumed=float(taken.norm()),
        factor=factor_between(arrived, taken),
        scale=float(samples.scale) if samples.scale is not None else 1.0,
        is_carried=_is_carried(samples, is_lost),
        num_hidden=int((~arrived.isfinite() & taken.isfinite()).sum()),
        until_unscale=factor_between(arrived, until_unscale) if until_unscale is not None else None,
        norm_at_unscale=_number(samples.norm_at_unscale),
        share_moved=float((updated != weights).double().mean()),
        is_put_back=_is_put_back(samples),
        were_weights_still=still,
        changed_at=tuple(dict.fromkeys(samples.changed_at)),
        was_read=samples.was_read,
        **known,
    )


def is_even(account: GradientAccount) -> bool:
    """Return whether all that arrived was consumed, once, and as it was."""
    if account.is_carried or account.num_hidden or account.is_put_back:
        return False
    if any(one.is_lost or one.is_again for one in account.contributions):
        return False
    return account.factor is not None and account.factor >= 1e-3


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


def _contribution(one: Backward, before: Backward | None, *, is_lost: bool) -> Contribution:
    given = one.after - one.before
    again = one.is_of_last_loss and before is not None
    return Contribution(
        norm=float(given.norm()),
        num_bad=int((~one.after.isfinite()).sum()),
        is_lost=is_lost,
        is_again=again and before is not None and _alike(given, before.after - before.before),
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
    return not torch.equal(was, became) and torch.equal(met, was)


def _number(value: Tensor | None) -> float | None:
    return float(value) if value is not None else None
