"""A part of a model that was put in after the optimizer was made, and that no optimizer holds, is
told; what another optimizer, or the script itself, trains is not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def fit(net, optimizer, steps, *, classes=5, also=lambda: None):
    for _ in range(steps):
        loss = F.cross_entropy(net(torch.randn(6, 8)), torch.randint(classes, (6,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        also()


def made():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    fit(net, optimizer, 6)
    return net, optimizer


def forgotten():
    net, optimizer = made()
    net.head = nn.Linear(16, 3)
    fit(net, optimizer, 14, classes=3)


def test_a_head_that_was_replaced_after_the_optimizer_was_made_is_told(tmp_path):
    finding = findings_of(tmp_path, forgotten)["NS114"]
    assert finding.title == "the optimizer holds what the model has replaced"
    assert "`head.weight`, `head.bias`" in finding.cause
    assert "after 4" in finding.cause
    assert "add_param_group" in " ".join(finding.lines)
    assert "SGD(net.parameters()" in finding.source.text


class Switched(nn.Module):
    """Two adapters, one of which acts and is trained at a time."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 5).requires_grad_(requires_grad=False)
        self.adapters = nn.ModuleList(nn.Linear(8, 5, bias=False) for _ in range(2))
        self.act(0)

    def act(self, number):
        self.active = number
        for at, one in enumerate(self.adapters):
            one.requires_grad_(at == number)

    def forward(self, x):
        return self.body(x) + self.adapters[self.active](x)


def switched(*, anew=False):
    torch.manual_seed(0)
    net = Switched()
    for number in range(2):
        net.act(number)
        if anew or not number:
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
        fit(net, optimizer, 20)


def test_an_adapter_that_has_taken_over_from_the_one_that_the_optimizer_holds_is_told(tmp_path):
    finding = findings_of(tmp_path, switched)["NS114"]
    assert finding.title == "the optimizer holds what the model has replaced"
    assert "1 parameter with gradients are in no optimizer" in finding.cause
    assert "NS114" not in findings_of(tmp_path / "anew", lambda: switched(anew=True))


def pair(*, of_the_other=False, turns=1):
    """A generator and a critic that take turns, each with an optimizer, and both are asked for an
    update each time; ``turns``: of the critic, ahead of one of the generator.
    """
    torch.manual_seed(0)
    made, judged = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    first = torch.optim.SGD(made.parameters(), lr=0.05)
    second = torch.optim.SGD((made if of_the_other else judged).parameters(), lr=0.05)
    for step in range(40):
        for optimizer in (first, second):
            optimizer.zero_grad()
        if step % (turns + 1) == turns:
            F.softplus(-judged(made(torch.randn(6, 4)))).mean().backward()
        else:
            with torch.no_grad():
                fake = made(torch.randn(6, 4))
            F.softplus(judged(fake) - judged(torch.randn(6, 2))).mean().backward()
        for optimizer in (first, second):
            optimizer.step()


def test_an_optimizer_of_the_other_model_is_told_with_what_it_should_have(tmp_path):
    finding = findings_of(tmp_path, lambda: pair(of_the_other=True, turns=50))["NS114"]
    assert finding.title == "an optimizer never has a gradient"
    assert finding.confidence == "likely"
    assert "4 parameters with gradients are in no optimizer" in finding.cause


@pytest.mark.parametrize("turns", [1, 4])
def test_optimizers_that_step_whatever_had_gradients_are_left_in_peace(turns, tmp_path):
    assert "NS114" not in findings_of(tmp_path, lambda: pair(turns=turns))


def anew():
    net, _ = made()
    net.head = nn.Linear(16, 3)
    fit(net, torch.optim.SGD(net.parameters(), lr=0.05), 14, classes=3)


def added():
    net, optimizer = made()
    net.head = nn.Linear(16, 3)
    optimizer.add_param_group({"params": net.head.parameters()})
    fit(net, optimizer, 14, classes=3)


def another():
    """Two optimizers, one for each part."""
    net, optimizer = made()
    net.head = nn.Linear(16, 3)
    second = torch.optim.Adam(net.head.parameters())
    fit(net, optimizer, 14, classes=3, also=second.step)


def by_hand():
    net, optimizer = made()
    net.head = nn.Linear(16, 3)

    def also():
        for p in net.head.parameters():
            p.data -= 0.1 * p.grad
            p.grad = None

    fit(net, optimizer, 14, classes=3, also=also)


def frozen():
    net, optimizer = made()
    net.head = nn.Linear(16, 3).requires_grad_(requires_grad=False)
    fit(net, optimizer, 14, classes=3)


def never_held():
    """A linear probe: the body, which the optimizer was not given, gets gradients."""
    torch.manual_seed(0)
    net = Net()
    fit(net, torch.optim.SGD(net.head.parameters(), lr=0.05), 20)


@pytest.mark.parametrize("train", [anew, added, another, by_hand, frozen, never_held])
def test_what_is_trained_or_frozen_is_left_in_peace(train, tmp_path):
    assert "NS114" not in findings_of(tmp_path, train)
