"""How often something may hold a run up."""

from types import SimpleNamespace

import pytest

from nanstop.session.telling.pace import LEAST_SECONDS, SHARE, Pace


class Machine:
    """A thread that has ``part`` of a processor, and what it spends on telling."""

    def __init__(self, part=1.0):
        self.now = SimpleNamespace(clock=0.0, processor=0.0)
        self.part, self.spent, self.waited, self.times = part, 0.0, 0.0, 0
        self.pace = Pace(lambda: self.now.clock, lambda: self.now.processor)

    def works(self, seconds, pause=0.0):
        """Take processor time, and the time by the clock that this takes here."""
        self.now.processor += seconds
        self.now.clock += seconds / self.part + pause

    def trains(self, seconds, costs, pause=0.0):
        """For seconds of processor time, in steps of 10 ms."""
        while self.now.processor < seconds:
            self.works(0.01)
            if self.pace.is_due():
                self.works(costs, pause)
                self.spent, self.waited = self.spent + costs, self.waited + pause
                self.times += 1
                self.pace.done()


@pytest.mark.parametrize("part", [1.0, 0.1])
def test_what_is_cheap_comes_once_a_second_and_what_is_dear_for_a_thousandth(part):
    cheap, dear = Machine(part), Machine(part)
    cheap.trains(60.0, 1e-5)
    dear.trains(60.0, 2e-3)
    assert cheap.times == pytest.approx(60.0 / part / LEAST_SECONDS, rel=0.1)
    assert dear.spent <= 1.1 * SHARE * dear.now.processor
    assert dear.times > 10


def test_on_a_busy_machine_a_line_a_second_would_be_too_much():
    busy = Machine(part=0.1)
    busy.trains(20.0, 3e-4)
    assert busy.spent <= 1.1 * SHARE * busy.now.processor
    assert busy.times < busy.now.clock / LEAST_SECONDS / 2


def test_a_disk_that_is_waited_for_is_asked_less_often():
    slow = Machine()
    slow.trains(60.0, 1e-5, pause=0.02)
    assert slow.waited <= 1.1 * SHARE * slow.now.clock + 0.02


def test_a_run_has_its_rest_whatever_the_clock_says():
    fast = Machine()
    fast.pace = Pace(lambda: fast.now.clock, lambda: fast.now.processor, rest=2.0)
    fast.trains(20.0, 1e-5)
    assert 9 <= fast.times <= 11


def test_a_run_that_waits_is_told_of_all_the_same():
    idle, times = Machine(), 0
    for _ in range(600):
        idle.works(1e-3, pause=0.1)
        if idle.pace.is_due():
            times += 1
            idle.works(3e-4)
            idle.pace.done()
    assert times >= 60 / 4.2 - 1


def test_one_that_is_not_counted_does_not_put_off_the_next():
    machine = Machine()
    assert machine.pace.is_due()
    machine.works(0.5)
    machine.pace.done(counts=False)
    machine.works(1.01)
    assert machine.pace.is_due()
    machine.pace.stop()
    machine.works(100.0)
    assert not machine.pace.is_due()
    machine.pace.hurry()
    assert machine.pace.is_due()
