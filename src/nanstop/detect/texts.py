"""The first texts that tokenizers of this process have made tokens of, and the lines that asked
for it: what a model is given can be compared with what its texts hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import CodeType

from nanstop.frozen import frozen

Line = tuple[CodeType, int] | None

MOST_TEXTS, MOST_TOKENS = 256, 2048
_LEAST = 3
"""Tokens in a row by which a text is known again."""
_AHEAD = 2
"""Tokens that a script may put before those of a tokenizer."""
_LOST, _LEAST_LOST = 0.1, 2
"""Share and number of a text's tokens from which it is cut short: without its last one it is what
predicts the others.
"""


@frozen
class Text:
    """Tokens as a tokenizer gave them, without padding, and how many it has cut off itself.
    ``line``: None where a library asked for them.
    """

    ids: tuple[int, ...]
    num_cut: int
    line: Line


@frozen
class Found:
    """The text of a row. ``num_lost``: of its ``num`` tokens, those that the row ends before."""

    text: Text
    num: int
    num_lost: int

    @property
    def is_short(self) -> bool:
        return self.num_lost >= _LEAST_LOST and self.num_lost > _LOST * self.num

    @property
    def is_cut_later(self) -> bool:
        """Whether the row ends before what the tokenizer gave."""
        return self.is_short and not self.text.num_cut


class Texts:
    """Keeps the first ``MOST_TEXTS``."""

    def __init__(self) -> None:
        self._all: list[Text] = []

    @property
    def is_full(self) -> bool:
        return len(self._all) >= MOST_TEXTS

    def add(self, rows: Iterable[tuple[Sequence[int], int]], line: Line) -> None:
        """Add texts, each with the number of its tokens that were cut off."""
        for ids, num_cut in rows:
            if not self.is_full and _LEAST <= len(ids) <= MOST_TOKENS:
                self._all.append(Text(tuple(ids), num_cut, line))

    def of(self, row: Sequence[int]) -> Found | None:
        """Return the text that a row, without padding, begins with; None where no known text is."""
        for text in self._all:
            for ahead in range(_AHEAD + 1):
                num = min(len(text.ids), len(row) - ahead)
                if num < _LEAST or tuple(row[ahead : ahead + num]) != text.ids[:num]:
                    continue
                whole, given = len(text.ids) + text.num_cut, len(row) - ahead
                ends = given <= len(text.ids) + 1  # the token of an end may follow
                return Found(text, whole, max(0, whole - given) if ends else 0)
        return None

    def forget(self) -> None:
        """Let go of all of them."""
        self._all.clear()


TEXTS = Texts()
"""Of this process: texts are made tokens of before anybody knows who will train on them."""
