"""Of a script that trains one model after another, what is told of the second names its lines."""

import torch
from torch import nn

from loop_scripts import findings_of

torch.set_num_threads(1)


def fit(model, optimizer):
    for _ in range(100):
        x = torch.randn(512, 4)
        optimizer.zero_grad()
        (model(x) - 1.0).square().mean().backward()
        optimizer.step()


def test_the_line_of_the_optimizer_at_work_is_named(tmp_path):
    def train():
        torch.manual_seed(0)
        first = nn.Linear(4, 1)
        fit(first, torch.optim.SGD(first.parameters(), lr=0.01))
        del first
        second = nn.Linear(4, 1)
        fit(second, torch.optim.SGD(second.parameters(), lr=1.1))

    said = " ".join(findings_of(tmp_path, train)["NS404"].lines)
    assert "torch.optim.SGD(second.parameters(), lr=1.1)" in said
    assert "lr=0.01)" not in said
