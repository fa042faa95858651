"""A policy that is compared with itself is told, in whichever way it came to be its own reference;
one that was a moment ago what it is compared with is not.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def shared(policy):
    """Another module whose weights lie where the policy's lie."""
    other = made()
    for mine, theirs in zip(other.parameters(), policy.parameters(), strict=True):
        mine.data = theirs.data
    return other.requires_grad_(requires_grad=False).eval()


def logs(model, batch):
    return model(batch["x"]).log_softmax(-1)


def frozen_logs(model, batch):
    with torch.no_grad():
        return logs(model, batch)


def chosen(log_probs, batch):
    return log_probs.gather(-1, batch["y"][:, None]).squeeze(-1)


def exact(now, before, batch):
    return F.cross_entropy(now, batch["y"]) + (now.exp() * (now - before)).sum(-1).mean()


def of_torch(now, before, batch):
    distance = F.kl_div(now, before, log_target=True, reduction="batchmean")
    return F.nll_loss(now, batch["y"]) + distance


def estimated(now, before, batch):
    """Without a gradient where both are the same, as TRL and others have it."""
    gap = chosen(before, batch) - chosen(now, batch)
    return F.nll_loss(now, batch["y"]) + (gap.exp() - gap - 1.0).mean()


def preferred(now, before, batch):
    gain = chosen(now, batch) - chosen(before, batch)
    return -F.logsigmoid(0.1 * (gain[:4] - gain[4:])).mean()


def squared(now, before, batch):
    gain = chosen(now, batch) - chosen(before, batch)
    return (gain[:4] - gain[4:] - 5.0).square().mean()


def hinged(now, before, batch):
    gain = chosen(now, batch) - chosen(before, batch)
    return (1.0 - gain[:4] + gain[4:]).relu().mean()


def linear(now, before, batch):
    return -((chosen(now, batch) - chosen(before, batch)) * batch["a"]).mean()


def exponential(now, before, batch):
    """Its value is -1 at each update."""
    del batch
    return -(now - before).exp().mean()


def surrogate(now, before, batch):
    ratio = (chosen(now, batch) - chosen(before, batch)).exp()
    return -torch.minimum(ratio * batch["a"], ratio.clamp(0.8, 1.2) * batch["a"]).mean()


def train(loss, reference, *, lr=0.1, epochs=1, steps=5):
    torch.manual_seed(1)
    policy = made()
    compared = reference(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    for _ in range(steps):
        batch = {"x": torch.randn(8, 6), "y": torch.randint(0, 5, (8,)), "a": torch.randn(8)}
        before = None
        for _ in range(epochs):
            now = logs(policy, batch)
            before = frozen_logs(compared, batch) if before is None else before
            optimizer.zero_grad()
            loss(now, before, batch).backward()
            optimizer.step()


def said(folder, *args, **options):
    return findings_of(folder, lambda: train(*args, **options)).get("NS118")


def itself(policy):
    return policy


@pytest.mark.parametrize("loss", [exact, of_torch, estimated])
@pytest.mark.parametrize("reference", [itself, shared])
def test_a_policy_that_is_its_own_reference_is_told(loss, reference, tmp_path):
    finding = said(tmp_path, loss, reference)
    assert finding is not None
    assert "itself" in finding.title
    assert "test_references.py:" in " ".join(finding.lines)


def test_preferences_are_told_where_two_models_share_their_memory(tmp_path):
    assert said(tmp_path, preferred, shared) is not None


@pytest.mark.parametrize("loss", [preferred, squared, hinged])
def test_preferences_of_a_policy_over_itself_are_told(loss, tmp_path):
    """They have a gradient, and the loss is the same number at each update."""
    finding = said(tmp_path, loss, itself)
    assert finding is not None
    assert "itself" in finding.title


@pytest.mark.parametrize("loss", [linear, exponential, surrogate])
def test_surrogates_of_a_policy_that_acts_anew_each_time_are_left_in_peace(loss, tmp_path):
    assert said(tmp_path, loss, itself) is None


@pytest.mark.parametrize(
    "loss", [exact, of_torch, estimated, preferred, squared, hinged, linear, exponential]
)
def test_a_copy_is_left_in_peace(loss, tmp_path):
    assert said(tmp_path, loss, copy.deepcopy) is None


@pytest.mark.parametrize(("loss", "epochs"), [(surrogate, 1), (surrogate, 2), (exact, 2)])
def test_a_policy_and_what_it_was_when_it_acted_are_left_in_peace(loss, epochs, tmp_path):
    assert said(tmp_path, loss, itself, epochs=epochs) is None


def test_updates_that_have_not_begun_are_left_in_peace(tmp_path):
    """Nobody can tell a reference from a policy that has not moved."""
    assert said(tmp_path, exact, copy.deepcopy, lr=0.0) is None


def test_a_pull_towards_the_first_weights_is_left_in_peace(tmp_path):
    def run():
        policy = made()
        first = [p.detach().clone() for p in policy.parameters()]
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for _ in range(5):
            x, y = torch.randn(8, 6), torch.randint(0, 5, (8,))
            pairs = zip(policy.parameters(), first, strict=True)
            pull = sum((p - was).square().sum() for p, was in pairs)
            optimizer.zero_grad()
            (F.cross_entropy(policy(x), y) + pull).backward()
            optimizer.step()

    assert "NS118" not in findings_of(tmp_path, run)


def test_ratios_to_the_very_same_numbers_are_left_in_peace(tmp_path):
    def run():
        policy = made()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for _ in range(5):
            batch = {"x": torch.randn(8, 6), "y": torch.randint(0, 5, (8,)), "a": torch.randn(8)}
            now = logs(policy, batch)
            optimizer.zero_grad()
            surrogate(now, now.detach(), batch).backward()
            optimizer.step()

    assert "NS118" not in findings_of(tmp_path, run)
