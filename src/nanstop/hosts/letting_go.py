"""What a script has trained and throws away is not kept alive by having been watched."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import nn

from nanstop.hosts.references import is_held_elsewhere
from nanstop.tracebacks import passes_through

if TYPE_CHECKING:
    from nanstop.hosts.patch_table import Table

__tracebackhide__ = passes_through

_SHARE = 0.01
"""Of a run, at most, that looks take."""
_MOMENTS = ((gc, "collect"), (torch.cuda, "empty_cache"), (nn.Module, "to"), (nn.Module, "cuda"))
"""At which a script frees memory, or is about to need it for another model."""


class Loops(Protocol):
    """See ``hosts.script.raw_loops.RawLoops``."""

    def trained(self) -> list[ref[Any]]: ...
    def let_go(self) -> None: ...


class LettingGo:
    """Before a script frees memory, or needs it for another model, looks whether it still holds
    what it has trained last.

    ``loops`` returns what watches the loops of this process, None where nothing does.
    """

    def __init__(
        self, loops: Callable[[], Loops | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loops = loops
        self._clock, self._not_before = clock, 0.0
        self._leaves_circles = False

    def install(self, table: Table) -> None:
        """Look at all such moments."""
        for owner, name in _MOMENTS:
            table.replace(owner, name, self._look_before)

    def trainer_ended(self) -> None:
        """Note that the training of a trainer is over: what has watched it is garbage now, and may
        hold the trainer for as long as nothing looks for such.
        """
        self._leaves_circles = True

    def _look_before(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.look()
        return original(*args, **kwargs)

    def look(self) -> None:
        """Let go of what the script holds no more. No device work of its own."""
        if torch.compiler.is_compiling():
            return
        loops = self._loops()
        if loops is not None and self._clock() >= self._not_before:
            self._look_at(loops)
        leaves_circles, self._leaves_circles = self._leaves_circles, False
        if leaves_circles:
            gc.collect()

    def _look_at(self, loops: Loops) -> None:
        trained, began = loops.trained(), self._clock()
        if not trained:
            return
        if is_held_elsewhere(trained, loops):
            now = self._clock()
            self._not_before = now + (now - began) / _SHARE
        else:
            loops.let_go()
            self._leaves_circles = True
