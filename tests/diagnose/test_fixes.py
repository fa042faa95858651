"""Every fix of every page is planted beside its fault: loss, gradient and update are sound with it,
and what was healthy is as it was. The table is complete, and says why a fix is words only.
"""

import ast
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from diagnose.fixes.forward import ZERO
from diagnose.fixes.kinds import BOUND, Remedied, Rows, backpropagated
from diagnose.fixes.table import COSTS, PROOFS, TESTED, WORDS, numbered


def marks_of(function):
    """Those that say what it needs."""
    return getattr(function, "pytestmark", [])


CASES = [
    pytest.param(
        proof,
        id=f"{code}.{number} {proof.what}",
        marks=[pytest.mark.slow] * getattr(proof, "slow", False)
        + marks_of(getattr(proof, "healthy", None)),
    )
    for (code, number), proofs in sorted(PROOFS.items())
    for proof in proofs
]


REMEDIED = [case for case in CASES if isinstance(case.values[0], Remedied)]
TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield
    torch.use_deterministic_algorithms(deterministic)


def test_every_fix_of_every_page_is_in_the_table_and_no_other():
    on_pages = list(numbered())
    assert len(on_pages) == len(set(on_pages))
    assert {*PROOFS, *TESTED, *WORDS} == set(on_pages)


def test_what_is_planted_is_not_words_too():
    kinds = PROOFS, TESTED, WORDS
    assert len({*PROOFS, *TESTED, *WORDS}) == sum(map(len, kinds))
    assert all(each.why for each in WORDS.values())
    assert {(code, number) for code, number, _ in COSTS if number} <= set(numbered())


@pytest.mark.parametrize("test", sorted({each.test for each in TESTED.values()}))
def test_a_test_that_is_named_is_there_and_runs(test):
    """Itself it passes in the same suite as this one."""
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    found = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == name]
    marks = " ".join(ast.unparse(each) for f in found for each in f.decorator_list)
    assert len(found) == 1
    assert "skip" not in marks
    assert "xfail" not in marks


@pytest.mark.parametrize("proof", CASES)
def test_a_fix_cures_its_fault(proof):
    assert proof.fault_fails(), "the fault is none"
    torch.manual_seed(0)
    assert proof.fix_cures(), "the fix is none"


@pytest.mark.parametrize(
    "holds",
    [
        pytest.param(h, id=f"{code}.{number} {h.__name__}", marks=marks_of(h))
        for code, number, h in COSTS
    ],
)
def test_a_cost_is_what_it_is_said_to_be(holds):
    assert holds()


@pytest.mark.parametrize("proof", REMEDIED)
def test_without_its_remedy_a_fault_is_not_called_cured(proof):
    assert not replace(proof, atoms=()).fix_cures()


@pytest.mark.parametrize("proof", [each for p in CASES if isinstance(each := p.values[0], Rows)])
def test_without_its_form_a_row_is_not_called_cured(proof):
    assert not replace(proof, fixed=proof.broken).fix_cures()


def test_a_floor_that_is_too_low_is_no_fix():
    _, gradient = backpropagated(lambda x: F.normalize(x, dim=-1).sum(), ZERO)
    assert gradient.norm() > BOUND
