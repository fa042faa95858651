"""A policy whose rollout is scored otherwise than it is trained is told, with what differs; ratios
to another model, to what a mask leaves out, and to another text are not.
"""

import copy

import pytest
import torch
from torch import nn

from loop_scripts import findings_of

torch.set_num_threads(1)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(12, 16)
        self.mix, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)
        nn.init.normal_(self.head.weight)

    def forward(self, ids, places, scale=1.0):
        hidden, _ = self.mix(self.tokens(ids) + self.places(places))
        return self.head(hidden) * scale


def scores(policy, ids, places, scale=1.0):
    logits = policy(ids[:, :-1], places[:, :-1], scale)
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def batch_of(step):
    torch.manual_seed(step)
    ids = torch.randint(1, 20, (4, 12))
    for row, padding in enumerate((0, 2, 4, 6)):
        ids[row, :padding] = 0
    return ids, torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None], (ids != 0)


def trained(scored, objective, *, num_inner=1):
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(requires_grad=False)
    for parameter in reference.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    for step in range(4):
        ids, gains, real = batch_of(step)
        places = torch.arange(12).expand(4, -1)
        with torch.no_grad():
            old = scored(policy, ids, places, real)
            other = scores(reference, ids, places)
        for _ in range(num_inner):
            new = scores(policy, ids, places)
            loss = objective(new, old, other, gains, real[:, :-1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def clipped(new, old, _other, gains, _real):
    ratio = torch.exp(new - old)
    return -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()


def masked(new, old, _other, gains, real):
    ratio = torch.exp(new - old)
    return -(torch.where(real, ratio, 1.0) * gains).mean()


def with_distance(new, old, other, gains, real):
    gap = other - new
    return clipped(new, old, other, gains, real) + 0.1 * (gap.exp() - gap - 1.0).mean()


def same(policy, ids, places, _real):
    return scores(policy, ids, places)


def of_the_mask(policy, ids, _places, real):
    return scores(policy, ids, (real.long().cumsum(1) - 1).clamp(min=0))


def colder(policy, ids, places, _real):
    return scores(policy, ids, places, 1.5)


def noise_at_padding(policy, ids, places, real):
    return scores(policy, ids, places) - torch.where(real[:, :-1], 0.0, 3.0)


def of_another_text(policy, ids, places, _real):
    return scores(policy, ids.flip(0), places)


@pytest.mark.parametrize("objective", [clipped, with_distance])
@pytest.mark.parametrize("scored", [of_the_mask, colder])
def test_a_rollout_that_is_scored_otherwise_is_told(tmp_path, scored, objective):
    found = findings_of(tmp_path, lambda: trained(scored, objective))["NS703"]
    assert found.confidence == "likely"
    assert "two passes of one model" in found.cause
    assert "exp(new - old)" in found.lines[0]
    named = "one of them reads `places.weight` at other places"
    assert (named in found.lines) == (scored is of_the_mask)


@pytest.mark.parametrize(
    ("scored", "objective"),
    [
        (same, clipped),
        (same, with_distance),
        (noise_at_padding, masked),
        (of_another_text, clipped),
    ],
)
@pytest.mark.parametrize("num_inner", [1, 3])
def test_ratios_that_are_meant_to_be_what_they_are(tmp_path, scored, objective, num_inner):
    found = findings_of(tmp_path, lambda: trained(scored, objective, num_inner=num_inner))
    assert "NS703" not in found


def test_adapters_that_are_switched_off_are_a_reference(tmp_path):
    class Adapted(Policy):
        def __init__(self):
            super().__init__()
            self.requires_grad_(requires_grad=False)
            self.adapter, self.is_on = nn.Linear(16, 20, bias=False), True

        def forward(self, ids, places, scale=1.0):
            hidden, _ = self.mix(self.tokens(ids) + self.places(places))
            more = self.adapter(hidden) if self.is_on else 0.0
            return self.head(hidden) * scale + more

    def train():
        policy = Adapted()
        optimizer = torch.optim.Adam(policy.adapter.parameters(), 1e-2)
        for step in range(4):
            ids, gains, real = batch_of(step)
            places = torch.arange(12).expand(4, -1)
            with torch.no_grad():
                old = scores(policy, ids, places)
                policy.is_on = False
                other = scores(policy, ids, places)
                policy.is_on = True
            loss = with_distance(scores(policy, ids, places), old, other, gains, real)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert "NS703" not in findings_of(tmp_path, train)
