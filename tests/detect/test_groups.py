"""An advantage that is a reward less itself is told however it is written; groups of several, and
means of one value that the objective does not hang on, are not.
"""

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)
ROWS = 12


def policy_gradient(advantages_of):
    def loss(model, batch):
        scores = model(batch["x"]).log_softmax(-1)
        return -(advantages_of(batch["reward"]) * scores[:, 0]).mean()

    return loss


def groups_of_one(reward):
    groups = reward.view(-1, 1)
    return (groups - groups.mean(-1, keepdim=True)).flatten()


def wrong_dimension(reward):
    column = reward[:, None]
    return (column - torch.mean(column, 1, keepdim=True))[:, 0]


def repeated_means(reward):
    return reward - reward.view(-1, 1).mean(1).repeat_interleave(1)


def in_units(reward):
    groups = reward.view(-1, 1)
    return (
        (groups - groups.mean(1, keepdim=True)) / (groups.std(1, correction=0)[:, None] + 1)
    ).view(-1)


@pytest.mark.parametrize("advantages", [groups_of_one, wrong_dimension, repeated_means, in_units])
def test_a_value_less_its_own_mean_is_told(advantages):
    found = looked_at(policy_gradient(advantages))
    (row,) = found["objective"]
    assert (row.given, row.width, row.op) == ("own_mean", ROWS, "aten.sub.Tensor")
    assert row.line.startswith("test_groups.py:")
    assert found["are_all_zero"]


def groups_of_four(reward):
    groups = reward.view(-1, 4)
    return (groups - groups.mean(-1, keepdim=True)).flatten()


def of_all(reward):
    return reward - reward.mean()


def equal_rewards(reward):
    same = torch.ones_like(reward)
    return same - same.view(-1, 4).mean(1).repeat_interleave(4)


def beside_it(reward):
    column = reward[:, None]
    return of_all(reward) + 0.0 * (column - column.mean(1, keepdim=True))[:, 0]


@pytest.mark.parametrize("advantages", [groups_of_four, of_all, equal_rewards, beside_it])
def test_other_differences_are_left_in_peace(advantages):
    assert looked_at(policy_gradient(advantages))["objective"] == ()


def looked_at(loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    step = FnStep(model, loss, [{"x": torch.randn(ROWS, 5), "reward": torch.randn(ROWS)}])
    step.run(0)
    return at_once(step)
