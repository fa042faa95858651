"""What a healthy run costs at its thousandth step it costs at its hundred thousandth: work and memory are counted."""

import math

import pytest

from nanstop.records import Evidence, RunFacts, Series
from nanstop.rules.diagnose import examine
from nanstop.run.history import WHOLE, History
from work import Visited

EVERY = 10
"""Steps between two logs."""


def logged(num_logs, *, num_micro=2, kept=512, bad=()):
    """The history of a trainer that has logged so often; ``bad``: steps whose losses are NaN."""
    history = History(kept)
    for step in range(num_logs * EVERY):
        for _ in range(num_micro):
            history.add("loss_raw", step, math.nan if step in bad else 2.0)
        history.add("grad_norm", step, 1.0)
        history.add("scale", step, 2.0**16)
        if step % EVERY == EVERY - 1:
            history.add("loss_logged", step + 1, 2.0)
    return history


def num_visited(series):
    """How often the rules for a healthy run look at an entry of a run's numbers."""
    visits = [0]
    held = tuple(
        Series(name=s.name, steps=Visited(s.steps, visits), values=Visited(s.values, visits))
        for s in series
    )
    facts = RunFacts(nan_inf_filter=True, num_micro=2, logging_steps=EVERY)
    assert examine(Evidence(facts=facts, series=held), "gauge").diagnoses == ()
    return visits[0]


@pytest.mark.parametrize("kept", [512, WHOLE])
def test_a_log_costs_as_much_at_step_100000_as_at_step_1000(kept):
    early, late = (num_visited(logged(n, kept=kept).recent()) for n in (600, 10_000))
    assert early == late < 10_000


def test_one_old_bad_loss_does_not_make_logs_dear():
    series = logged(300, bad={2900}).recent()
    assert num_visited(series) < 40_000
