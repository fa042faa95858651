"""What a script has trained and throws away is not kept alive by having been watched."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.errors import TrainingStopped
from nanstop.hosts.references import is_held_elsewhere
from nanstop.tracebacks import passes_through

if TYPE_CHECKING:
    from nanstop.hosts.patch_table import Table

__tracebackhide__ = passes_through

_log = logging.getLogger("nanstop")
_SHARE = 0.01
"""Of a run, at most, that looks take, and as much that collecting garbage does."""
_TIMES_ITS_WEIGHTS, _SHARE_OF_ROOM = 8, 1 / 32
"""What a training may hold, and how much of what is left it may hold as garbage for a while."""
_MOMENTS = ((torch.cuda, "empty_cache"), (nn.Module, "to"), (nn.Module, "cuda"))
"""At which a script frees memory, or is about to need it for another model."""


class Loops(Protocol):
    """See ``hosts.script.raw_loops.RawLoops``."""

    def trained(self) -> list[ref[Any]]: ...
    def let_go(self) -> None: ...


class LettingGo:
    """Where a script frees memory, or needs it for another model, looks whether it still holds what
    it has trained last.

    ``loops`` returns what watches the loops of this process, None where nothing does.
    """

    def __init__(
        self, loops: Callable[[], Loops | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loops = loops
        self._clock = clock
        self._looks, self._collects = _Share(clock), _Share(clock)
        self._is_looking = False
        self._over: list[tuple[str, int]] = []
        """Of the trainings that are over, the kind of device and the bytes of their weights."""

    def install(self, table: Table) -> None:
        """Look at all such moments."""
        table.replace(gc, "collect", self._look_after)
        for owner, name in _MOMENTS:
            table.replace(owner, name, self._look_before)

    def trainer_ended(self, trainer: Any) -> None:
        """Note that the training of a trainer is over: what has watched it is garbage now, and may
        hold the trainer for as long as nothing looks for such.
        """
        self._ended([getattr(trainer, "model", None)])

    def _ended(self, trained: Iterable[Any]) -> None:
        weights = [weight for one in trained for weight in _weights_of(one)]
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        self._over.append((weights[0].device.type if weights else "cpu", size))

    def _look_after(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``gc.collect``: what is garbage holds nothing any more."""
        result = original(*args, **kwargs)
        if not self._is_looking:
            self._over.clear()
            if self._is_let_go() and (self._is_much_over() or self._collects.is_due()):
                with self._collects.spent():
                    original()
        return result

    def _look_before(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.look()
        return original(*args, **kwargs)

    def look(self) -> None:
        """Let go of what the script holds no more. No device work of its own."""
        if torch.compiler.is_compiling() or self._is_looking:
            return
        is_gone = self._is_let_go()
        if self._is_much_over():
            self._collect()
        elif (is_gone is False or self._over) and self._collects.is_due():
            # What was run again holds itself in circles, and may be all that holds it.
            with self._collects.spent():
                self._collect()
            if is_gone is False and self._is_let_go(again=True):
                self._collect()

    def _is_much_over(self) -> bool:
        """Return whether trainings that are over may hold much of what is left."""
        # This file is read while torch is, which may be on behalf of that one.
        from nanstop.numerics.room import left_on

        for device in {device for device, _ in self._over}:
            held = sum(size for kind, size in self._over if kind == device)
            left = left_on(device)
            if left is None or _TIMES_ITS_WEIGHTS * held > _SHARE_OF_ROOM * left:
                return True
        return False

    def _is_let_go(self, *, again: bool = False) -> bool | None:
        """Let go of what the script holds no more; return whether there was such, None where that
        was not asked.
        """
        loops = self._loops()
        if loops is None or not (again or self._looks.is_due()):
            return None
        try:
            trained = loops.trained()
            if not trained:
                return None
            with self._looks.spent():
                is_held = is_held_elsewhere(trained, loops)
            if not is_held:
                self._looks = _Share(self._clock)
                self._ended(one() for one in trained)
                with self._looking():
                    loops.let_go()
        except TrainingStopped:
            raise
        except Exception as error:  # nanstop is never the reason a run dies
            self._loops = lambda: None
            _log.warning("nanstop: models that are thrown away may stay in memory (%s)", error)
            return None
        return not is_held

    def _collect(self) -> None:
        self._over.clear()
        with self._looking():
            gc.collect()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._is_looking = True
        try:
            yield
        finally:
            self._is_looking = False


def _weights_of(trained: Any) -> Iterable[Tensor]:
    if isinstance(trained, Optimizer):
        return (weight for group in trained.param_groups for weight in group["params"])
    return trained.parameters() if isinstance(trained, nn.Module) else ()


class _Share:
    """Keeps what is done now and then to a share of the time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._not_before = clock, 0.0

    def is_due(self) -> bool:
        return self._clock() >= self._not_before

    @contextmanager
    def spent(self) -> Iterator[None]:
        began = self._clock()
        yield
        now = self._clock()
        self._not_before = now + (now - began) / _SHARE
