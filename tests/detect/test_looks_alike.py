"""Ratios of single tokens, reads at one place of padded rows and weights that shrink: each as a
fault, and as healthy scripts have it.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)
FAR = -20.0


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids):
        logits = self.head(self.table(ids[:, :-1]))
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def update(model, loss_fn, *, lr=1e-2, steps=3, **options):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model).backward()
        optimizer.step()


def estimate(model, *, far, masked):
    """The k3 estimate of the distance to a reference, with a weight that hides it."""
    ids = torch.randint(16, (4, 9))
    logps = model(ids)
    reference = logps.detach() - 0.1 * torch.rand_like(logps)
    kept = torch.ones_like(logps)
    if far:  # places of padding, where log-probabilities are filled up with 0
        reference[:, -2:] = 0.0
        logps = torch.cat([logps[:, :-2], logps[:, -2:] + FAR], dim=1)
        kept[:, -2:] = 0.0 if masked else 1.0
    gap = reference - logps
    distance = ((torch.exp(gap) - gap - 1.0) * kept).sum() / kept.sum()
    return -logps.mean() + 1e-12 * distance


@pytest.mark.parametrize(
    ("far", "masked", "told"),
    [(True, False, True), (True, True, False), (False, False, False)],
    ids=["a token far off", "padding alone", "near"],
)
def test_ratios_of_single_tokens(tmp_path, far, masked, told):
    model = Policy()
    findings = findings_of(
        tmp_path, lambda: update(model, lambda m: estimate(m, far=far, masked=masked))
    )
    assert ("NS702" in findings) == told


class Reader(nn.Module):
    """Classifies rows by what ``read`` makes of the states of their tokens."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix = nn.Embedding(16, 8, padding_idx=0), nn.Linear(8, 8)
        self.head, self.read = nn.Linear(8, 3), read

    def forward(self, ids):
        return self.head(self.read(self.mix(self.table(ids)).tanh(), ids != 0))


def rows(side):
    ids = torch.randint(1, 16, (4, 6))
    for row, length in enumerate((6, 4, 3, 5)):
        ids[row, length:] = 0
    return ids.flip(1) if side == "left" else ids


def at_the_end(states, kept):
    rows = torch.arange(len(states))
    return states[rows, torch.full_like(rows, states.shape[1] - 1)]


def each_place(states, kept):
    total = torch.zeros_like(states[:, 0])
    for place in range(states.shape[1]):
        total = total + states[:, place] * kept[:, place, None]
    return total


def masked_last(states, kept):
    return states.mean(1) + states[:, -1] * kept[:, -1, None]


@pytest.mark.parametrize(
    ("side", "read", "told"),
    [
        ("right", at_the_end, True),
        ("left", lambda states, kept: states[:, -1], False),
        ("right", lambda states, kept: states[:, 0], False),
        ("right", each_place, False),
        ("right", masked_last, False),
    ],
    ids=["last of right", "last of left", "first", "each place", "masked"],
)
def test_reads_at_one_place(tmp_path, side, read, told):
    model, ids, y = Reader(read), rows(side), torch.tensor([0, 1, 2, 0])
    findings = findings_of(tmp_path, lambda: update(model, lambda m: F.cross_entropy(m(ids), y)))
    assert ("NS208" in findings) == told


@pytest.mark.parametrize(
    ("decay", "ridge", "told"),
    [(3.0, 0.0, True), (1e-2, 0.0, False), (0.0, 2.0, False)],
    ids=["a decay that undoes", "a usual decay", "a loss that is the weights' size"],
)
def test_weights_that_shrink(tmp_path, decay, ridge, told):
    model = Reader(lambda states, kept: states[:, 0])
    ids, y = rows("right"), torch.tensor([0, 1, 2, 0])

    def loss(m):
        return F.cross_entropy(m(ids), y) + ridge * sum(p.square().sum() for p in m.parameters())

    options = {"lr": 0.1, "steps": 18, "weight_decay": decay}
    findings = findings_of(tmp_path, lambda: update(model, loss, **options))
    assert ("NS113" in findings) == told
