"""Tensors that a model leaves in attributes of its modules, where a loss reads them: the auxiliary
loss of a router, say.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from nanstop.hosts.tape.tape_calls import Left, TapedCall, left_in
from nanstop.numerics.nested import leaves

_Place = tuple[weakref.ref[nn.Module], weakref.ref[nn.Module], str, int | None]
"""A called model, one of its modules, an attribute of that, and a place in it if it is a list."""

_MOST = 256
"""Entries of a list that are looked at, and places that are kept: a list may grow for ever."""


class LeftBehind:
    """Where models of a run leave such tensors. ``num_searches``: how many tensors that nobody has
    left it looks for; where one was found once it looks first.
    """

    def __init__(self, num_searches: int = 0) -> None:
        self._num_searches = num_searches
        self._places: list[_Place] = []

    def stand_in(self, tensor: Tensor, calls: Sequence[TapedCall]) -> Left | None:
        """Return what stands for a tensor that the last call of a model may have left behind; None
        where no module holds it. Walks through the models only for a tensor that is not found.
        """
        made = {id(c.function): c for c in calls if c.rng is not None and c.count}
        return self._known(tensor, made) or self._searched(tensor, made)

    def _known(self, tensor: Tensor, made: dict[int, TapedCall]) -> Left | None:
        for model, module, name, place in self._places:
            holder, call = module(), made.get(id(model()))
            if holder is not None and call is not None and left_in(holder, name, place) is tensor:
                return Left(holder, name, place, call.first, weakref.ref(tensor))
        return None

    def _searched(self, tensor: Tensor, made: dict[int, TapedCall]) -> Left | None:
        models = [call.function for call in made.values() if isinstance(call.function, nn.Module)]
        if self._num_searches <= 0 or len(self._places) >= _MOST or not models:
            return None
        found = next((place for model in models for place in _places_in(model, tensor)), None)
        if found is None:
            self._num_searches -= 1
            return None
        self._places.append(found)
        return self._known(tensor, made)


def _places_in(model: nn.Module, tensor: Tensor) -> Iterator[_Place]:
    for module in model.modules():
        refs = weakref.ref(model), weakref.ref(module)
        for name, held in vars(module).items():
            entries = held[:_MOST] if type(held) is list else ()
            listed = next((n for n, one in enumerate(entries) if one is tensor), None)
            if held is tensor or listed is not None:
                yield *refs, name, listed


@contextmanager
def put_back(calls: Iterable[TapedCall]) -> Iterator[None]:
    """Put back what models had left in their attributes before they are called again."""
    left = [one for call in calls for one in leaves(call.args, call.kwargs, kind=Left)]
    held = [vars(one.module).get(one.name) for one in left]
    entries = [list[Any](one) if isinstance(one, list) else None for one in held]
    try:
        yield
    finally:
        for one, value, inside in zip(left, held, entries, strict=True):
            if value is not None and inside is not None:
                value[:] = inside
            if value is None:  # the script has taken it away
                vars(one.module).pop(one.name, None)
            else:
                vars(one.module)[one.name] = value
