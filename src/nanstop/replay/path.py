"""The path that a run takes: what it draws at random and what it chooses, so that a run in another
format takes the same one.

Formats draw different numbers from one state of a generator, and round scores that decide to
different sides. Gaps between such runs would be the draws' and the choices', not the formats'.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from nanstop.replay.conditions import eager


@dataclass(slots=True)
class _Turn:
    """What one op drew or chose. ``taken``: None where it cannot be given to another run: a draw
    that stays inside its kernel, a choice among values that are not finite. ``mine``: which
    elements came from finite values; None: all.
    """

    op: str
    drawn: bool
    taken: Tensor | None
    mine: Tensor | None = None

    def give(self, op: str, own: Tensor) -> bool:
        """Write what was recorded into the result of an op; return False where that is
        something else.
        """
        if self.op != op or self.taken is None or self.taken.shape != own.shape:
            return False
        taken = self.taken.to(own.dtype)
        own.copy_(taken if self.mine is None else torch.where(self.mine, taken, own))
        return True


class Path:
    """The draws and choices of a run, recorded once and played in others.

    ``strayed``: the op at which the last run that it was played in drew other numbers, "" where
    none did. Choices are taken over only as far as the recorded ones came from finite values.
    ``formats``: those that the recorded run computed in; what is only cast or moved is not in it.
    """

    def __init__(self) -> None:
        self.strayed = ""
        self.formats: set[torch.dtype] = set()
        self.is_known = False
        self._turns: list[_Turn] = []

    @property
    def num_draws(self) -> int:
        """How many ops drew at random."""
        return sum(turn.drawn for turn in self._turns)

    @property
    def num_choices(self) -> int:
        """How many ops chose, wholly or partly from finite values."""
        return sum(not turn.drawn and turn.taken is not None for turn in self._turns)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note what the run inside draws and chooses. Synchronises the device at the end."""
        self._turns.clear()
        with eager(), _Recording(self._turns, self.formats):
            yield
        _settle(self._turns)
        self.is_known = True

    def played(
        self,
        *,
        choices: bool = True,
        formats: set[torch.dtype] | None = None,
        start: tuple[int, int] = (0, 0),
    ) -> AbstractContextManager[object]:
        """Have the run inside draw, and with ``choices`` choose, what was recorded.
        ``formats``: is told of those that it computes in; ``start``: see ``place_on_path``.
        """
        self.strayed = ""
        wanted = [turn for turn in self._turns if turn.drawn or choices]
        is_asked = bool(wanted) or formats is not None
        return self._played(wanted, formats, start) if is_asked else nullcontext()

    @contextmanager
    def _played(
        self,
        turns: Sequence[_Turn],
        formats: set[torch.dtype] | None,
        start: tuple[int, int],
    ) -> Iterator[None]:
        playing = _Playing(turns, formats)
        playing.place = start
        try:
            with eager(), playing:
                yield
        finally:
            self.strayed = playing.strayed


def place_on_path() -> tuple[int, int]:
    """Return how many draws and choices of its path the run that is on has come to."""
    on = [one for one in _get_current_dispatch_mode_stack() if isinstance(one, _OnPath)]
    return on[-1].place if on else (0, 0)


def passage() -> Callable[[], AbstractContextManager[None]]:
    """Note where on their paths the runs that are on are now; return what has them be there again
    inside, and where they are by then on exit: for a part that is run once more.
    """
    playing = [one for one in _get_current_dispatch_mode_stack() if isinstance(one, _Playing)]
    noted = [one.place for one in playing]

    @contextmanager
    def again() -> Iterator[None]:
        present = [one.place for one in playing]
        for one, place in zip(playing, noted, strict=True):
            one.place = place
        try:
            yield
        finally:
            for one, place in zip(playing, present, strict=True):
                one.place = place

    return again


@contextmanager
def no_choices() -> Iterator[None]:
    """Have what is chosen inside be no part of the path: the other form of a line asks where it has
    no value, which the run whose path is played never did.
    """
    held = [one for one in _get_current_dispatch_mode_stack() if isinstance(one, _OnPath)]
    before = [one.takes_choices for one in held]
    for one in held:
        one.takes_choices = False
    try:
        yield
    finally:
        for one, was in zip(held, before, strict=True):
            one.takes_choices = was


@dataclass(slots=True)
class _Call:
    """An op that was called and what it returned."""

    func: Any
    args: Any
    kwargs: Any
    result: Any

    @property
    def name(self) -> str:
        return self.func._schema.name

    def argument(self, name: str) -> Any:
        """Return what was given for an argument, or its default; None where it has no such."""
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                given = self.args[place] if place < len(self.args) else self.kwargs.get(name)
                return argument.default_value if given is None else given
        return None

    def floats(self) -> list[Tensor]:
        return [a for a in self.args if isinstance(a, Tensor) and a.is_floating_point()]

    def draws(self) -> bool:
        """Return whether it drew, being an op that may: attention without dropout does not."""
        switches = _named(self.func) & {"dropout_p", "dropout", "train", "training"}
        return all(self.argument(switch) for switch in switches)

    def drawn(self) -> Tensor | None:
        """Return what was drawn; None where it stays inside the kernel (attention's dropout, noise
        in an activation).
        """
        if isinstance(self.result, Tensor):
            return None if _named(self.func) & {"dropout_p", "noise"} else self.result
        return self.result[1] if self.name == "aten::native_dropout" else None

    def chosen(self) -> Tensor | None:
        """Return the whole numbers or truths that an op made of floating values, where they are
        all that it made, or indices along a dimension beside the values there; else None.
        """
        result = self.result
        if isinstance(result, Tensor):
            is_chosen = not (result.is_floating_point() or _returns_operand(self.func))
            return result if is_chosen and self.floats() and not self.asks_if_finite() else None
        if not isinstance(result, tuple) or len(result) != 2 or "dim" not in _named(self.func):
            return None
        values, indices = result
        if not (isinstance(values, Tensor) and isinstance(indices, Tensor) and self.floats()):
            return None
        alike = values.is_floating_point() and not indices.is_floating_point()
        return indices if alike and values.shape == indices.shape else None

    def asks_if_finite(self) -> bool:
        """Return whether any finite value gives the same: a comparison with itself or with Inf."""
        if self.name in ("aten::isnan", "aten::isinf", "aten::isposinf", "aten::isneginf"):
            return True
        first, other = (*self.args, None, None)[:2]
        return other is first or (isinstance(other, float) and math.isinf(other))

    def from_finite(self, made: Tensor) -> Tensor:
        """Return which elements of a result come from finite values, in a form that fits it."""
        finite = [operand.isfinite() for operand in self.floats()]
        dim = self.argument("dim")
        if isinstance(dim, int):
            return finite[0].all(dim, keepdim=made.dim() == finite[0].dim())
        fitting = [one if _expands(one.shape, made.shape) else one.all() for one in finite]
        return torch.stack(torch.broadcast_tensors(*fitting)).all(0)


class _OnPath(TorchDispatchMode, ABC):
    """Sees every op, below autograd; subclasses say what becomes of draws and of choices.
    ``formats``: is told of what is computed in; ``place``: how many draws and choices there were.
    """

    takes_choices = True

    def __init__(self, formats: set[torch.dtype] | None) -> None:
        super().__init__()
        self.place = (0, 0)
        self._formats = formats

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        result = func(*args, **kwargs)  # a generator moves as it does without nanstop
        if self._formats is not None and _is_float(result) and _computes(func):
            self._formats.add(result.dtype)
        if _may_draw(func):
            call = _Call(func, args, kwargs, result)
            if call.draws():
                self.drawn(call, call.drawn())
        elif self.takes_choices and _may_choose(result):
            call = _Call(func, args, kwargs, result)
            chosen = call.chosen()
            if chosen is not None:
                self.chosen(call, chosen)
        return result

    @abstractmethod
    def drawn(self, call: _Call, drawn: Tensor | None) -> None:
        """Take note of an op that drew at random; ``drawn``: see ``_Call``."""

    @abstractmethod
    def chosen(self, call: _Call, chosen: Tensor) -> None:
        """Take note of an op that chose; ``chosen`` is the part of its result that says what."""


class _Recording(_OnPath):
    def __init__(self, turns: list[_Turn], formats: set[torch.dtype]) -> None:
        super().__init__(formats)
        self._turns = turns

    def _add(self, turn: _Turn) -> None:
        self._turns.append(turn)
        self.place = (self.place[0] + turn.drawn, self.place[1] + (not turn.drawn))

    def drawn(self, call: _Call, drawn: Tensor | None) -> None:
        if drawn is None:
            self._add(_Turn(call.name, drawn=True, taken=None))
            return
        reads = not (call.name.endswith("_like") or _returns_operand(call.func))
        by_values = reads and drawn is call.result and call.floats()
        # Of two numbers, 0 and 1, a bit each is enough.
        taken = drawn.to(torch.bool) if "bernoulli" in call.name else drawn.clone()
        mine = call.from_finite(drawn) if by_values else None
        self._add(_Turn(call.name, drawn=True, taken=taken, mine=mine))

    def chosen(self, call: _Call, chosen: Tensor) -> None:
        mine = call.from_finite(chosen)
        self._add(_Turn(call.name, drawn=False, taken=chosen.clone(), mine=mine))


class _Playing(_OnPath):
    """``strayed``: the first op that drew and was not given what the recorded run had drawn."""

    def __init__(self, turns: Sequence[_Turn], formats: set[torch.dtype] | None) -> None:
        super().__init__(formats)
        self.strayed = ""
        self._draws = [turn for turn in turns if turn.drawn]
        self._choices = [turn for turn in turns if not turn.drawn]

    def _next(self, *, drawn: bool) -> _Turn | None:
        turns, at = (self._draws, self.place[0]) if drawn else (self._choices, self.place[1])
        self.place = (self.place[0] + drawn, self.place[1] + (not drawn))
        return turns[at] if at < len(turns) else None

    def drawn(self, call: _Call, drawn: Tensor | None) -> None:
        turn = self._next(drawn=True) if not self.strayed else None
        if turn is None or drawn is None or not turn.give(call.name, drawn):
            self.strayed = self.strayed or call.name
        elif isinstance(call.result, tuple):  # native_dropout: values beside their mask
            probability = call.argument("p")
            kept = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
            call.result[0].copy_(call.args[0] * drawn * kept)

    def chosen(self, call: _Call, chosen: Tensor) -> None:
        turn = self._next(drawn=False)
        if turn is None or turn.op != call.name:
            self._choices = []  # another program from here on
        elif turn.give(call.name, chosen) and isinstance(call.result, tuple):
            _regather(call.args[0], call.argument("dim"), *call.result)


def _regather(scores: Tensor, dim: int, values: Tensor, indices: Tensor) -> None:
    """Have the values that an op returned be those at its indices."""
    if indices.dim() == scores.dim():
        values.copy_(scores.gather(dim, indices))
    else:
        values.copy_(scores.gather(dim, indices.unsqueeze(dim)).squeeze(dim))


def _settle(turns: Sequence[_Turn]) -> None:
    """Let go of masks that leave nothing out, and of what no finite value has made."""
    masked = [turn for turn in turns if turn.mine is not None]
    if not masked:
        return
    device = masked[0].mine.device if masked[0].mine is not None else None
    ends = [torch.stack([t.mine.all(), t.mine.any()]) for t in masked if t.mine is not None]
    for turn, (every, some) in zip(
        masked, torch.stack([end.to(device) for end in ends]).tolist(), strict=True
    ):
        turn.taken = turn.taken if some else None
        turn.mine = None if every else turn.mine


@cache
def _named(func: Any) -> frozenset[str]:
    """Return the names of an op's arguments."""
    return frozenset(argument.name for argument in func._schema.arguments)


@cache
def _may_draw(func: Any) -> bool:
    """Return whether an op draws at random: it is marked so, or is given a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags or "generator" in _named(func)


@cache
def _returns_operand(func: Any) -> bool:
    """Return whether an op gives back what it was given: a view, or written in place."""
    return any(value.alias_info is not None for value in func._schema.returns)


@cache
def _computes(func: Any) -> bool:
    """Return whether an op makes new numbers: no view, no cast, nothing in place."""
    moved = ("aten::_to_copy", "aten::clone")
    return not _returns_operand(func) and func._schema.name not in moved


def _is_float(result: Any) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point()


def _may_choose(result: Any) -> bool:
    return not _is_float(result)


def _expands(shape: torch.Size, to: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(own in (1, other) for own, other in pairs)
