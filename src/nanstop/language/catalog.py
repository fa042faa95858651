"""The sentences of a language, by the English ones: ``language/zh/*.json``.

A sentence is kept with ``{}`` in the place of each value, as the source has it in an f-string. In
its translation ``{}`` takes the values in the same order, ``{1}`` takes the second one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import combinations_with_replacement, islice, pairwise, product

EDGES = " \t,;:."
"""What parts one sentence from the next, and belongs to neither."""
_PAIRS = {"(": ")", "[": "]"}
_PLACE = re.compile(r"\{(\d*)\}")
_WORD = re.compile(r"[A-Za-z]{2,}")
_QUOTED = r"([^`]*?)"
_OPEN = r"((?:[^`]|`[^`]*`)%s?)"
_BETWEEN = re.compile(r"`[^`]*`|(?<![,;: ])(?=[ ,;:(\[])")
"""Where one value may end and the next begin, with nothing between them: not in a quotation."""
MAX_WAYS = 300


def core(text: str) -> str:
    """Return a text without what stands around it: the joints to others, the brackets that it is
    in, and one whose partner is not in it.
    """
    text = text.strip(EDGES)
    while True:
        first, last = unpaired(text)
        is_whole = text[:1] in _PAIRS and partner(text) == len(text) - 1 > 0
        begin = int(bool(text) and (is_whole or first == 0))
        end = len(text) - int(bool(text) and (is_whole or last == len(text) - 1))
        if begin == 0 and end == len(text):
            return text
        text = text[begin : max(begin, end)].strip(EDGES)


def partner(text: str) -> int:
    """Return where the bracket that a text begins with is closed, -1 where it is not."""
    depth = 0
    for place, one in enumerate(text):
        depth += (one in _PAIRS) - (one in _PAIRS.values())
        if not depth:
            return place
    return -1


def unpaired(text: str) -> tuple[int, int]:
    """Return where the first bracket stands that is never closed, and the last that was never
    opened; -1 for none. What is quoted does not count.
    """
    opened, closed, is_quoted = list[int](), -1, False
    for place, one in enumerate(text):
        is_quoted ^= one == "`"
        if is_quoted:
            continue
        if one in _PAIRS:
            opened.append(place)
        elif one in _PAIRS.values():
            if opened:
                opened.pop()
            else:
                closed = place
    return (opened[0] if opened else -1), closed


@dataclass(frozen=True)
class Sentence:
    """An English sentence and its translation."""

    english: str
    other: str

    @cached_property
    def literal(self) -> str:
        """The longest part that is no value."""
        return max(self.english.split("{}"), key=len)

    @cached_property
    def size(self) -> int:
        """How much of it is no value."""
        return len(self.english.replace("{}", ""))

    @cached_property
    def _parts(self) -> list[str]:
        """What stands around the places; a space alone between two says nothing."""
        return re.sub(r"\{\} (?=\{\})", "{}", self.english).split("{}")

    @cached_property
    def _apart(self) -> tuple[bool, ...]:
        """Whether a space alone stands before each place, and so is no part of its value."""
        return tuple(part == " " for part in self.english.split("{}")[:-1])

    @cached_property
    def is_joint(self) -> bool:
        """Whether it is hardly a sentence: ``{} of {}`` is found in text of any kind."""
        own = self.english.replace("{}", "")
        return len(_WORD.findall(own)) < 2 and ":" not in own

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Places with nothing between them are one group: where one ends no pattern knows."""
        parts = self._parts
        pattern, ticks = re.escape(parts[0]), parts[0].count("`")
        for place, part in enumerate(parts[1:], 1):
            ticks += part.count("`")
            if place == 1 or parts[place - 1]:
                is_quoted = (ticks - part.count("`")) % 2
                is_tail = parts[place - 1][-1:].strip(" ([") != ""  # "step{}": may be nothing
                pattern += _QUOTED if is_quoted else _OPEN % ("*" if is_tail else "+")
            pattern += re.escape(part)
        return re.compile(pattern, re.DOTALL)

    @cached_property
    def _runs(self) -> tuple[int, ...]:
        """How many places each group of the pattern is."""
        runs = list[int]()
        for part in self._parts[:-1]:
            if runs and not part:
                runs[-1] += 1
            else:
                runs.append(1)
        return tuple(runs)

    def values(self, text: str) -> Iterator[tuple[str, ...]]:
        """Yield what can stand in the places of ``text``; nothing where it is another sentence."""
        found = self._pattern.fullmatch(text) if self.literal in text else None
        if found is not None and all(max(unpaired(one)) < 0 for one in found.groups()):
            ways = (split(one, run) for one, run in zip(found.groups(), self._runs, strict=True))
            for way in islice(product(*ways), MAX_WAYS):
                values = (value for group in way for value in group)
                yield tuple(
                    value.removeprefix(" ") if apart else value
                    for value, apart in zip(values, self._apart, strict=True)
                )

    @cached_property
    def quoted(self) -> tuple[bool, ...]:
        """Whether each place stands between backticks: a name or code, and not to be translated."""
        ticks, found = 0, list[bool]()
        for part in self.english.split("{}")[:-1]:
            ticks += part.count("`")
            found.append(bool(ticks % 2))
        return tuple(found)

    def filled(self, values: tuple[str, ...]) -> str:
        """Return the translation with these values."""
        numbers = iter(range(len(values)))

        def value(place: re.Match[str]) -> str:
            return values[int(place[1]) if place[1] else next(numbers)]

        return _PLACE.sub(value, self.other)


def split(text: str, num: int) -> Iterator[tuple[str, ...]]:
    """Yield the ways to part a text into ``num`` values, all but the first may be empty."""
    if num == 1:
        yield (text,)
        return
    ends = [one.start() for one in _BETWEEN.finditer(text) if one.end() == one.start() > 0]
    for chosen in combinations_with_replacement([len(text), *reversed(ends)], num - 1):
        cuts = [0, *sorted(chosen), len(text)]
        yield tuple(text[first:last] for first, last in pairwise(cuts))


@cache
def sentences(language: str) -> tuple[Sentence, ...]:
    """Return the sentences that are translated, those with most words of their own first."""
    found: dict[str, str] = {}
    for file in sorted(
        files("nanstop.language").joinpath(language).iterdir(), key=lambda one: one.name
    ):
        found |= entries(file.read_text(encoding="utf-8"))
    both = dict(found)
    for english, other in found.items():  # "{} rows" is what two of "{} row" are
        if re.fullmatch(r"\{\} [\w -]+[^s\W]", english):
            both.setdefault(f"{english}{'es' if english.endswith('ch') else 's'}", other)
    return tuple(sorted((Sentence(*one) for one in both.items()), key=lambda one: -one.size))


@cache
def kept(language: str) -> frozenset[str]:
    """Return the English words that a language has taken over as they are."""
    return frozenset(one.english for one in sentences(language) if one.english == one.other)


def entries(text: str) -> Mapping[str, str]:
    """Return the entries of one file."""
    return json.loads(text)
