"""What ``docs/ranks.md`` says of tests: each that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_test_that_the_page_names_is_there():
    page = (ROOT / "docs" / "ranks.md").read_text()
    section = page[page.index("## What is shown of") :].partition("\n## ")[0]
    code = "".join(f.read_text() for f in (ROOT / "tests/hosts/sharded").glob("test_*.py"))
    named = [n for n in re.findall(r"`([a-z]\w*_\w+)`", section) if not n.startswith("test_")]
    assert len(named) > 20
    assert [name for name in named if f"def test_{name}(" not in code] == []
