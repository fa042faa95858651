"""What a script's own collator, or data set, makes of the first batch that a loader gives: which of
its lines made a tensor of it what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nanstop.numerics.tensors import by_torch_alone, tensors, version
from nanstop.own_code import is_library
from nanstop.records import SourceLine
from nanstop.replay.conditions import is_compiling
from nanstop.replay.function_modes import OwnMode, is_crowded, on_stack
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import source_line, user_line

__tracebackhide__ = passes_through

MOST_FETCHES, MOST_CALLS, MOST_ELEMENTS = 4, 256, 1 << 14
"""First batches of as many loaders, calls of each, and elements of a tensor that is kept."""

Call = tuple[Any, list[Tensor], list[Tensor]]
"""The line of a call, what it read and what it made or wrote to, as copies."""


class _Calls(OwnMode):
    """Keeps the calls of a fetch whose lines are the script's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        line = user_line() if len(self.calls) < MOST_CALLS else None
        if line is None or is_library(line[0].co_filename):
            return func(*args, **kwargs)
        with by_torch_alone():
            given = tensors((args, kwargs))
            read, before = _kept(given), [version(one) for one in given]
        result = func(*args, **kwargs)
        with by_torch_alone():
            written = [one for one, was in zip(given, before, strict=True) if version(one) != was]
            self.calls.append((line, read, _kept([*tensors(result), *written])))
        return result


def _kept(found: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach().clone() for one in found if 0 < one.numel() <= MOST_ELEMENTS]


class Fetches:
    """The first fetches of this process."""

    def __init__(self) -> None:
        self._all: list[list[Call]] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """Keep what is done inside, the first fetch of a loader."""
        mode = _Calls()
        if len(self._all) >= MOST_FETCHES or is_crowded() or is_compiling():
            yield
            return
        try:
            with on_stack(mode):
                yield
        finally:
            self._all.append(mode.calls)

    def makers(
        self,
        measure: Callable[[Tensor], int],
        behind: Callable[[SourceLine], Sequence[SourceLine]] = lambda _: (),
    ) -> tuple[str, ...]:
        """Return the lines that made something of which more is measured than of all that they
        read, FILE:LINE with their text, each followed by those ``behind`` it.
        """
        found: dict[str, None] = {}
        for line, read, made in (call for calls in self._all for call in calls):
            most = max(map(measure, read), default=0)
            source = source_line(line)
            if source is not None and max(map(measure, made), default=0) > most:
                each = (source, *behind(source))
                found |= dict.fromkeys(f"{one.short}: {one.text}" for one in each)
        return tuple(found)

    def forget(self) -> None:
        """Let go of all of them."""
        self._all.clear()


FETCHES = Fetches()
"""Of this process: a loader does not know who will train on what it gives."""
