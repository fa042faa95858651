"""What to type where no change of the code is known: about the operation that failed."""

from dataclasses import replace

import pytest

from incident_records import report
from nanstop.records import Atom
from nanstop.rewrite.words import said


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("aten.div.Tensor", "keep the divisor from 0"),
        ("aten._ctc_loss.default", "`zero_infinity=True`"),
        ("aten.grid_sampler_2d.default", "no code is known"),
    ],
)
def test_a_guard_is_said_of_the_operation_that_failed(op, words):
    given, found = report(), report().localization
    assert found is not None
    assert found.first_bad is not None
    found = replace(found, first_bad=replace(found.first_bad, op=op))
    given = replace(given, localization=found)
    text = said(Atom(remedy="form", target="train.py:5", value="guarded"), given)
    assert words in text
    assert ("divisor" in text) == ("div" in op)
