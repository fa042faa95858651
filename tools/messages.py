"""The sentences that nanstop says, read off its source, and which of them have no Chinese yet.

``python tools/messages.py`` prints those that ``src/nanstop/language/zh`` lacks, each with the file
that says it, and the entries that no file says any more. ``--pages`` writes anew what is taken from
the Chinese pages: the first cure of each.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nanstop.language.catalog import core
from nanstop.report.html.labels import CHINESE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SRC = Path(__file__).parent.parent / "src" / "nanstop"
CATALOG = SRC / "language" / "zh"
FROM_PAGES = CATALOG / "cures_of_pages.json"
WORDS = CATALOG / "words.json"
"""Single words, which are values of sentences: no source is searched for them."""

SAID_IN = (
    *("errors.py", "api.py", "watches.py", "records/remedies.py", "records/facts.py"),
    *("diagnose/diagnose.py", "diagnose/evidence", "diagnose/findings"),
    *("report/announce.py", "report/text", "decide"),
    *("localize", "prove", "remedies", "measure", "rewrite/words.py", "session", "hosts", "store"),
    *("replay/copies/rewind.py", "replay/collectives.py", "process/oom.py", "process/crash", "cli"),
    *("process/children/command.py", "process/children/run_bounded.py"),
    *("commands/run", "commands/check", "commands/fix", "commands/replay", "commands/prove"),
    *("commands/doctor", "commands/plan", "commands/lr_range", "commands/bisect"),
    *("process/inject/dry_run.py", "process/inject/progress.py", "store/plan_file.py"),
    *("report/html/exponents.py", "report/html/incident.py", "report/html/timeline.py"),
    *("report/html/sheet.py", "report/html/headroom.py", "report/html/page.py"),
    *("commands/view/parts.py", "commands/view/followed.py"),
)
"""Where the text of findings, reports, closing lines and errors is made."""
NOT_SAID = ("report/text/issue.py", "store/beside_weights.py", "hosts/model/checkpoint.py")
"""Text for others: for issue trackers, model cards, and commands that speak English."""
NAMES = re.compile(
    r"bold \w+|\^.*|.*\\.*|device \w+|<!-- .* -->|state gradient|dict\[.*|\w+.* \| None|"
    r"(?:nanstop|`nanstop|git|pip|--\w+) [^ ]*|nanstop/incident \{\}|nanstop env --json|"
    r"nanstop\.plan\(.*\)|nanstop explain.*|nanstop run .*|nanstop fix .*|git apply -R .*|"
    r"pip install .*|--\w+ \{\}.*|"
    r".*: remedies\[\{\}\]|Traceback .*|does not require grad.*"
)
"""What only looks like a sentence: names, patterns, commands to type, messages of torch."""
_SILENT = {"compile", "cast", "TypeVar", "Option", "Argument", "Typer", "debug", "info", "warning"}
_SILENT |= {"error", "exception"}
"""Calls whose strings nobody reads in a report: patterns, log records, the help of options."""
_OTHERS_ERRORS = re.compile(r"(?!Nanstop)\w*(?:Error|Exception)$")
_WORD = re.compile(r"[A-Za-z][a-z']+")


@cache
def said() -> dict[str, str]:
    """Return the sentences, ``{}`` in the place of each value, with the file that says each."""
    found: dict[str, str] = {}
    for file in _files():
        text = file.read_text(encoding="utf-8")
        spoken = _told(tomllib.loads(text)) if file.suffix == ".toml" else _spoken(ast.parse(text))
        for sentence in (core(line) for one in spoken for line in one.splitlines()):
            if _is_sentence(sentence):
                found.setdefault(sentence, str(file.relative_to(SRC)))
    return found


def missing() -> dict[str, str]:
    """Return the sentences that have no translation yet, with their files."""
    known = catalog().keys() | CHINESE.keys()
    return {text: file for text, file in said().items() if text not in known}


def catalog() -> dict[str, str]:
    """Return the translations that are written by hand."""
    found: dict[str, str] = {}
    for file in sorted(CATALOG.glob("*.json")):
        if file not in (FROM_PAGES, WORDS):
            found |= json.loads(file.read_text(encoding="utf-8"))
    return found


def cures_of_pages() -> dict[str, str]:
    """Return the first cure of each English page with that of the Chinese one."""
    from nanstop.diagnose.catalogue import CATALOGUE
    from nanstop.diagnose.pages import page

    found: dict[str, str] = {}
    for rule in CATALOGUE:
        _, _, fixes = page(rule, "zh").text.partition("\n1. ")
        cure = fixes.partition("\n")[0].partition("代价：")[0].strip()
        if rule.usual_cure and cure:
            found[core(rule.usual_cure)] = cure.rstrip("。")
    return found


def _files() -> Iterator[Path]:
    for name in SAID_IN:
        place = SRC / name
        for file in sorted(place.rglob("*.*")) if place.is_dir() else [place]:
            if file.suffix in (".py", ".toml") and str(file.relative_to(SRC)) not in NOT_SAID:
                yield file


def _is_sentence(text: str) -> bool:
    words = _WORD.findall(re.sub(r"`[^`]*`", "", text))
    return (
        " " in text
        and bool(words)
        and (len(words) > 1 or "{}" in text)
        and not NAMES.fullmatch(text)
    )


def _told(rows: object) -> Iterator[str]:
    """Yield what a table of known combinations says."""
    if isinstance(rows, dict):
        yield from (str(rows[key]) for key in ("title", "cause", "cure") if key in rows)
        yield from (text for value in rows.values() for text in _told(value))
    elif isinstance(rows, list):
        yield from (text for value in rows for text in _told(value))


def _spoken(tree: ast.Module) -> Iterator[str]:
    """Yield the strings of a file that can reach a report, with ``{}`` for the values of each."""
    silent = _silent(tree)
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if id(node) in silent:
            continue
        if isinstance(node, ast.JoinedStr):
            values = (
                part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
            yield "".join(map(str, values))
            stack += [part for part in node.values if isinstance(part, ast.FormattedValue)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\{\w+\}", "{}", node.value)
        elif isinstance(node, ast.Call) and _name(node) == "counted" and _is_text(node.args[-1]):
            yield f"{{}} {node.args[-1].value}"
            stack.append(node.args[0])
        else:
            stack += reversed(list(ast.iter_child_nodes(node)))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _name(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _silent(tree: ast.Module) -> set[int]:
    """Return the nodes whose strings are no text: docstrings, annotations, patterns, log records,
    errors for programmers.
    """
    silent: set[ast.AST | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            silent.add(node.value)
        elif isinstance(node, ast.Call) and (
            _name(node) in _SILENT or _OTHERS_ERRORS.match(_name(node))
        ):
            silent.add(node)
        elif isinstance(node, ast.AnnAssign | ast.arg):
            silent.add(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            silent.add(node.returns)
    return {id(node) for node in silent if node is not None}


def main(arguments: list[str] | None = None) -> int:
    """Print what is missing and what is left over, or write what the pages give; return 1 where
    anything is missing.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pages", action="store_true")
    if parser.parse_args(arguments).pages:
        write(FROM_PAGES, cures_of_pages())
        return 0
    spoken, known = said(), catalog()
    lacking = missing()
    for text, file in lacking.items():
        sys.stdout.write(f"{file}: {json.dumps(text, ensure_ascii=False)}\n")
    for text in known.keys() - spoken.keys():
        sys.stdout.write(f"said nowhere: {json.dumps(text, ensure_ascii=False)}\n")
    return int(bool(lacking))


def write(file: Path, entries: dict[str, str]) -> None:
    """Write a file of the catalog."""
    file.write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
