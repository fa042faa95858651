"""A model that a validation has left in evaluation mode is told; one that is trained so on purpose,
or put back, is not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, *, acts=True):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if acts else nn.LayerNorm(16)
        self.drop, self.head = nn.Dropout(0.4 if acts else 0.0), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.body(x)).relu()))


def made(**options):
    torch.manual_seed(0)
    net = Net(**options)
    return net, torch.optim.SGD(net.parameters(), lr=0.05)


def train(net, optimizer, num):
    for _ in range(num):
        loss = F.cross_entropy(net(torch.randn(6, 8)), torch.randint(4, (6,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(net):
    net.eval()
    with torch.no_grad():
        net(torch.randn(6, 8))


def epochs(*, back=False, **options):
    def run():
        net, optimizer = made(**options)
        net.train()
        for _ in range(4):
            train(net, optimizer, 8)
            validate(net)
            if back:
                net.train()

    return run


def test_a_model_that_is_never_put_back_is_told(tmp_path):
    finding = findings_of(tmp_path, epochs())["NS119"]
    assert finding.source.text == "net.eval()"
    assert "`norm`, `drop`" in finding.cause
    assert finding.seen.step == 8


def test_it_is_told_at_the_end_where_most_was_made_before(tmp_path):
    def run():
        net, optimizer = made()
        train(net, optimizer, 20)
        validate(net)
        train(net, optimizer, 18)

    assert "NS119" in findings_of(tmp_path, run)


def test_it_is_told_where_each_step_has_its_validation(tmp_path):
    def run():
        net, optimizer = made()
        for _ in range(20):
            train(net, optimizer, 1)
            validate(net)

    finding = findings_of(tmp_path, run)["NS119"]
    assert finding.source.text == "net.eval()"
    assert finding.seen.step == 1


def after_a_trial():
    """One step that tries out whether the loop runs, then all statistics frozen."""
    net, optimizer = made()
    train(net, optimizer, 1)
    validate(net)
    train(net, optimizer, 24)


def asked_for_anew():
    net, optimizer = made()
    for num in range(20):
        if num:
            net.eval()
        train(net, optimizer, 1)
        validate(net)


def from_the_start():
    net, optimizer = made()
    net.eval()
    for _ in range(3):
        train(net, optimizer, 12)
        validate(net)


def on_purpose():
    """Its second half is trained with all statistics frozen."""
    net, optimizer = made()
    train(net, optimizer, 8)
    validate(net)
    net.eval()
    for _ in range(2):
        train(net, optimizer, 12)
        validate(net)


def another_optimizer():
    net, optimizer = made()
    train(net, optimizer, 8)
    validate(net)
    train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 24)


def frozen_norm():
    net, optimizer = made()
    for _ in range(4):
        net.train()
        net.norm.eval()
        train(net, optimizer, 8)
        validate(net)


def a_teacher():
    net, optimizer = made()
    train(net, optimizer, 8)
    validate(net)
    student = nn.Linear(8, 4)
    second = torch.optim.SGD(student.parameters(), lr=0.05)
    for _ in range(24):
        x = torch.randn(6, 8)
        second.zero_grad()
        F.mse_loss(student(x), net(x)).backward()
        second.step()


HEALTHY = {
    "put back": epochs(back=True),
    "nothing that acts": epochs(acts=False),
    "after a trial": after_a_trial,
    "asked for anew": asked_for_anew,
    "from the start": from_the_start,
    "on purpose": on_purpose,
    "another optimizer": another_optimizer,
    "a frozen norm": frozen_norm,
    "a teacher": a_teacher,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_meant_or_put_back_is_left_in_peace(name, tmp_path):
    assert "NS119" not in findings_of(tmp_path, HEALTHY[name])
