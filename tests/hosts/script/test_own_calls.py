"""Models whose class has a ``__call__`` of its own around that of ``nn.Module``."""

import pytest
import torch

from loop_scripts import ReplayingSession, run_script

SOURCE = """
import torch
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x * 2)

    def forward(self, x):
        return self.layer(x)

net, losses = Net(), []
optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if OPTIMIZER else None
for step in range(4):
    x = torch.randn(4, 3)
    x[1] = torch.inf if step == BAD else x[1]
    loss = net(x).square().mean()
    loss.backward()
    losses.append(loss.item())
    if optimizer:
        optimizer.step()
        optimizer.zero_grad()
    else:
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
                p.grad = None
calls, PARAMETERS = net.calls, [p.detach().clone() for p in net.parameters()]
"""


@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "by hand"])
def test_what_a_call_of_its_own_does_is_done_once(tmp_path, optimizer):
    given = {"BAD": None, "OPTIMIZER": optimizer}
    plain = run_script(tmp_path / "plain.py", SOURCE, **given)
    watched = run_script(tmp_path / "watched.py", SOURCE, ReplayingSession(), **given)
    assert watched["losses"] == plain["losses"]
    assert watched["calls"] == plain["calls"] == 4
    assert all(map(torch.equal, watched["PARAMETERS"], plain["PARAMETERS"]))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_it_is_run_again_as_it_was_run(tmp_path, bad):
    session = ReplayingSession("skip")
    run_script(tmp_path / "bad.py", SOURCE, session, BAD=bad, OPTIMIZER=True)
    (found,) = session.found
    assert (found.fidelity, session.refusals) == ("bitwise", [])
