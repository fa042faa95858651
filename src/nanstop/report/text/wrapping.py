"""Blocks as lines of a terminal: where a line is broken, and how wide its letters are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from unicodedata import east_asian_width

from nanstop.report.text.blocks.block import Block

_COUNTED = r"(?:(?<![^\s(])\d+ [a-z][a-z-]*|[a-z][a-z-]* \d+(?=[,;:)]|$))"
_LETTER = r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]"
_OTHERS = r"[^\s\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]"
_MARKS = "[，。；：、）！？]*"
_PIECE = (
    rf"{_COUNTED}{_OTHERS}*{_MARKS}|\[?`[^`\n]{{1,32}}`{_OTHERS}*{_MARKS}"
    rf"|{_LETTER}{_MARKS}|[^\S\n]+|{_OTHERS}+{_MARKS}"
)
"""What is not broken: a number and what it counts or numbers, short code between backticks, a word
with the mark behind it, one Chinese character with it, spaces.
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
    line = _whole(block)
    if width is None or columns(line) <= width or block.kind == "code":  # code is not to be cut
        yield line.rstrip()
        return
    indent = " " * max(columns(block.lead), 4)
    if block.kind == "tensor" and len(block.cells) > 1:  # what follows stands below the second
        indent += " " * (columns(block.cells[0]) + len(block.gap))
    line, joint = block.lead, ""
    for cell in block.cells:
        if joint and columns(line) + len(joint) + columns(cell.rstrip()) > width:
            yield line.rstrip()
            line, joint = indent, ""
        *whole, line = _folded(f"{line}{joint}{cell}", width, indent)
        yield from whole
        joint = block.gap
    yield line.rstrip()


def narrowed(blocks: Sequence[Block], width: int | None) -> Iterator[Block]:
    """Yield blocks whose tables of tensors are set closer where a row is wider than a terminal, and
    beyond the first column as they come where that is not enough.
    """
    for is_table, group in groupby(blocks, key=lambda block: block.kind == "tensor"):
        rows = list(group)
        if is_table and width is not None and _widest(rows) > width:
            rows = [replace(row, gap="  ") for row in rows]
            if _widest(rows) > width:
                rows = [replace(row, cells=_unpadded(row.cells)) for row in rows]
        yield from rows


def _unpadded(cells: tuple[str, ...]) -> tuple[str, ...]:
    return (*cells[:1], *(cell.rstrip() for cell in cells[1:] if cell.strip()))


def _widest(rows: Iterable[Block]) -> int:
    return max(columns(_whole(row).rstrip()) for row in rows)


def _whole(block: Block) -> str:
    return block.lead + block.gap.join(block.cells)


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
