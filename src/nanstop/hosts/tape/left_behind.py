"""Tensors that a loss reads and that no call of its own tape has returned: what a model leaves in
attributes of its modules (the auxiliary loss of a router), and what was made before the last
backward (a generator's samples, which were judged before its own loss reads them).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from nanstop.hosts.tape.given.constants import GivenConstants
from nanstop.hosts.tape.needed.calls import calls_for
from nanstop.hosts.tape.tape_calls import Left, Slot, TapedCall, left_in
from nanstop.hosts.tape.weight_marks import WeightMarks
from nanstop.numerics.nested import leaves

_Place = tuple[weakref.ref[nn.Module], weakref.ref[nn.Module], str, int | None]
"""A called model, one of its modules, an attribute of that, and a place in it if it is a list."""

_MOST = 256
"""Entries of a list that are looked at, and places that are kept: a list may grow for ever."""


class Recorded(Protocol):
    """What a ``Tape`` has recorded: its calls, and the slots of what they have returned, from
    ``begin`` to ``count``, and what these were ``given``.
    """

    calls: list[TapedCall]
    given: GivenConstants
    slots: dict[int, tuple[weakref.ref[Tensor], Slot]]
    begin: int
    count: int
    problem: str

    @property
    def has_model(self) -> bool: ...

    def slot(self, tensor: Any) -> int | None: ...


class LeftBehind:
    """Where models of a run leave such tensors. ``num_searches``: how many tensors that nobody has
    left it looks for; where one was found once it looks first. ``on_model`` is told of a model that
    an earlier tape has called, ``num_slots``: of that tape.
    """

    def __init__(self, num_searches: int = 0) -> None:
        self.on_model: Callable[[nn.Module], object] = lambda _: None
        self.num_slots = 0
        self._num_searches = num_searches
        self._places: list[_Place] = []
        self._earlier: tuple[Recorded, dict[int, Any]] | None = None
        self._marks = WeightMarks()

    def closed(self, tape: Recorded) -> None:
        """Note that a backward has ended the micro-batch of a tape: later ones begin where its
        slots end, and may read what its calls have returned as long as their models are as now.
        """
        models = {id(one): one for one in map(_model_of, tape.calls) if one is not None}
        marks = {key: self._marks.of([one]) for key, one in models.items()}
        self._earlier, self.num_slots = (tape, marks), tape.count

    def forget(self) -> None:
        """Let go of the earlier tape."""
        self._earlier = None

    def stand_in(self, tensor: Tensor, tape: Recorded) -> tuple[Left | Slot, Slot] | None:
        """Return what stands for a tensor that an earlier tape has made or that the last call of a
        model may have left behind, and the slot that it hangs on; None where no module holds it.
        Walks through the models only for a tensor that is not found.
        """
        slot = self._taken_over(tensor, tape)
        if slot is not None:
            return slot, slot
        if not tape.has_model or not (self._places or self._num_searches > 0):
            return None  # a long tape is not gone through for each tensor that nobody has left
        made = {id(c.function): c for c in tape.calls if c.rng is not None and c.count}
        left = self._known(tensor, made) or self._searched(tensor, made)
        return (left, Slot(left.slot)) if left is not None else None

    def _taken_over(self, tensor: Tensor, tape: Recorded) -> Slot | None:
        """Return the slot of a tensor of the earlier tape, whose calls for it ``tape`` gets."""
        earlier, marks = self._earlier or (tape, {})
        slot = earlier.slot(tensor)
        if earlier is tape or slot is None or earlier.problem or slot >= tape.begin:
            return None
        end = next((n for n, c in enumerate(earlier.calls, 1) if slot in c.results), 0)
        needed = {id(c) for c in calls_for([slot], earlier.calls[:end], 0, delivered=({}, {}))}
        models = [_model_of(call) for call in earlier.calls if id(call) in needed]
        if any(one is not None and self._marks.of([one]) != marks[id(one)] for one in models):
            return None
        own = [call for call in tape.calls if call.first >= tape.begin]
        needed |= {id(call) for call in tape.calls}
        tape.calls[:] = [*(call for call in earlier.calls if id(call) in needed), *own]
        tape.given.take_over(earlier.given)
        for model in models:
            if model is not None:
                self.on_model(model)
        tape.slots[id(tensor)] = weakref.ref(tensor), Slot(slot)
        return Slot(slot)

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


def _model_of(call: TapedCall) -> nn.Module | None:
    function: object = call.function
    return function if call.rng is not None and isinstance(function, nn.Module) else None


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
