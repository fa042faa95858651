"""What is known of weights that a training of this process has left behind."""

import math

import pytest
import torch
from torch import nn

from loop_scripts import ReplayingSession, run_script
from nanstop.hosts.loop.facts import facts_of_loop
from nanstop.hosts.model.left_weights import LeftWeights
from nanstop.hosts.model.view import PlainView
from nanstop.hosts.script import autowatch
from nanstop.records import TensorStats

NAN = TensorStats(name="w", shape=(3,), dtype="float32", nan=2, absmax=0.5, first_bad=(0,))
LARGE = TensorStats(name="v", shape=(3,), dtype="float32", absmax=3e9, absmin_nonzero=1e9)
LOOP = """
import torch
from torch import nn

torch.manual_seed(0)
net, other = nn.Linear(4, 4), nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 1e30)
for step in range(2):
    optimizer.zero_grad()
    net(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
facts = []
for model in (net, other):
    with torch.no_grad():
        model.weight[0, 0] = float("inf") if model is other else model.weight[0, 0]
    facts.append(FACTS(model))
"""


def test_they_are_known_by_what_they_hold():
    left = LeftWeights()
    left.note((NAN, LARGE), loaded=(LARGE,))
    held = {"shape": (3,), "dtype": "float32", "absmax": 0.5, "first_bad": (0,)}
    again = TensorStats(name="model.w", device="cuda:0", nan=2, **held)
    others = TensorStats(name="w", nan=1, **held)
    assert left.among((again, others, LARGE)) == {"model.w"}
    assert left.among((others, LARGE), updated={"v"}) == {"v"}


def test_what_a_watched_loop_updates_was_not_loaded_so(tmp_path):
    given = {"FACTS": lambda model: facts_of_loop(PlainView(model))}
    try:
        found = run_script(tmp_path / "loop.py", LOOP, ReplayingSession("proceed"), **given)
    finally:
        autowatch.unwatch()
    trained, fresh = found["facts"]
    assert {stats.name for stats in trained.left_weights} == {"weight", "bias"}
    assert trained.odd_weights == ()
    assert fresh.left_weights == ()
    assert {stats.name for stats in fresh.odd_weights} == {"weight"}


@pytest.mark.parametrize("bad", [math.nan, 3e7])
def test_a_model_that_nothing_here_has_trained_is_judged_as_ever(bad):
    model = nn.Linear(5, 7)
    with torch.no_grad():
        model.weight[3, 1] = bad
    facts = facts_of_loop(PlainView(model))
    assert (len(facts.odd_weights), facts.left_weights) == (1, ())
