"""A script that writes to its weights beside its optimizer: the line is known when they break."""

import pytest
import torch

from loop_scripts import assert_left_alone, investigated
from nanstop.records import Report

torch.set_num_threads(1)
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
BAD = globals().get("BAD", True)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
PARAMETERS, losses = list(net.parameters()), []
opt = torch.optim.SGD(PARAMETERS, 0.05)


def loss_of(x, shares):
    each = F.cross_entropy(net(x), x.argmax(-1) % 4, reduction="none")
    return (each * shares).sum() / shares.sum().clamp(min=1)


"""
PROJECTED = """
def project(weight):
    with torch.no_grad():
        lengths = weight.norm(dim=-1, keepdim=True)
        weight.div_(lengths)  # HERE


for step in range(24):
    loss = loss_of(torch.randn(8, 6), torch.ones(8))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    if BAD and step == 20:
        with torch.no_grad():
            net[0].weight[3] = 0.0
    project(net[0].weight)
"""
DATA = PROJECTED.replace("weight.div_(lengths)", "weight.data /= lengths").replace(
    "    with torch.no_grad():\n        lengths", "    if True:\n        lengths"
)
SHARPENED = """
for step in range(24):
    x, shares = torch.randn(8, 6), torch.full((8,), 0.0 if BAD and step == 20 else 1.0)
    loss_of(x, shares).backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in PARAMETERS]).norm()
        moved = [p.grad * (0.05 / norm) for p in PARAMETERS]
        for p, by in zip(PARAMETERS, moved):
            p.add_(by)  # HERE
    opt.zero_grad()
    loss = loss_of(x, shares)
    loss.backward()
    with torch.no_grad():
        for p, by in zip(PARAMETERS, moved):
            p.sub_(by)
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
"""
SCRIPTS = {"projected": PROJECTED, "through data": DATA, "sharpened": SHARPENED}


@pytest.mark.parametrize("body", SCRIPTS.values(), ids=SCRIPTS)
def test_line_that_wrote_to_them_is_named(tmp_path, body):
    _, news = investigated(tmp_path / "script.py", HEAD + body)
    report = next(one for one in news if isinstance(one, Report))
    finding = report.diagnoses[0]
    assert finding.code in {"NS401", "NS402"}
    assert finding.confidence == "likely"
    assert finding.source is not None
    assert "HERE" in finding.source.text
    assert finding.where == finding.source.short


@pytest.mark.parametrize("body", SCRIPTS.values(), ids=SCRIPTS)
def test_script_that_writes_finite_weights_is_left_in_peace(tmp_path, body):
    assert_left_alone(tmp_path, HEAD + body)


def test_line_that_writes_to_others_is_not_named(tmp_path):
    others = PROJECTED.replace("project(net[0].weight)", "project(net[2].weight)")
    others = others.replace("net[0].weight[3] = 0.0", "net[0].weight[3] = float('nan')")
    _, news = investigated(tmp_path / "script.py", HEAD + others)
    report = next(one for one in news if isinstance(one, Report))
    assert report.incident.bad_params == ("0.weight",)
    assert report.incident.written_by == ()


BY_THE_FIRST_FORWARD = """
import torch
from torch import nn


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 1)
        self.register_buffer("is_new", torch.tensor(1))

    def forward(self, x):
        if self.is_new:
            with torch.no_grad():
                self.scale.copy_(1.0 / x.std(0))
                self.is_new.fill_(0)
        return self.inner(x * self.scale)


torch.manual_seed(0)
net = Normed()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(8, 4)
    x[:, 2] = 1.0
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
"""


def test_what_the_first_forward_sets_is_nothing_that_was_loaded(tmp_path):
    _, news = investigated(tmp_path / "a.py", BY_THE_FIRST_FORWARD)
    told = [d.code for one in news if isinstance(one, Report) for d in one.diagnoses]
    assert told[0] == "NS206"
    assert "NS106" not in told
