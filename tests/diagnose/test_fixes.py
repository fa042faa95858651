"""Every fix of every page is planted beside its fault: loss, gradient and update are sound with it,
and what was healthy is as it was. The table is complete, and says why a fix is words only.
"""

import warnings

import pytest
import torch
from torch.nn import functional as F

from diagnose.fixes.forward import ZERO
from diagnose.fixes.kinds import BOUND, backpropagated
from diagnose.fixes.table import COSTS, PROOFS, WORDS, numbered

CASES = [
    pytest.param(
        proof,
        id=f"{code}.{number} {proof.what}",
        marks=[pytest.mark.slow] if getattr(proof, "slow", False) else [],
    )
    for (code, number), proofs in sorted(PROOFS.items())
    for proof in proofs
]


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
    assert {*PROOFS, *WORDS} == set(on_pages)


def test_what_is_planted_is_not_words_too():
    assert not PROOFS.keys() & WORDS.keys()
    assert all(each.why for each in WORDS.values())
    assert {(code, number) for code, number, _ in COSTS if number} <= {*PROOFS, *WORDS}


@pytest.mark.parametrize("proof", CASES)
def test_a_fix_cures_its_fault(proof):
    assert proof.fault_fails(), "the fault is none"
    torch.manual_seed(0)
    assert proof.fix_cures(), "the fix is none"


@pytest.mark.parametrize(
    "holds", [pytest.param(h, id=f"{code}.{number} {h.__name__}") for code, number, h in COSTS]
)
def test_a_cost_is_what_it_is_said_to_be(holds):
    assert holds()


def test_a_floor_that_is_too_low_is_no_fix():
    _, gradient = backpropagated(lambda x: F.normalize(x, dim=-1).sum(), ZERO)
    assert gradient.norm() > BOUND
