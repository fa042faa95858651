"""What a call of the step has made that no replay makes again, and what it makes again alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from nanstop.hosts.tape.tape_calls import TapedCall
from nanstop.numerics.tensors import by_torch_alone, tensors, version
from nanstop.replay.rng import RngState, drawn, restore_rng


class Unrepeated:
    """Results of models that were not recorded, of draws, and whatever is made of these.

    A replay takes them as they are, like data; but they are none. ``made``: empty in most scripts.
    """

    def __init__(self) -> None:
        self.made: dict[int, weakref.ref[Tensor]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        known = self.made.get(id(tensor))
        return known is not None and known() is tensor

    def note(self, result: Any) -> None:
        """Note what such a call has returned."""
        for tensor in (result,) if isinstance(result, Tensor) else tensors(result):
            self.made[id(tensor)] = weakref.ref(tensor)

    def follow(
        self, given: Iterable[Any], result: Any, *, known: Callable[[Tensor], object] | None
    ) -> None:
        """Note what an op that was not recorded has returned, where it was given parameters or
        what is noted, or, of one that draws, what is ``known``.
        """
        if not self.made and known is None and not any(isinstance(x, nn.Parameter) for x in given):
            return
        with by_torch_alone():
            read = tensors(list(given))
            is_drawn = known is not None and any(known(one) is not None for one in read)
            if is_drawn or any(isinstance(x, nn.Parameter) or x in self for x in read):
                self.note(result)


class Redrawn:
    """A function that is called again with the random numbers that its first call has drawn."""

    def __init__(self, function: Callable[..., Any], state: RngState) -> None:
        self.function, self._state = function, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        restore_rng(self._state)
        return self.function(*args, **kwargs)


def functions_of(calls: Iterable[TapedCall]) -> list[Any]:
    """Return what of the calls is code of Python's and no module, each once."""
    called = (call.function for call in calls)
    plain = (one.function if isinstance(one, Redrawn) else one for one in called)
    return list({id(one): one for one in plain if isinstance(one, FunctionType)}.values())


def drawing_again(state: RngState, others: Sequence[Tensor]) -> Callable[[TapedCall], bool]:
    """Return what has a call that began with a random state, and has drawn, draw the same again,
    and tells whether it has left ``others`` as they were.
    """
    before, versions = drawn(), [version(one) for one in others]

    def is_alike(call: TapedCall) -> bool:
        if drawn() != before:
            call.function = Redrawn(call.function, state)
        return [version(one) for one in others] == versions

    return is_alike
