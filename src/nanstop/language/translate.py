"""Text in another language, at the edge where people read it.

Records hold English sentences, so that they are the same on every machine and can be read by every
version. A sentence is found again by what of it is no value (``catalog``); its values, which may
be sentences themselves, are translated in turn. Text of which nothing is known stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from nanstop.language.catalog import core, kept, sentences, unpaired
from nanstop.language.choice import LANGUAGES, language

_WIDE = dict(zip(",;:.()", "，；：。（）", strict=True))
_JOINTS = ("\n", ". ", "? ", "; ", ": ", "  ", ", ", " and ", " or ")
_WITHIN = (", ", "; ", ": ", "  ", " and ")
_CLAUSES = (*_JOINTS[:6], ", ")
_JOINED = {". ": "。", "; ": "；", ": ": "：", ", ": "，", " and ": "和", " or ": "或", "? ": ""}
_APART = re.compile(
    r"`[^`]*`|\"[^\"]*\"|'[^']*'|\S+\.py:\d+: (?:[\w.\[\], ]+ [-+*/]?= |return )(?:(?!  ).)+"
)
"""What is quoted, and a line of code behind its place."""
_WORD = re.compile(
    r"(?<![A-Za-z0-9_.\-/=])(?<!\w\()[A-Za-z][a-z]+(?:-[a-z]+)*(?![A-Za-z0-9_./(=\-\[])"
)
_CODE = re.compile(r" [=<>+*/-]+ |\w[(\[]|[)\]]\.")
"""What a sentence has in quotations only, where it is not a sentence for itself."""
_IN_BRACKETS = re.compile(r"(.+?) ([(\[])(.+)([)\]])", re.DOTALL)
_NUMBERS = re.compile(r"\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)+")
"""Some numbers, as a value."""
_MANY = re.compile(rf"(?<=s ){_NUMBERS.pattern}")
"""Those behind the word for what they number: its commas part nothing else."""
_HAN = "\u3000-\u9fff\uff00-\uffef"
_LETTER = "\u4e00-\u9fff"
_SQUEEZED = rf"(?<=[{_HAN}]) (?=[{_HAN}])|(?<=[，。；：、（）]) (?=\S)|(?<=\S) (?=[，。；：、（）])"
_SPACED = rf"(?<=[{_LETTER}])(?=[A-Za-z0-9`])|(?<=[A-Za-z0-9`%])(?=[{_LETTER}])"


def translated(text: str, to: str | None = None) -> str:
    """Return an English text in a language, that which is asked for by default."""
    to = to or language()
    if to == LANGUAGES[0]:
        return text
    return "\n".join(
        _spaced(_best(line, to)) if line.strip() else line for line in text.split("\n")
    )


def untranslated(text: str, to: str = "zh") -> list[str]:
    """Return the English words of a text, without names, code, and what the other language has
    taken over.
    """
    words = _WORD.findall(_APART.sub("", text))
    return [word for word in words if word not in kept(to)]


def _spaced(text: str) -> str:
    """Return the text with a space between Chinese and other letters, and none beside its
    punctuation; what is quoted stays as it is.
    """
    indent = text[: len(text) - len(text.lstrip(" "))]
    body = re.sub(_SQUEEZED, "", text.lstrip(" "))
    return indent + re.sub(_SPACED, " ", body)


@lru_cache(maxsize=4096)
def _best(text: str, to: str) -> str:
    """Return the reading of a text that leaves the fewest English words, and least between its
    values' commas; the text itself where none leaves fewer than it has.
    """
    english = len(untranslated(text, to))
    if not english:
        return text
    inner = core(text)
    at = text.index(inner)
    best, least = inner, (english, 0)
    for reading, joints in _readings(inner, to):
        cost = (len(untranslated(reading, to)), joints)
        if cost < least and cost[0] < english:
            best, least = reading, cost
            if cost == (0, 0):
                break
    if best is inner:
        return text
    return f"{_wide(text[:at])}{best}{_wide(text[at + len(inner) :])}"


def _readings(text: str, to: str) -> Iterator[tuple[str, int]]:
    """Yield what a text may be, and how many joints are within the values of each."""
    yield from _as_sentences(text, to)
    yield from ((reading, 0) for reading in _as_parts(text, to))


def _as_sentences(text: str, to: str) -> Iterator[tuple[str, int]]:
    is_code = _looks_like_code(text)
    for sentence in sentences(to):
        for values in sentence.values(text):
            read = tuple(
                value if quoted else _numbered(value) or _best(value, to)
                for value, quoted in zip(values, sentence.quoted, strict=True)
            )
            if sentence.is_joint and (is_code or any(map(untranslated, read))):
                continue
            said = filter(untranslated, values)  # a list of names is no sentence
            plain = [_MANY.sub("0", core(value)) for value in said]
            joints = sum(value.count(one) for value in plain for one in _WITHIN)
            yield sentence.filled(read), joints


def _numbered(value: str) -> str:
    """Return some numbers with the comma of a list between them, "" for anything else."""
    if _NUMBERS.fullmatch(value) is None:
        return ""
    return re.sub(r", | and ", "、", value)


def _as_parts(text: str, to: str) -> Iterator[str]:
    """Yield the text parted at each kind of joint, wholly and in two, its parts translated for
    themselves: a sentence may have a joint of its own.
    """
    is_code = _looks_like_code(text)
    for joint in _JOINTS:
        parts = _parted(text, joint)
        if len(parts) > 1:
            yield from _read_apart(parts, joint, to, is_code=is_code)
            for at in range(1, len(parts)) if len(parts) > 2 else ():
                halves = [joint.join(parts[:at]), joint.join(parts[at:])]
                yield from _read_apart(halves, joint, to, is_code=is_code)
    beside = _IN_BRACKETS.fullmatch(text)
    if beside is not None:
        outer, left, inner, right = beside.groups()
        around = ("（", "）") if left == "(" else (f" {left}", right)
        yield f"{_best(outer, to)}{around[0]}{_best(inner, to)}{around[1]}"


def _read_apart(parts: list[str], joint: str, to: str, *, is_code: bool) -> Iterator[str]:
    read = [_best(part, to) for part in parts]
    if joint in _CLAUSES or not (is_code or any(map(untranslated, read))):
        yield _rejoined(parts, read, joint)


def _looks_like_code(text: str) -> bool:
    return _CODE.search(_APART.sub("", text)) is not None


def _parted(text: str, joint: str) -> list[str]:
    """Return the parts between the joints that no quotation and no bracket holds."""
    held = [one.span() for one in _APART.finditer(text)]
    parts, begin, at = list[str](), 0, text.find(joint)
    while at >= 0:
        is_free = not any(first <= at < last for first, last in held)
        if is_free and max(unpaired(text[begin:at])) < 0:
            parts.append(text[begin : at + joint.count("?")])  # which belongs to the question
            begin = at + len(joint)
        at = text.find(joint, at + len(joint))
    return [*parts, text[begin:]]


def _rejoined(parts: list[str], read: list[str], joint: str) -> str:
    """Return the parts with their joints, which stay as they are between what was not translated:
    it may be code.
    """
    said = read[0]
    for place in range(1, len(parts)):
        known = parts[place] != read[place] or parts[place - 1] != read[place - 1]
        plain = joint.removeprefix("?")
        said += (_JOINED.get(joint, plain) if known else plain) + read[place]
    return said


def _wide(edge: str) -> str:
    return re.sub(r"([,;:.()]) ?", lambda one: _WIDE[one[1]], edge)
