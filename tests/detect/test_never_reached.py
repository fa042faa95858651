"""What an optimizer holds and no gradient comes to is told where the loss hangs on it, or where it
is run without a graph; what nothing hangs on, or somebody else moves, is not.
"""

import textwrap

import pytest
import torch

from loop_scripts import with_findings

torch.set_num_threads(1)

HEAD = """
import copy
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.more, self.idle = nn.Linear(16, 1), nn.Linear(16, 3)
        self.target = nn.Linear(8, 16)

    def forward(self, x):
        h = self.body(x).tanh()
        self.idle(h)
        return self.head(h), self.more(h)


net = Net()
del net.target
opt = torch.optim.SGD(net.parameters(), lr=0.05)
data = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(24)]
"""


def loop(body, *, before=""):
    body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    loop = "for step, (x, y) in enumerate(data):\n    opt.zero_grad()\n"
    return f"{HEAD}{textwrap.dedent(before)}\n{loop}{body}\n    loss.backward()\n    opt.step()\n"


FAULTS = {
    "a detached part of the loss": (
        "more",
        loop("""
        logits, length = net(x)
        loss = F.cross_entropy(logits, y) + length.square().mean().detach()
        """),
    ),
    "states without their graph": (
        "Linear.weight",
        loop("""
        states = net.body(x).data
        loss = F.cross_entropy(net.head(states), y)
        """),
    ),
    "a body under no_grad": (
        "states = net.body(x)",
        loop("""
        with torch.no_grad():
            states = net.body(x)
        loss = F.cross_entropy(net.head(states), y)
        """),
    ),
}

HEALTHY = {
    "what nothing hangs on": loop("loss = F.cross_entropy(net(x)[0], y)"),
    "an evaluation": loop("""
        with torch.no_grad():
            net(x)
        loss = F.cross_entropy(net(x)[0], y)
        """),
    "an average of other weights": loop("""
        with torch.no_grad():
            slow = net.slow(x)
            for mean, p in zip(net.slow.parameters(), net.body.parameters()):
                mean.lerp_(p, 0.1)
        logits, _ = net(x)
        loss = F.cross_entropy(logits, y) + (net.body(x) - slow).square().mean()
        """, before="""
        net.slow = copy.deepcopy(net.body)
        opt.add_param_group({"params": net.slow.parameters()})
        """),
    "what takes turns": loop("""
        logits, length = net(x)
        part = length.square().mean()
        loss = F.cross_entropy(logits, y) + (part if step % 6 == 5 else part.detach())
        """),
}  # fmt: skip


@pytest.mark.parametrize(("part", "source"), FAULTS.values(), ids=FAULTS)
def test_a_part_that_is_cut_off_is_told(tmp_path, part, source):
    one, *others = with_findings(tmp_path, source)[1]
    assert (one.code, others) == ("NS114", [])
    assert part in one.cause + one.lines[0]


@pytest.mark.parametrize("source", HEALTHY.values(), ids=HEALTHY)
def test_what_is_meant_is_left_in_peace(tmp_path, source):
    assert with_findings(tmp_path, source)[1] == []


GAN = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
make, judge = nn.Linear(4, 8), nn.Linear(8, 1)
makes = torch.optim.Adam(make.parameters(), lr=1e-3)
judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
for step in range(24):
    fake = make(torch.randn(8, 4))
    both = judge(torch.cat([torch.randn(8, 8), fake.detach()]))
    are_real = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
    loss = F.binary_cross_entropy_with_logits(both, are_real)
    judges.zero_grad()
    loss.backward()
    judges.step()
    loss = F.binary_cross_entropy_with_logits(judge(FAKE), torch.ones(8, 1))
    makes.zero_grad()
    loss.backward()
    makes.step()
"""


def test_an_optimizer_that_never_has_a_gradient_is_told(tmp_path):
    assert with_findings(tmp_path, GAN.replace("FAKE", "fake"))[1] == []
    (one,) = with_findings(tmp_path, GAN.replace("FAKE", "fake.detach()"))[1]
    assert one.code == "NS114"
    assert "makes = torch.optim.Adam" in one.lines[0]
