"""What a healthy run costs at its thousandth step it costs at its hundred thousandth:
work and memory are counted.
"""

import gc
import math
import sys
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from loop_scripts import run_script
from nanstop.decide.policy import Policy
from nanstop.diagnose.diagnose import examine
from nanstop.hosts.loop.facts import facts_of_loop
from nanstop.hosts.model.view import PlainView
from nanstop.numerics import host_memory
from nanstop.records import Evidence, RunFacts, Series, StepId
from nanstop.replay.copies.rewind import SnapshotKeeper
from nanstop.replay.copies.snapshot import Trainable
from nanstop.session.factory import opener
from nanstop.session.history import WHOLE, History
from nanstop.session.session import Session
from nanstop.store.incidents import Store
from nanstop.tracing import flight_recorder
from work import Visited

EVERY = 2
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


LOOP = """
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
for step in range(num_steps):
    with look(step):
        optimizer.zero_grad()
        x = torch.randn(4, 4)
        loss = (net(x) - x.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
"""


class Looks:
    """Counts, in some steps of a script, what Python does in them and what the process holds
    after them.
    """

    def __init__(self, *wanted):
        self.wanted = wanted
        self.work, self.held = {}, {}

    @contextmanager
    def __call__(self, step):
        at = next((one for one in self.wanted if one <= step < one + NUM_LOOKS), None)
        if at is None:
            yield
            return
        if step == at:
            gc.collect()
            self.held[at] = sum(len(one) for one in gc.get_objects() if grows(one))
        self.work.setdefault(at, []).append(0)

        def count(frame, event, _):
            frame.f_trace_opcodes = True
            self.work[at][-1] += event == "opcode"
            return count

        sys.settrace(count)
        try:
            yield
        finally:
            sys.settrace(None)

    def are_alike(self):
        """Whether the last steps looked at cost and hold no more than the first, but for what a
        few objects take.
        """
        early, late = self.wanted
        assert max(self.work[early]) > 1000
        # What others do now and then (a collection of garbage) is in some steps only, and steps
        # that log cost a hundred times those that do not: the least of either kind is compared.
        for least in (min, least_of_the_heavy):
            assert least(self.work[late]) <= 1.02 * least(self.work[early])
        assert self.held[late] - self.held[early] < (late - early) / 10


def least_of_the_heavy(work):
    return min(one for one in work if one > max(work) / 2)


NUM_LOOKS = 12


def grows(held):
    """Whether something is a container without a bound of its own: how far a series with a bound is
    filled hangs on the clock that looks go by.
    """
    return type(held) in (list, dict, set, tuple) or (type(held) is deque and held.maxlen is None)


def watched(folder, looks, num_steps):
    """Run a loop of many steps under a session of its own."""
    opened = opener(Policy(), Store(folder / "out"), lambda _: None)
    run_script(folder / "train.py", LOOP, opened, look=looks, num_steps=num_steps)


@dataclass
class FakeStep:
    """All that a healthy path looks at of a window that need not be run again."""

    id: StepId
    view: PlainView
    batches: tuple = ({"x": torch.zeros(4)},)
    losses: tuple = (None,)
    calls_script: bool = False


def test_a_step_of_a_session_costs_and_holds_as_much_at_its_end_as_at_its_beginning(tmp_path):
    early, late = 1500, 4000
    looks, net = Looks(early, late), torch.nn.Linear(4, 4)
    net(torch.ones(1, 4)).sum().backward()
    optimizer = torch.optim.AdamW(net.parameters())
    view = PlainView(net, optimizer)
    facts = facts_of_loop(view, nan_inf_filter=True)
    say = {"policy": Policy(), "store": Store(tmp_path), "announce": print}
    session, keeper = (
        Session(view=view, facts=facts, **say),
        SnapshotKeeper(lambda: 1 << 30, max_windows=2),
    )
    session.start()
    for step in range(late + NUM_LOOKS):
        with looks(step):
            window = FakeStep(StepId(run="", step=step), view)
            for name in ("loss_raw", "grad_norm", "lr", "scale"):
                session.series.add(name, step, 1.0)
            session.before_update(window)
            session.gauge_due(step)
            keeper.before_update(lambda: Trainable(dict(net.named_parameters()), optimizer), window)
            session.completed(step)
            if step % EVERY == EVERY - 1:
                session.series.add("loss_logged", step + 1, 1.0)
                session.logged()
    session.finish()
    looks.are_alike()


@pytest.mark.slow
def test_a_step_of_a_loop_costs_and_holds_as_much_at_its_end_as_at_its_beginning(
    tmp_path, monkeypatch
):
    # The windows since the last snapshot are kept to a bound of their own, more or less of them.
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 0)
    looks = Looks(1100, 2500)
    watched(tmp_path, looks, 2500 + NUM_LOOKS)
    looks.are_alike()


def test_a_script_that_makes_modules_in_every_step_fills_no_memory(monkeypatch):
    monkeypatch.setattr(flight_recorder, "MAX_PLACES", 40)
    notes, made = [], []
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    with flight_recorder.FlightRecorder(
        lambda *op: notes.append(op[2]) or 0, lambda _: None
    ) as recorder:
        for _ in range(200):
            made.append(torch.nn.ReLU())
            made[-1](net(torch.ones(1, 4)))
    assert len(recorder._places._names) <= 50
    assert notes[-4:].count("0") + notes[-4:].count("1") >= 2
