"""What to type where no change of the code is known: about the operation that failed."""

from dataclasses import replace

import pytest

from incident_records import report
from nanstop.records import Atom, OptimizerFacts, Series, SourceLine
from nanstop.rewrite.change import change_for
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


def test_another_line_of_a_cure_is_not_given_the_text_of_the_one_that_failed():
    given, found = report(), report().localization
    assert found is not None
    assert found.first_bad is not None
    source = SourceLine(file="train.py", line=5, function="f", text="u = u / u.norm()")
    event = replace(found.first_bad, op="aten.div.Tensor", forward_op=None, source=source)
    given = replace(given, localization=replace(found, first_bad=event))
    here, there = (
        said(Atom(remedy="form", target=f"train.py:{line}", value="guarded:div"), given)
        for line in (5, 6)
    )
    assert "u = u / u.norm()" in here
    assert "u.norm()" not in there
    assert there.startswith("train.py:6: keep the divisor from 0")


@pytest.mark.parametrize(
    ("rate", "given", "is_schedules"),
    [(0.655, 1e-3, True), (4e-4, 1e-3, False), (1e-3, 1e-3, False), (1e-3, 0.1, True)],
)
def test_a_rate_that_a_schedule_has_raised_is_lowered_where_that_is_made(rate, given, is_schedules):
    """What `eta_min` above the rate or `max_lr` has made: the optimizer's own does not bound it."""
    text = "import torch\nopt = torch.optim.SGD(p, lr=1e-3)\nplan = Rising(opt, eta_min=1.0)\n"
    line = SourceLine(file="t.py", line=3, function="<module>", text="plan = Rising(opt)")
    optimizer = OptimizerFacts(name="SGD", lr=1e-3, given=given, scheduled=1e-3)
    failed = report()
    incident = replace(
        failed.incident,
        facts=replace(failed.incident.facts, optimizer=optimizer, schedule_at=line),
        history=(Series(name="lr", steps=(0, failed.incident.at.step), values=(1e-3, rate)),),
    )
    lowered = Atom(remedy="lr", value="0.01")
    proof = replace(failed.proof, minimal=(lowered,))
    made = change_for(replace(failed, incident=incident, proof=proof), lambda _: text)
    assert bool(made.files) != is_schedules
    if is_schedules:
        (words,) = made.words
        assert words.startswith("t.py:3: multiply each rate that this schedule is given by 0.01")
