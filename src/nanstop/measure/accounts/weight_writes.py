"""Which lines of a script write to weights outside of any update of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nanstop.records import SourceLine

MOST_LINES = 3
"""Of one weight, that are known."""


class WeightWrites:
    """The lines that were seen to write to each weight, the first that were.

    ``are_any``: whether a sample of the weights has shown that something writes to them.
    """

    def __init__(self) -> None:
        self.are_any = False
        self._lines: Any = WeakIdKeyDictionary()

    @property
    def wants_lines(self) -> bool:
        """Whether something writes to weights and no line is known that does."""
        return self.are_any and not self._lines

    def note(self, weights: Sequence[Tensor], source: SourceLine) -> None:
        """Note a line that has just written to some weights."""
        for weight in weights:
            known = self._lines.setdefault(weight, [])
            if source not in known and len(known) < MOST_LINES:
                known.append(source)

    def to_each(self, weights: Sequence[Tensor]) -> tuple[SourceLine, ...]:
        """Return the lines that write to some weights, in order and each once; () where no line is
        known of one of these.
        """
        lines = [self._lines.get(weight, ()) for weight in weights]
        return tuple(dict.fromkeys(one for each in lines for one in each)) if all(lines) else ()
