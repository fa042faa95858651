"""Blocks in the language that is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from nanstop.language.choice import LANGUAGES, language
from nanstop.language.translate import translated
from nanstop.report.text.blocks.block import Block
from nanstop.report.text.wrapping import columns, padded


def spoken(blocks: Iterable[Block], to: str | None = None) -> list[Block]:
    """Return the blocks in a language, that which is asked for by default. Code and names stay."""
    to = to or language()
    if to == LANGUAGES[0]:
        return list(blocks)
    return [
        block
        for kind, alike in groupby(blocks, lambda block: block.kind)
        for block in (_rows(alike, to) if kind == "tensor" else (_said(one, to) for one in alike))
    ]


def _said(block: Block, to: str) -> Block:
    """Return one block: of a place only words that are no name and no line of a file, of code
    nothing.
    """
    is_name = block.kind == "where" and " " not in block.cells[0]
    num = {"code": 0, "where": 0 if is_name else 1}.get(block.kind, len(block.cells))
    cells = (*(translated(cell, to) for cell in block.cells[:num]), *block.cells[num:])
    word = block.lead.rstrip(": ")
    lead = block.lead.replace(word, translated(word, to), 1) if word.islower() else block.lead
    return replace(block, lead=lead, cells=cells)


def _rows(rows: Iterable[Block], to: str) -> Iterator[Block]:
    """Yield facts of tensors, their columns below each other."""
    blocks = list(rows)
    table = [[translated(cell.rstrip(), to) for cell in block.cells] for block in blocks]
    num = max(map(len, table))
    widths = [
        max((columns(row[place]) for row in table if len(row) > place + 1), default=0)
        for place in range(num)
    ]
    for block, row in zip(blocks, table, strict=True):
        cells = [padded(cell, width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield replace(block, cells=(*cells, row[-1]))
