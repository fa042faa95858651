"""Which samples of a micro-batch fail by themselves, also of many."""

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.prove.bad_samples import bad_places, bad_rows, healthy_rows
from nanstop.prove.failing_step import FailingStep


def failing(x, loss):
    torch.manual_seed(0)
    step = FnStep(nn.Linear(3, 2), lambda net, batch: loss(net(batch["x"]), batch["x"]), [{"x": x}])
    step.losses = (float("nan"),)
    return FailingStep(step=step, micro=0, micros=(0,))


def logarithm(out, x):
    return (out.square().mean(1) * x[:, 0].log()).mean()


@pytest.mark.parametrize("num", [7, 64, 300])
def test_samples_that_fail_are_found_among_many(num):
    x = torch.rand(num, 3) + 0.5
    x[[2, num - 2], 0] = 0.0
    step = failing(x, logarithm)
    assert bad_rows(step) == (2, num - 2)
    assert healthy_rows(step) == tuple(row for row in range(num) if row not in (2, num - 2))


def test_nothing_is_said_of_samples_that_fail_with_each_other_alone():
    x = torch.rand(64, 3)
    x[[5, 50]] = -1.0
    step = failing(x, lambda out, x: out.sum() * (1.5 - (x[:, 0] < 0).sum()).log())
    assert bad_rows(step) is None
    assert healthy_rows(step) is None


def test_not_every_sample_of_many_that_all_fail_is_run(monkeypatch):
    step = failing(torch.zeros(5000, 3), logarithm)
    runs = []
    attempt = FailingStep.attempt
    monkeypatch.setattr(
        FailingStep, "attempt", lambda *given, **also: runs.append(1) or attempt(*given, **also)
    )
    assert bad_rows(step) is None
    assert len(runs) <= 66


def of_pairs(out, x):
    """The loss of the right one of as many pairs as the step has always had."""
    units = out / out.norm(dim=-1, keepdim=True) * x[:, :1].log()
    return torch.nn.functional.cross_entropy(units @ units.T, torch.arange(8))


def test_a_loss_that_counts_on_the_number_of_samples_is_run_with_as_many():
    x = torch.rand(8, 3) + 0.5
    x[5, 0] = 0.0
    step = failing(x, of_pairs)
    assert bad_rows(step) is None
    assert [place.sample for place in bad_places(step)] == [5]


def test_no_sample_is_named_where_copies_of_any_fail():
    x = torch.rand(8, 3) + 0.5
    x[5] = x[2]

    def nearest(out, x):
        apart = (out[:, None] - out[None]).square().sum(-1) + torch.eye(8)
        return apart.log().mean() + torch.arange(8).mul(out[:, 0]).sum()

    assert bad_places(failing(x, nearest)) is None
