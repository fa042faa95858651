"""Loops that write the next batch into the tensors of the last one."""

import pytest
import torch

from loop_scripts import run_script, same, weights
from nanstop.decide.policy import Policy
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

torch.set_num_threads(1)

GAN = """
import torch
from torch import nn

torch.manual_seed(0)
judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4)
of_maker = torch.optim.Adam(maker.parameters(), lr=2e-4)
label = torch.empty(16)


def loss_of(out):
    return -(label * torch.log(out) + (1 - label) * torch.log(1 - out)).mean()


for step in range(8):
    judge.zero_grad()
    label.fill_(1.0)
    loss_of(judge(torch.randn(16, 8)).view(-1)).backward()
    fake = maker(torch.randn(16, 4)) * (4000.0 if step == BAD else 1.0)
    label.fill_(0.0)
    loss_of(judge(fake.detach()).view(-1)).backward()
    label.fill_(1.0)
    of_judge.step()
    maker.zero_grad()
    nn.functional.binary_cross_entropy(judge(fake).view(-1), label).backward()
    of_maker.step()
"""
"""The order of the DCGAN tutorial: one tensor of labels for three losses."""

STATIC = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rows, target = torch.empty(8, 8), torch.empty(8, 4)
for step in range(8):
    for micro in range(2):
        rows.copy_(torch.randn(8, 8))
        target.copy_(rows[:, :4])
        if step == BAD and micro == 0:
            target[3] = 1.0
        loss = (net(rows) - target).pow(2).sum(1).log().mean()
        if step == BAD and micro == 0:
            loss = loss + (net(rows)[:, 0] - net(rows)[:, 0]).log().mean().clamp(max=0)
        loss.backward()
    rows.zero_()
    target.zero_()
    optimizer.step()
    optimizer.zero_grad()
"""


def watched(folder, source, policy):
    said = []
    store = Store(folder / "out")
    store.reset()
    ending = run_script(folder / "script.py", source, opener(policy, store, said.append))
    return ending, said


@pytest.mark.parametrize(("source", "line"), [(GAN, "torch.log("), (STATIC, ".log()")])
def test_failure_is_placed_though_the_batch_is_written_over(tmp_path, source, line):
    _, said = watched(tmp_path, source.replace("BAD", "5"), Policy(on_failure="skip"))
    reports = [one for one in said if hasattr(one, "incident")]
    assert len(reports) == 1
    found = reports[0].localization
    assert found is not None
    assert line in found.first_bad.source.text
    assert reports[0].incident.at.step == 5


@pytest.mark.parametrize(("source", "names"), [(GAN, ("judge", "maker")), (STATIC, ("net",))])
def test_healthy_run_is_the_plain_one(tmp_path, source, names):
    source = source.replace("BAD", "-1")
    plain = run_script(tmp_path / "plain.py", source)
    seen, said = watched(tmp_path, source, Policy())
    assert same(weights(plain, *names), weights(seen, *names))
    assert [one for one in said if hasattr(one, "incident")] == []


FILLED = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    path = torch.full((3, 2, 4), float("nan"))
    y = path[0] = torch.randn(2, 4)
    for at in (1, 2):
        y = y + net(y)
        if (step, at) == (BAD, 2):
            y = y * 1e30 * 1e30
        path[at] = y
    path.abs().mean().backward()
    optimizer.step()
"""
"""What a solver of an equation does: its states are written into memory that it has taken."""


def test_what_the_step_writes_over_is_not_what_failed(tmp_path):
    _, said = watched(tmp_path, FILLED.replace("BAD", "1"), Policy(on_failure="skip"))
    (report,) = [one for one in said if hasattr(one, "incident")]
    assert report.localization.first_bad.source.text == "y = y * 1e30 * 1e30"
    assert report.diagnoses[0].code == "NS201"
