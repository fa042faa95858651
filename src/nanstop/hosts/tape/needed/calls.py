"""What of a tape has to be played again for its losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from torch import Tensor

from nanstop.hosts.tape.needed.fetched import fetched_data, makers, taken_beside
from nanstop.hosts.tape.numbers import Number
from nanstop.hosts.tape.tape_calls import Constant, Left, Slot, TapedCall
from nanstop.numerics.tensors import bad_mask, by_torch_alone, has_bad

Delivered = tuple[dict[int, Constant], dict[tuple[int, int], bool]]
"""What loaders have given, and a script has taken by an index, by slot; and of which slots is
known, of how many calls before the model's, whether it came with bad rows.
"""


def that_came_bad(delivered: Delivered, early: Sequence[TapedCall]) -> dict[int, Constant]:
    """Return what came with bad rows, by slot; ``early``: the calls before the model's. What is
    known of as many calls is not asked again. Synchronises the device.
    """
    given, known = delivered
    for slot, one in given.items():
        if (slot, len(early)) not in known:
            with by_torch_alone():
                known[slot, len(early)] = _came_bad(one, early)
    return {slot: one for slot, one in given.items() if known[slot, len(early)]}


def calls_for(
    losses: Iterable[int],
    calls: Sequence[TapedCall],
    first_of_model: int,
    *,
    delivered: Delivered,
    anew: bool = False,
) -> list[TapedCall]:
    """Return, in order, the calls that the slots ``losses`` depend on, and those whose effect no
    slot tells of. ``first_of_model``: the first slot that a call of the model may fill. ``anew``:
    whether what the script made before is made again although it is finite. ``delivered``: what
    loaders have given; where it came with bad rows, it is taken as it is. So is what is finite of
    it, and what the script has taken by an index, where something made of it before is bad, or
    where it was taken after the model was called.
    """
    ends = tuple(losses)
    early = [call for call in calls if call.first < first_of_model]
    data = that_came_bad(delivered, early)
    chosen = _chosen(ends, calls, first_of_model, data, anew=anew)
    fetched = {} if anew else taken_beside(chosen, calls, delivered[0])
    if not anew and any(call.first < first_of_model for call in chosen):  # one of those is bad
        fetched |= fetched_data(chosen, calls, delivered[0])
    return _chosen(ends, calls, first_of_model, data | fetched, anew=anew) if fetched else chosen


def _chosen(
    losses: Iterable[int],
    calls: Sequence[TapedCall],
    first_of_model: int,
    data: Mapping[int, Constant],
    *,
    anew: bool,
) -> list[TapedCall]:
    """Return what ``calls_for`` does where slots are taken as the ``data`` that they held."""
    if data:
        calls = [call.given(data) for call in calls if data.keys().isdisjoint(call.results)]
    early = [call for call in calls if call.first < first_of_model]
    known = {slot for call in early for slot in call.results}
    wanted = set(losses)
    chosen: list[TapedCall] = []
    raised = calls[-1] if calls and not (wanted and calls[-1].count) else None
    for call in reversed(calls):
        # A write may reach the loss through a view of its target: none is left out but foreign
        # ones, and those into what a step fills, of which the parts are known.
        writes = call.writes and (call.into is None or not wanted.isdisjoint(call.into))
        if call.keep or writes or call is raised or wanted.intersection(call.results):
            chosen.append(call)
            held: list[Constant] = []
            for one in call.held((Slot, Left, Number, Constant)):
                if isinstance(one, Constant):
                    held += [one] if one.origin in known else ()
                else:
                    wanted.add(one.index if isinstance(one, Slot) else one.slot)
            wanted.update(_made_again(held, early, anew=anew))
    return chosen[::-1]


def _made_again(
    constants: Iterable[Constant], early: Sequence[TapedCall], *, anew: bool
) -> Iterator[int]:
    """Yield the slots of constants that are not finite, or of all ``anew``, as long as they can be
    made again by the calls before the model's.
    """
    for constant in constants:
        origin = constant.origin
        if origin is None or not (anew or has_bad(constant.tensor)):
            continue
        if not any(call.obstacle for call in makers(origin, early)):
            yield origin


def _came_bad(constant: Constant, early: Sequence[TapedCall]) -> bool:
    """Return whether some rows of what a loader has given are bad, and were so before: no call of
    its data set makes them so of what is finite. Synchronises the device.
    """
    bad = bad_mask(constant.tensor)
    rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    if not rows.any() or rows.all():
        return False
    values: dict[int, Tensor] = {}
    with suppress(Exception):  # what cannot be made again is taken as it is
        for call in makers(constant.origin or 0, early):
            if call.obstacle:
                break
            given = [values[one.index] for one in call.held(Slot)]
            given += [one.tensor for one in call.held(Constant)]
            call.play(values, {})
            made = [values[slot] for slot in call.results]
            if any(map(has_bad, made)) and not any(map(has_bad, given)):
                return False
    return True
