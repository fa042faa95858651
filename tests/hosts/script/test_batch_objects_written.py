"""What a model writes into the object that it is given is no part of the batch it was given."""

import pytest

from loop_scripts import assert_left_alone, investigated
from nanstop.records import Report

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)

class Rollout:
    def __init__(self, **given):
        self._store = given

    def __getattr__(self, name):
        if name == "_store":
            raise AttributeError(name)
        return self.__dict__["_store"][name]

    def set(self, name, value):
        self._store[name] = value

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, rollout):
        value = self.layer(rollout.x).squeeze(-1)
        error = value - torch.log(rollout.share)
        rollout.set("error", error.detach() + rollout.bias)
        return error.pow(2).mean() + rollout.bias

model = Critic()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(6):
    rollout = Rollout(x=torch.randn(8, 4), share=torch.rand(8), bias=torch.zeros(()))
    if FAULT and step == 3:
        rollout.set(FAULT, torch.zeros(8) if FAULT == "share" else torch.tensor(float("nan")))
    loss = model(rollout)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach() for p in model.parameters()]
"""


@pytest.mark.parametrize(("fault", "bad"), [("share", []), ("bias", ["rollout.bias"])])
def test_only_what_was_given_is_the_batch(tmp_path, fault, bad):
    script = SCRIPT.replace("FAULT", repr(fault))
    _, news = investigated(tmp_path / "bad.py", script)
    report = next(one for one in news if isinstance(one, Report))
    assert [fact.name for fact in report.incident.batch if fact.num_bad] == bad
    assert ("NS501" in [one.code for one in report.diagnoses]) == bool(bad)
    if not bad:
        assert "torch.log(rollout.share)" in report.localization.first_bad.source.text


@pytest.mark.parametrize("of", ["x * 2", "x - rollout.x.mean(0)"])
def test_what_was_given_and_is_written_over_is_the_batch(tmp_path, of):
    script = SCRIPT.replace("FAULT", "'x'").replace(
        "torch.tensor(float", "torch.full((8, 4), float"
    )
    script = script.replace(
        "        value =", f"        rollout.set('x', rollout.{of})\n        value ="
    )
    _, news = investigated(tmp_path / "bad.py", script)
    report = next(one for one in news if isinstance(one, Report))
    best = report.diagnoses[0]
    assert (best.code, "rollout.x" in best.title) == ("NS501", True)
    assert report.localization.culprit == "batch[rollout.x]"


def test_without_a_fault_nothing_is_told(tmp_path):
    assert_left_alone(tmp_path, SCRIPT.replace("FAULT", "None"))
