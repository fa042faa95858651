"""What the code of a trainer of the script's own remembers outside of it: a list that its class
holds, a number that a file counts in, an object that a loss asks.

Its attributes are noted with the trainer. The rest is noted before each micro-batch as well, for a
loss that reads what earlier steps have left has another value without it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn

from nanstop.own_code import is_class_of_library
from nanstop.replay import state_diff
from nanstop.replay.script_objects import remembered


class Remembered:
    """What a trainer's own code may change beside its attributes, found once; nothing where the
    trainer has no code of the script's.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._table: MutableMapping[str, Any] | None = None
        self._noted = state_diff.NOTHING

    def note(self, root: nn.Module) -> state_diff.Notes:
        """Return what is remembered now."""
        if self._table is None:
            own = _has_own_code(self._trainer)
            self._table = remembered([*root.modules(), self._trainer]) if own else {}
        if not self._table:
            return state_diff.NOTHING
        self._noted = state_diff.note(self._table, self._noted)
        return self._noted

    def restore(self, before: state_diff.Notes) -> None:
        """Have what was remembered when a note was taken; whoever asks puts back what is now."""
        if self._table:
            names = state_diff.changed(before, state_diff.note(self._table, before))
            state_diff.restore(self._table, before, names)


def _has_own_code(trainer: Any) -> bool:
    given = getattr(trainer, "compute_loss_func", None)
    return given is not None or not is_class_of_library(type(trainer))
