"""Wrap the docstrings and comments that are wider than a line may be: what `ruff format` leaves as
it is.

    python tools/wrap_docstrings.py [FILE ...]

rewrites the Python files of src, tests, tools and benchmarks by default. Only paragraphs with a
line that is too wide change; code blocks, tables, headings and lists keep their form.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "tools", "benchmarks")
WIDTH = 100
_ITEM = re.compile(r"^(\s*)(?:[-*]|\d+\.) +")
_LITERAL = re.compile(r"^(?:\||#|>>>|\s{4})")
_CLAUSE = re.compile(r"(?<!`)(?<!Cost)(?<!None)[.;:] (?=\S)")
_QUOTES = '"""'


def main(names: list[str]) -> int:
    """Rewrite the files and print those that changed."""
    files = [Path(name) for name in names] or sorted(
        file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")
    )
    for file in files:
        text = file.read_text(encoding="utf-8")
        wrapped = wrap(text)
        if wrapped != text:
            file.write_text(wrapped, encoding="utf-8")
            sys.stdout.write(f"{file}\n")
    return 0


def wrap(source: str) -> str:
    """Return Python source with no docstring and no comment of its own line wider than WIDTH."""
    lines = source.split("\n")
    for node in sorted(_docstrings(ast.parse(source)), key=lambda node: -node.lineno):
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        if any(len(line) > WIDTH for line in lines[start:end]):
            lines[start:end] = _docstring(lines[start:end], node.col_offset)
    return "\n".join(_comments(lines))


def _docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yield every string that stands for itself in triple quotes on lines of its own."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield node


def _docstring(lines: list[str], indent: int) -> list[str]:
    margin = " " * indent
    opening, quotes, first = lines[0][indent:].partition(_QUOTES)
    if not quotes or opening not in ("", "r") or not lines[-1].endswith(_QUOTES):
        return lines
    body = [first, *(line.removeprefix(margin) for line in lines[1:])]
    body[-1] = body[-1].removesuffix(_QUOTES)
    width = WIDTH - indent - (len(_QUOTES) if len(lines) == 1 else 0)
    found = list(_filled([" " * len(opening + _QUOTES) + body[0], *body[1:]], width))
    found[0] = opening + _QUOTES + found[0][len(opening + _QUOTES) :]
    if found[-1].strip():
        found.append("")
    found[-1] += _QUOTES
    return [(margin + line).rstrip() for line in found]


def _filled(lines: list[str], width: int) -> Iterator[str]:
    paragraph: list[str] = []
    literal = False
    for number, line in enumerate(lines):
        fence = line.startswith("```")
        literal ^= fence
        ends = not line.strip() or fence or literal or (number and _LITERAL.match(line))
        if paragraph and (ends or _ITEM.match(line)):
            yield from _fill(paragraph, width)
            paragraph = []
        if ends:
            yield line
        else:
            paragraph.append(line)
    yield from _fill(paragraph, width) if paragraph else ()


def _fill(paragraph: list[str], width: int) -> list[str]:
    """Return the paragraph wrapped, as it is where it fits; its indentation is kept."""
    if all(len(line) <= width for line in paragraph):
        return paragraph
    item = _ITEM.match(paragraph[0])
    first = _margin(paragraph[0])
    rest = _margin(paragraph[1]) if len(paragraph) > 1 else " " * len(item[0] if item else "")
    words = " ".join(line.strip() for line in paragraph)
    return _wrapped(words, width, first, rest)


def _margin(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _wrapped(words: str, width: int, first: str, rest: str) -> list[str]:
    """Return the words in lines; two lines part where a clause ends, if the second were short."""
    lines = textwrap.wrap(
        words,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if len(lines) == 2 and len(lines[1]) < width // 3:
        clauses = (found.end() for found in _CLAUSE.finditer(lines[0]) if found.end() > width // 3)
        ends = [end for end in clauses if lines[0].count("`", 0, end) % 2 == 0]
        if ends:
            moved = f"{rest}{lines[0][ends[-1] :]} {lines[1].removeprefix(rest)}"
            lines = [lines[0][: ends[-1]].rstrip(), moved]
    return lines


def _comments(lines: list[str]) -> Iterator[str]:
    """Yield the lines; a block of comments with one that is too wide is filled anew."""
    for is_comment, found in groupby(lines, lambda line: line.lstrip().startswith("# ")):
        block = list(found)
        yield from _comment(block) if is_comment else block


def _comment(block: list[str]) -> list[str]:
    if all(len(line) <= WIDTH for line in block):
        return block
    margin = block[0].partition("#")[0] + "# "
    words = " ".join(line.strip().removeprefix("# ") for line in block)
    return _wrapped(words, WIDTH, margin, margin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
