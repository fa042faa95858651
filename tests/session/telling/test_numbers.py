"""A run's own numbers, told to whoever asked for them, at next to no cost."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from nanstop.session.history import History
from nanstop.session.telling.numbers import NumbersLogged
from nanstop.session.telling.pace import Pace


class Run:
    def __init__(self):
        self.metrics, self.series, self.reports = History(), History(), []
        self.beat = lambda _: None


def followed(costs):
    """A run, what it has told, and a clock on which each look takes ``costs`` seconds."""
    told, clock = [], SimpleNamespace(now=0.0)

    def now():
        clock.now += costs / 2
        return clock.now

    pace = Pace(now, lambda: clock.now)
    run, logged = Run(), NumbersLogged(lambda numbers, step: told.append((step, numbers)), pace)
    logged.follow(run)
    return run, told, clock


@pytest.mark.parametrize(("costs", "times"), [(1e-4, 10), (1e-2, 2)])
def test_a_run_is_looked_at_once_a_second_and_for_a_thousandth_of_its_time(costs, times):
    run, told, clock = followed(costs)
    step = 0
    while clock.now < 10.0:
        run.metrics.add("headroom", step, float(step))
        run.beat(step)
        clock.now += 1e-2
        step += 1
    assert times - 1 <= len(told) <= times
    assert all(numbers == {"nanstop/headroom_bits": float(at)} for at, numbers in told)


def test_an_incident_and_the_end_are_told_at_once():
    run, told, clock = followed(1.0)
    run.metrics.add("skipped", 0, 1)
    run.beat(0)
    run.metrics.add("skipped", 1, 2)
    run.beat(1)
    assert [step for step, _ in told] == [0]
    run.reports.append("an incident")
    run.beat(2)
    run.metrics.add("skipped", 3, 3)
    run.beat(3)
    run.beat(None)
    run.beat(None)
    assert told[1:] == [
        (2, {"nanstop/updates_left_out": 2.0, "nanstop/incidents": 1.0}),
        (3, {"nanstop/updates_left_out": 3.0, "nanstop/incidents": 1.0}),
    ]
    assert clock.now < 30


def test_what_lies_on_a_device_is_not_read_by_a_look():
    run, told, clock = followed(0.0)
    for step, device in enumerate(itertools.islice(itertools.cycle(("cpu", "meta")), 4)):
        run.series.add("scale", step, torch.empty((), device=device).fill_(8.0))
        run.beat(step)
        clock.now += 2.0
    assert [step for step, numbers in told if numbers] == [0, 2]
