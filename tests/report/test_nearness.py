"""What stands in brackets behind a cure."""

import pytest

from nanstop.records import Alternative, Atom, Reference
from nanstop.report.text.nearness import alternative_in_brackets

EXACT = Reference(outcome="pass", dtype="float32", loss=1.0)
BROKEN = Reference(outcome="same_failure", dtype="float32", loss=None)
ISLAND, SAMPLE = Atom(remedy="island", target="a", value="float32"), Atom(remedy="drop_sample")


@pytest.mark.parametrize(
    ("atom", "gap", "cosine", "reference", "said"),
    [
        (ISLAND, 2e-6, 1.0, EXACT, "1 of 1 runs pass; loss within 2e-6 of float32"),
        (ISLAND, 2e-6, 0.5, EXACT, "1 of 1 runs pass; other numbers than in float32"),
        (ISLAND, 0.3, 1.0, EXACT, "1 of 1 runs pass; other numbers than in float32"),
        (ISLAND, None, None, EXACT, "1 of 1 runs pass"),
        (ISLAND, 0.3, 1.0, BROKEN, "1 of 1 runs pass"),
        (SAMPLE, 0.3, 1.0, EXACT, "1 of 1 runs pass"),
    ],
)
def test_an_alternative_with_other_numbers_says_so(atom, gap, cosine, reference, said):
    """What leaves a sample out has other numbers by its nature."""
    other = Alternative(
        atoms=(atom,), safety="safe", passed=1, runs=1, loss_gap=gap, grad_cosine=cosine
    )
    assert alternative_in_brackets(other, reference) == f"[{said}]"
