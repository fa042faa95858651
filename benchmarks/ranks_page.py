"""The page of many ranks, ``docs/ranks.md``: a section for each benchmark that has been run."""

from __future__ import annotations

import json
from pathlib import Path

import disturbed_table
import ranks_overhead_table
import ranks_table

PAGE = Path(__file__).parents[1] / "docs" / "ranks.md"
_PARTS = (
    (ranks_table.RESULTS, ranks_table.section),
    (ranks_overhead_table.RESULTS, ranks_overhead_table.section),
    (disturbed_table.RESULTS, disturbed_table.section),
)


TESTS = Path(__file__).with_name("ranks_tests.md")
"""What tests show of each way to train, written by hand."""


def write_page() -> None:
    """Write the page anew from what is kept of the benchmarks."""
    parts = [section(json.loads(file.read_text())) for file, section in _PARTS if file.exists()]
    parts = [TESTS.read_text(), *parts]
    PAGE.write_text("# Many ranks\n\n" + "\n".join(parts))
