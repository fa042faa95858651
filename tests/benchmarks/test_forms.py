"""Failing lines and what is typed for them: each script has a thread, a line, a twin."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "cases"), str(BENCHMARKS)]

from forms import MARK, SCRIPTS  # noqa: E402
from forms_table import page  # noqa: E402

ALL = {path.stem: path.read_text() for path in SCRIPTS.glob("*.py")}


def test_there_are_40_scripts_each_with_a_thread_a_line_and_a_twin():
    assert len(ALL) >= 40
    for name, text in ALL.items():
        said = ast.get_docstring(ast.parse(text)) or ""
        assert "https://github.com/" in said, name
        assert any(line.endswith(MARK) for line in text.splitlines()), name
        assert '"bad" in sys.argv' in text, name
        assert "nanstop" not in text, name


def kept(fixed, *, verdict="proven", status="applied", source="x.py:9"):
    row = {"code": "NS207", "source": source, "step": 20, "verdict": verdict, "action": "redo"}
    return {
        "link": "https://github.com/owner/name/issues/7",
        "lines": [9],
        "twin": {"final_loss": 1.0, "finite": True},
        "bad": {"final_loss": float("nan"), "finite": False},
        "watched": {"incidents": [row | {"remedy": "compute `x.py:9` in log space"}]},
        "fix": {"status": status},
        "fixed": {"final_loss": fixed, "finite": math.isfinite(fixed)},
    }


def test_fixed_is_what_was_applied_and_ends_near_its_twin():
    rows = {"near": kept(1.01), "far": kept(1.03), "bad": kept(float("nan")), "not": kept(1.0)}
    rows["not"]["fix"]["status"] = "not known"
    text, figures = page(rows)
    assert "| fixed by the diff that `nanstop fix --apply` writes | 1/4 (25 %) |" in figures
    assert "| `near` | [owner/name#7](https://github.com/owner/name/issues/7) | yes |" in text
    assert "| not finite |" in text


def test_a_proposal_that_was_not_proven_counts_as_no_proof():
    figures = page({"one": kept(1.0, verdict="plausible"), "two": kept(1.0, source="x.py:8")})[1]
    assert "is proposed | 2/2 (100 %) |" in figures
    assert "| proven | 1/2 (50 %) |" in figures
    assert "| the failing line is named | 1/2 (50 %) |" in figures
