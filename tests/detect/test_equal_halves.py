"""Pairs of a row and its own copy are told; copies that are meant, and single ones, are not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)


def pairs(step, *, same):
    first = torch.randint(1, 9, (4, 6))
    second = first if step in same else torch.randint(1, 9, (4, 6))
    return torch.cat([first, second])


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, 16), nn.Linear(16, 9)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids):
        return self.head(self.table(ids)).log_softmax(-1)


def preferred(policy, before, ids):
    """As DPO has it: the first half is chosen, the second rejected."""
    now, past = (
        one(ids[:, :-1]).gather(-1, ids[:, 1:, None]).sum((1, 2)) for one in (policy, before)
    )
    gain = now - past.detach()
    return -F.logsigmoid(0.1 * (gain[:4] - gain[4:])).mean()


def likely(policy, _before, ids):
    return F.nll_loss(policy(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def together(policy, _before, ids):
    """Two views of one text, told apart by dropout."""
    views = policy.drop(policy.table(ids)).mean(1)
    return F.cross_entropy(views[:4] @ views[4:].T, torch.arange(4))


def train(loss, *, same=range(8), steps=8):
    torch.manual_seed(1)
    policy = Texts()
    before = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for step in range(steps):
        ids = pairs(step, same=same)
        optimizer.zero_grad()
        loss(policy, before, ids).backward()
        optimizer.step()


def found(folder, loss, **options):
    return findings_of(folder, lambda: train(loss, **options)).get("NS701")


def test_a_row_that_is_compared_with_its_own_copy(tmp_path):
    finding = found(tmp_path, preferred)
    assert finding.title == "each row is compared with a copy of itself"
    assert finding.cause.startswith("of 8 rows the second half is a copy of the first")
    assert finding.confidence == "certain"


@pytest.mark.parametrize("loss", [likely, together])
def test_rows_that_are_there_twice_and_teach(tmp_path, loss):
    assert not found(tmp_path, loss)


@pytest.mark.parametrize("same", [(), (0,), (0, 1)])
def test_pairs_that_differ_soon(tmp_path, same):
    assert not found(tmp_path, preferred, same=same)
