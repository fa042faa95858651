"""Copies of a model side by side: where they differ, and what was the same when they parted."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanstop.hosts.sharded.alike.copies import Copy, Told
from nanstop.records import ReplicaFacts, SourceLine

MOST_VALUES = 1 << 16
"""Values of a weight that ranks tell each other, the first ones: 512 KiB as text at most."""


def differing(copies: Sequence[Copy]) -> list[str]:
    """Return the names of weights that not all copies have alike, among those that all have."""
    known = [dict(zip(copy.names, copy.weights, strict=True)) for copy in copies]
    common = [name for name in copies[0].names if all(name in one for one in known)]
    return [name for name in common if len({one[name] for one in known}) > 1]


def parted(told: Sequence[Told]) -> ReplicaFacts | None:
    """Return how the copies of all ranks differ, in order of ranks; None where no weight does, or
    nothing says that they are of one backward: no gradient that all ranks exchange is the same.
    """
    now = [one.copy for one in told]
    names = differing(now)
    if not names or not _are_of_one_backward(now):
        return None
    first = names[0]
    before = [one.before for one in told if one.before is not None]
    before = before if len(before) == len(told) else []
    since = list(zip(now, before, strict=bool(before))) if before else []
    local = max((copy.num_local - earlier.num_local for copy, earlier in since), default=0)
    late = max((copy.num_late - earlier.num_late for copy, earlier in since), default=0)
    at_once = bool(before) and before[0].number == now[0].number - 1 and not local
    seen = before if at_once else now
    option, options = _options(before) if before and _options(before)[0] else _options(now)
    lines = dict.fromkeys(line for copy in seen for line in copy.written_at)
    return ReplicaFacts(
        weight=first,
        ranks=_minority([_of(copy, copy.weights, first) for copy in now]),
        step=now[0].step,
        last_equal=before[0].step if before else None,
        num_differ=len(names),
        num_compared=len(now[0].names),
        is_exchanged=bool(_of(now[0], now[0].exchanged, first)),
        arrived_equal=_same(seen, first, lambda copy: copy.arrived),
        consumed_equal=_same(seen, first, lambda copy: copy.consumed),
        is_that_update=at_once,
        looked_at=seen[0].looked_at,
        num_updates=tuple(copy.num_updates - earlier.num_updates for copy, earlier in since),
        num_local=local,
        num_late=late,
        option=option,
        options=options,
        state=_state(before),
        written_at=tuple(lines),
    )


def unexchanged(
    copies: Sequence[Copy], step: int, made_at: tuple[SourceLine, ...]
) -> ReplicaFacts | None:
    """Return how copies differ after as many updates of each, of gradients that nothing exchanges:
    the loss made at ``made_at`` is that of a model without its wrapper. In order of ranks; None
    where none differs.
    """
    names = differing(copies)
    if not names:
        return None
    return ReplicaFacts(
        weight=names[0],
        ranks=_minority([_of(copy, copy.weights, names[0]) for copy in copies]),
        step=step,
        num_differ=len(names),
        num_compared=len(copies[0].names),
        is_past_wrapper=True,
        written_at=made_at,
    )


def _are_of_one_backward(copies: Sequence[Copy]) -> bool:
    first = copies[0]
    exchanged = zip(first.names, first.exchanged, first.arrived, strict=True)
    return any(
        is_exchanged and gradient and _same(copies, name, lambda copy: copy.arrived)
        for name, is_exchanged, gradient in exchanged
    )


def _of(copy: Copy, values: Sequence[Any], name: str) -> Any:
    return dict(zip(copy.names, values, strict=True)).get(name)


def _minority(digests: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that have another digest than most, or than the first of two halves."""
    usual = max(Counter(digests).items(), key=lambda one: (one[1], one[0] == digests[0]))[0]
    return tuple(rank for rank, digest in enumerate(digests) if digest != usual)


def _same(
    copies: Sequence[Copy], name: str, values: Callable[[Copy], Sequence[Any]]
) -> bool | None:
    if not all(values(copy) for copy in copies):
        return None  # a rank that has come to no update
    found = {_of(copy, values(copy), name) for copy in copies}
    return None if found == {None} else len(found) == 1


def _options(copies: Sequence[Copy]) -> tuple[str, tuple[float, ...]]:
    """Return the first option that differs and what each copy has for it, "" where none does."""
    if all(copy.options for copy in copies):
        for column in zip(*(copy.options for copy in copies), strict=False):
            if len({name for name, _ in column}) == 1 and len(set(column)) > 1:
                return column[0][0], tuple(value for _, value in column)
    return "", ()


def _state(copies: Sequence[Copy]) -> str:
    """Return the first of the optimizer's state that not all copies have alike, "" where none."""
    known = [dict(copy.states) for copy in copies]
    names = dict.fromkeys(name for one in known for name in one)
    return next((name for name in names if len({one.get(name) for one in known}) > 1), "")


def sample(weight: Tensor) -> Tensor:
    """Return the first values of a weight, on the host, in float64, none of a complex one.
    Synchronises its device.
    """
    most = 0 if weight.is_complex() else MOST_VALUES
    return weight.detach().reshape(-1)[:most].cpu().to(torch.float64)


def as_text(values: Tensor) -> str:
    """Return a sample in ASCII."""
    return base64.b64encode(values.numpy().tobytes()).decode()


def with_difference(
    facts: ReplicaFacts, own: tuple[Tensor, int], text: str, shape: Sequence[int]
) -> ReplicaFacts:
    """Return facts with the largest difference of the first rank's ``own`` sample, taken in some
    step, to that of another of this ``text``; as they are where the samples are alike. The first
    of ``facts.ranks`` comes first in its values.
    """
    mine, step = own
    theirs = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float64)
    if theirs.shape != mine.shape or torch.equal(mine, theirs):
        return facts
    apart = (mine - theirs).abs().nan_to_num(float("inf"))
    place = int(apart.argmax())
    pair = (float(theirs[place]), float(mine[place]))
    index = torch.unravel_index(torch.tensor(place), tuple(shape) or (1,))
    return replace(
        facts,
        largest=float(apart[place]),
        index=tuple(map(int, index)) if shape else (),
        values=pair[::-1] if facts.ranks[0] == 0 else pair,
        measured=step,
    )
