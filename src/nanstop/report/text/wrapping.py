"""Blocks as lines of a terminal: where a line is broken, and how wide its letters are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from unicodedata import east_asian_width

from nanstop.report.text.blocks import Block

_LETTER = r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]"
_OTHERS = r"[^\s\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]"
_MARKS = "[，。；：、）！？]*"
_PIECE = rf"\[?`[^`\n]{{1,32}}`{_OTHERS}*{_MARKS}|{_LETTER}{_MARKS}|[^\S\n]+|{_OTHERS}+{_MARKS}"
"""What is not broken: short code between backticks, a word with the mark behind it, one Chinese
character with it, spaces.
"""
_COLUMN = re.compile(r"(?<=\S) {2,}(?=\S)")
"""What stands between two columns of a table."""


def columns(text: str) -> int:
    """Return how many columns a text takes: two for each Chinese character."""
    return sum(1 + (east_asian_width(letter) in "WF") for letter in text)


def padded(text: str, width: int) -> str:
    """Return the text with spaces behind it, up to a number of columns."""
    return text + " " * (width - columns(text))


def wrapped(block: Block, width: int | None) -> Iterable[str]:
    """Yield the block's lines; cells that do not fit beside the others begin a new one."""
    line = block.lead + block.gap.join(block.cells)
    if width is None or columns(line) <= width or block.kind == "code":  # code is not to be cut
        yield line.rstrip()
        return
    indent = " " * (max(columns(block.lead), 4) + 4 * (block.kind == "tensor"))
    line, joint = block.lead, ""
    for cell in block.cells:
        if joint and columns(line) + len(joint) + columns(cell.rstrip()) > width:
            yield line.rstrip()
            line, joint = indent, ""
        *whole, line = _folded(f"{line}{joint}{cell}", width, indent)
        yield from whole
        joint = block.gap
    yield line.rstrip()


def in_columns(line: str, width: int) -> list[str]:
    """Return a line in pieces of at most ``width``, the later ones below its last column, if that
    leaves them half of the width.
    """
    starts = [columns(line[: found.end()]) for found in _COLUMN.finditer(line)]
    indent = max((start for start in starts if 2 * start <= width), default=0)
    own = len(line) - len(line.lstrip())
    return [one.rstrip() for one in _folded(line, width, " " * (indent or own + 2))]


def _folded(line: str, width: int, indent: str) -> list[str]:
    """Return the line in pieces of at most ``width`` where words allow it; no word is cut."""
    if columns(line.rstrip()) <= width:
        return [line]
    lines = [""]
    for piece in re.findall(_PIECE, line):
        is_begun = bool(lines[-1].strip())
        if is_begun and piece.strip() and columns(lines[-1] + piece) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append(indent)
        if piece.strip() or len(lines) == 1 or lines[-1].strip():
            lines[-1] += piece
    return lines
