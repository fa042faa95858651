"""Write what the documentation takes from the code: a page a finding, their index, and the schema of reports.

Run from the repository root: ``python tools/generate_docs.py``. A test compares the files with the code.
"""

from __future__ import annotations

import json
from pathlib import Path

from nanstop.report.codec import schema
from nanstop.rules.base import Rule
from nanstop.rules.catalogue import CATALOGUE

DOCS = Path(__file__).resolve().parents[1] / "docs"


def page(rule: Rule) -> str:
    """Return the Markdown file of a finding: its title, when it is looked for, and its page."""
    when = ", ".join(rule.when)
    return f"# {rule.code} {rule.slug}\n\n*Looked for: {when}.*\n\n{rule.page.strip()}\n"


def index() -> str:
    """Return the Markdown list of all findings."""
    rows = [f"| [{rule.code}]({rule.code}.md) | {rule.slug} | {rule.title} |" for rule in CATALOGUE]
    head = "# Findings\n\n`nanstop explain CODE` prints the same pages.\n\n| code | name | says |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def files() -> dict[Path, str]:
    """Return every generated file, relative to ``docs/``, with its text."""
    pages = {Path("rules") / f"{rule.code}.md": page(rule) for rule in CATALOGUE}
    text = json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
    return {**pages, Path("rules/README.md"): index(), Path("report.schema.json"): text}


def main() -> None:
    """Write the files."""
    for path, text in files().items():
        target = DOCS / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
