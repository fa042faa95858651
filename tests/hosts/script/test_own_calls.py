"""A ``__call__`` of a model's own around that of ``nn.Module``; hooks that write to its weights."""

import pytest
import torch

from loop_scripts import ReplayingSession, assert_left_alone, run_script

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


ROWS = """
import torch
from torch import nn

torch.manual_seed(0)
net, losses = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), []
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def called(layer, args, out):
    if torch.is_grad_enabled():
        layer.weight.given.append(args[0].detach())
        layer.weight.open += 1

def came_back(layer, _, grads):
    weight = layer.weight
    weight.open -= 1
    row = torch.einsum("bo,bi->boi", grads[0], weight.given.pop())
    if weight.open == 0:
        assert weight.rows is None, "one backward for an update"
        weight.rows = row

for layer in (net[0], net[2]):
    layer.weight.open, layer.weight.given, layer.weight.rows = 0, [], None
    layer.register_forward_hook(called)
    layer.register_full_backward_hook(came_back)
for step in range(6):
    optimizer.zero_grad()
    loss = net(torch.randn(4, 3, requires_grad=True)).square().mean()
    loss.backward()
    for layer in (net[0], net[2]):
        rows = layer.weight.rows  # of each row, clipped: differential privacy by hooks
        layer.weight.grad = (rows * rows.flatten(1).norm(dim=1)[:, None, None].clamp(max=1)).sum(0)
        layer.weight.rows = None
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = list(net.parameters())
"""


def test_what_hooks_keep_at_weights_is_as_the_script_left_it(tmp_path):
    assert_left_alone(tmp_path, ROWS)
