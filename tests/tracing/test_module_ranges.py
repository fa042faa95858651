"""The range of each module's output in one run of a micro-batch, which leaves no trace."""

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.tracing.module_ranges import module_ranges


class Split(nn.Module):
    """Puts out several values, some of which have no range."""

    def forward(self, rows):
        return {"once": rows, "twice": 2.0 * rows, "sign": rows.bool(), "none": rows[:0]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.split = Split()
        self.unused = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, rows):
        twice = self.inner(self.inner(rows))
        return self.drop(self.split(twice)["twice"])


@pytest.fixture
def one_step():
    torch.manual_seed(0)
    net = Net()
    batch = {"rows": torch.randn(4, 3)}
    return net, FnStep(net, lambda model, batch: model(batch["rows"]).square().mean(), [batch])


def test_modules_come_in_the_order_in_which_they_end(one_step):
    net, step = one_step
    found = module_ranges(step)
    assert list(found) == ["inner", "split", "drop", "the model"]
    rows = step.batches[0]["rows"]
    once = net.inner(rows)
    largest = max(once.abs().max(), net.inner(once).abs().max()).item()
    assert found["inner"] == largest
    assert found["split"] == 2.0 * net.inner(once).abs().max().item()


def test_what_is_not_finite_is_infinite(one_step):
    net, step = one_step
    with torch.no_grad():
        net.inner.weight[0, 0] = float("nan")
    assert module_ranges(step)["inner"] == float("inf")


def test_it_is_undone(one_step):
    net, step = one_step
    before = torch.get_rng_state()
    module_ranges(step)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in net.parameters())
    assert not nn.modules.module._global_forward_hooks


def test_what_a_transform_calls_has_no_range(one_step):
    net, step = one_step

    def loss(model, batch):
        rows = batch["rows"]
        far = torch.vmap(lambda row: model.inner(row) * 100)(rows).square().mean()
        return model(rows).square().mean() + far

    transformed = FnStep(net, loss, step.batches)
    assert module_ranges(transformed) == module_ranges(step)
