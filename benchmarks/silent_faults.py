"""The faults of ``silent/``: which there are, in which spellings, and which lines are to blame."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from truth import Truth

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "silent"
MARK = "# fault"


@dataclass(frozen=True)
class Spelling:
    """One way to write a fault. ``lines``: of the script, those of each statement to blame."""

    fault: str
    name: str
    truth: Truth
    lines: frozenset[int]

    @property
    def script(self) -> Path:
        return FOLDER / f"{self.fault}.py"


def load_spellings(names: tuple[str, ...] = ()) -> list[Spelling]:
    """Return all spellings of the faults of these names, by default of all."""
    truths = tomllib.loads((FOLDER / "truths.toml").read_text())
    return [
        Spelling(fault, name, _truth(f"{fault}.{name}", values), lines)
        for fault, values in truths.items()
        if not names or fault in names
        for name, lines in _spellings((FOLDER / f"{fault}.py").read_text())
    ]


def _truth(name: str, values: dict[str, object]) -> Truth:
    known = {"name": name, "class": "silent", "kind": "silent", "cure": "code", "folder": FOLDER}
    return Truth.model_validate({**known, **values})


def _spellings(source: str) -> Iterator[tuple[str, frozenset[int]]]:
    """Yield the spellings that a script hands to ``spell``, each with the lines that are marked in
    what it uses of the script.
    """
    tree = ast.parse(source)
    marked = [place for place, line in enumerate(source.splitlines(), 1) if MARK in line]
    own = {one.name: one for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
    call = tree.body[-1]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    for given in call.value.keywords:
        assert isinstance(given.value, ast.Name)
        used = _used(given.value.id, own)
        lines = (_statement(own[name], place) for name in used for place in marked)
        yield str(given.arg), frozenset(line for found in lines for line in found)


def _used(name: str, own: dict[str, ast.FunctionDef | ast.ClassDef]) -> set[str]:
    """Return what of the script's own a function uses, itself included."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in own and one not in found:
            found.add(one)
            waiting += [n.id for n in ast.walk(own[one]) if isinstance(n, ast.Name)]
    return found


def _statement(where: ast.AST, place: int) -> range:
    """Return the lines of the statement at this line: of a compound one, this line alone."""
    spans = [
        range(one.lineno, (one.end_lineno or one.lineno) + 1)
        for one in ast.walk(where)
        if isinstance(one, ast.stmt)
    ]
    around = [span for span in spans if place in span]
    if not around:
        return range(0)
    inner = min(around, key=len)
    compound = any(span != inner and inner.start <= span.start < inner.stop for span in spans)
    return range(place, place + 1) if compound else inner
