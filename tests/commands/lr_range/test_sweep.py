"""A sweep on real steps: it finds where gradient descent must diverge, and leaves no trace."""

import copy

import pytest
import torch
from torch import nn

from nanstop.commands.lr_range.sweep import sweep


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def least_squares():
    """Rows, targets and a linear model whose largest curvature is known."""
    torch.manual_seed(0)
    rows = torch.randn(256, 8)
    targets = rows @ torch.randn(8, 1)
    curvature = torch.linalg.eigvalsh(2.0 * rows.T @ rows / len(rows))[-1].item()
    return rows, targets, nn.Linear(8, 1, bias=False), curvature


def test_divergence_is_where_the_curvature_puts_it():
    """Targets are noisy: at an optimum that is met exactly, rounding alone would say when the
    weights leave it.
    """
    rows, targets, model, curvature = least_squares()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step():
        optimizer.zero_grad()
        loss = (model(rows) - torch.normal(targets, 0.1)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = sweep(step, model, optimizer, low=1e-4, high=100.0, num_steps=120)
    limit = 2.0 / curvature
    assert found.status == "found"
    assert limit < found.diverges < 6.0 * limit
    assert found.low < found.high < limit
    assert found.lowest_loss < 0.01 * found.first_loss
    assert len(found.losses) < 120


def training_state(model, optimizer):
    return copy.deepcopy(
        (
            dict(model.state_dict()),
            [p.grad for p in model.parameters()],
            optimizer.state_dict(),
            torch.get_rng_state(),
        )
    )


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(tensor_rate, fails):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    rate = torch.tensor(1e-3) if tensor_rate else 1e-3
    groups = [{"params": net[0].parameters()}, {"params": net[3].parameters(), "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, rate)
    calls = []

    def step():
        calls.append([float(group["lr"]) for group in optimizer.param_groups])
        if fails and len(calls) == 30:
            raise RuntimeError("no more rows")
        optimizer.zero_grad()
        loss = net(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step()
    before = training_state(net, optimizer)
    if fails:
        with pytest.raises(RuntimeError, match="no more rows"):
            sweep(step, net, optimizer)
    else:
        found = sweep(step, net, optimizer, num_steps=40)
        assert found.losses
    assert equal(before, training_state(net, optimizer))
    fast, slow = calls[10]
    assert slow == pytest.approx(0.1 * fast)
    step()
