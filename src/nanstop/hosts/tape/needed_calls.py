"""What of a tape has to be played again for its losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nanstop.hosts.tape.numbers import Number
from nanstop.hosts.tape.tape_calls import Constant, Left, Slot, TapedCall
from nanstop.numerics.tensors import has_bad


def calls_for(
    losses: Iterable[int],
    calls: Sequence[TapedCall],
    first_of_model: int,
    *,
    anew: bool = False,
) -> list[TapedCall]:
    """Return, in order, the calls that the slots ``losses`` depend on, and those whose effect no
    slot tells of. ``first_of_model``: the first slot that a call of the model may fill. ``anew``:
    whether what the script made before is made again although it is finite.
    """
    wanted = set(losses)
    early = [call for call in calls if call.first < first_of_model]
    chosen: list[TapedCall] = []
    for call in reversed(calls):
        # A write may reach the loss through a view of its target: none is left out but foreign
        # ones, and those into what a step fills, of which the parts are known.
        writes = call.writes and (call.into is None or not wanted.isdisjoint(call.into))
        if call.keep or writes or call is calls[-1] or wanted.intersection(call.results):
            chosen.append(call)
            wanted.update(s.index for s in call.held(Slot))
            wanted.update(left.slot for left in call.held(Left))
            wanted.update(number.slot for number in call.held(Number))
            wanted.update(_made_again(call.held(Constant), early, anew=anew))
    return chosen[::-1]


def _made_again(
    constants: Iterable[Constant], early: Sequence[TapedCall], *, anew: bool
) -> Iterator[int]:
    """Yield the slots of constants that are not finite, or of all ``anew``, as long as they can be
    made again by the calls before the model's.
    """
    for constant in constants:
        if constant.origin is None or not (anew or has_bad(constant.tensor)):
            continue
        wanted = {constant.origin}
        for call in reversed(early):
            if wanted.intersection(call.results):
                wanted.update(s.index for s in call.held(Slot))
                if call.obstacle:
                    break
        else:
            yield constant.origin
