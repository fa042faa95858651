"""Faults that are finite: every spelling has a truth and the lines that are marked in it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "cases"), str(BENCHMARKS)]

from scoreboard_said import said_in  # noqa: E402
from scoring import Said  # noqa: E402
from silent_faults import FOLDER, load_spellings  # noqa: E402
from silent_table import page  # noqa: E402


def test_there_are_40_faults_in_several_spellings_each_with_a_truth():
    spellings = load_spellings()
    faults = {one.fault for one in spellings}
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"spelled"}
    assert faults == scripts
    assert len(faults) >= 40
    assert all(sum(one.fault == fault for one in spellings) >= 3 for fault in faults)


def test_no_script_of_a_fault_names_nanstop():
    assert not [path.name for path in FOLDER.glob("*.py") if "nanstop" in path.read_text()]


def test_lines_are_those_of_the_marked_statement_of_that_spelling_alone():
    by_name = {one.name: one for one in load_spellings(("clipping_before_unscaling",))}
    source = by_name["hand"].script.read_text().splitlines()
    (hand,), (torch,) = by_name["hand"].lines, by_name["torch"].lines
    assert source[hand - 1].strip() == "clip(model, 1.0)  # fault"
    assert "clip_grad_norm_" in source[torch - 1]
    assert by_name["hf"].lines == frozenset()


def said(*answers, lines=(), step=None):
    return Said(alarms=len(answers), answers=answers, lines=lines, step=step)


def figures(case, twin):
    """The row of all spellings that the page would have of one spelling."""
    (one,) = (s for s in load_spellings(("max_norm_zero",)) if s.name == "hand")
    records = {
        f"{one.fault}.{one.name}.{which}": {"said": vars(seen)}
        for which, seen in (("case", case), ("healthy", twin))
    }
    return page([one], {"first run": records})[1].splitlines()[2]


RIGHT = ("NS307", "likely")


@pytest.mark.parametrize(
    ("case", "twin", "row"),
    [
        (said(), said(), ["0/1 (0 %)", "0/1 (0 %)", "0/1 (0 %)", "0 of 1"]),
        (said(RIGHT), said(), ["1/1 (100 %)", "1/1 (100 %)", "0/1 (0 %)", "0 of 1"]),
        (said(RIGHT, step=21), said(), ["0/1 (0 %)", "1/1 (100 %)", "0/1 (0 %)", "0 of 1"]),
        (said(), said(RIGHT), ["0/1 (0 %)", "0/1 (0 %)", "0/1 (0 %)", "1 of 1"]),
    ],
)
def test_a_row_of_the_page(case, twin, row):
    assert figures(case, twin) == f"| all | {' | '.join(row)} |"


def test_the_line_counts_where_few_are_named():
    (one,) = (s for s in load_spellings(("max_norm_zero",)) if s.name == "hand")
    (line,) = one.lines
    right = said(RIGHT, lines=(f"{one.script.name}:{line}",))
    many = replace(right, lines=tuple(f"{one.script.name}:{n}" for n in (1, 2, 3, line)))
    assert figures(right, said()).endswith("| 1/1 (100 %) | 0 of 1 |")
    assert figures(many, said()).endswith("| 0/1 (0 %) | 0 of 1 |")


def test_records_of_before_lines_were_kept_are_read():
    old = {name: value for name, value in vars(said(RIGHT)).items() if name != "lines"}
    assert said_in({"said": old}).lines == ()
