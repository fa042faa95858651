"""Whatever is done to gradients between two stations is what their account says."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanstop.measure.accounts.gradient_accounts import GradientAccounts
from nanstop.measure.accounts.gradient_balance import balance, is_even
from nanstop.measure.accounts.samples import Backward, Samples
from nanstop.records import StepId

AT = StepId(run="r", step=1)
SIZE = 12


def vector(seed):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def window(seeds, cleared, factor):
    """The samples of a window: before each backward in ``cleared`` gradients are set to 0; what the
    last leaves is multiplied by ``factor``.
    """
    still, now, backwards = vector(99), torch.zeros(SIZE, dtype=torch.float64), []
    for place, seed in enumerate(seeds):
        before = torch.zeros_like(now) if place in cleared else now
        now = before + vector(seed)
        backwards.append(Backward(before, now, still))
    return Samples(backwards, consumed=factor * now, weights=still, updated=still + 1.0)


SEEDS = st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True)
FACTORS = st.floats(0.01, 1.0)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(SEEDS, FACTORS)
def test_all_that_arrives_is_consumed(seeds, factor):
    account = balance(window(seeds, (), factor), AT, "SGD")
    assert is_even(account)
    assert abs(account.factor - factor) < 1e-6
    assert account.share_moved == 1.0
    assert account.arrived == float(sum(vector(seed) for seed in seeds).norm())


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(SEEDS.filter(lambda seeds: len(seeds) > 1), st.integers(1, 4), FACTORS)
def test_what_is_cleared_is_lost_and_nothing_else(seeds, place, factor):
    place = min(place, len(seeds) - 1)
    account = balance(window(seeds, (place,), factor), AT, "SGD")
    assert [one.is_lost for one in account.contributions] == [i < place for i in range(len(seeds))]
    assert not is_even(account)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(SEEDS, st.integers(60, 99), FACTORS)
def test_what_is_left_is_carried_until_it_is_cleared(seeds, left, factor):
    samples = window(seeds, (), factor)
    samples.left = vector(left)
    assert not balance(samples, AT, "SGD").is_carried
    for one in samples.backwards:
        one.before, one.after = one.before + samples.left, one.after + samples.left
    samples.consumed = factor * samples.backwards[-1].after
    assert balance(samples, AT, "SGD").is_carried


def test_a_mask_is_no_factor_and_nothing_is_nothing():
    samples = window([1], (), 1.0)
    samples.consumed = samples.consumed * (vector(2) > 0)
    assert balance(samples, AT, "SGD").factor is None
    samples.consumed = torch.zeros(SIZE, dtype=torch.float64)
    assert balance(samples, AT, "SGD").factor == 0.0
    assert balance(Samples(samples.backwards), AT, "SGD") is None


def test_numbers_in_place_of_nan_are_counted():
    samples = window([1], (), 1.0)
    samples.backwards[0].after = torch.where(vector(2) > 0, torch.nan, samples.backwards[0].after)
    samples.consumed = samples.backwards[0].after.nan_to_num()
    account = balance(samples, AT, "SGD")
    assert account.num_hidden == int((vector(2) > 0).sum()) == account.contributions[0].num_bad
    assert account.factor is None


def test_updates_0_1_2_4_and_8_are_looked_at_and_no_other():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    accounts, seen = GradientAccounts(), []
    accounts.made(optimizer)
    for step in range(10):
        loss = weight.sum()
        accounts.guarded(accounts.before_backward, [loss])
        loss.backward()
        accounts.guarded(accounts.after_backward, None)
        accounts.guarded(accounts.updating, optimizer)
        optimizer.step()
        at = StepId(run="r", step=step)
        if accounts.updated(optimizer, lambda at=at: at) is not None:
            seen.append(step)
        optimizer.zero_grad()
    assert seen == [0, 1, 2, 4, 8]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_an_update_that_breaks_weights_has_shrunk_none(broken, capfd):
    """MKL refuses such numbers, on stderr and with an exception."""
    samples = window((0, 1), (), 1.0)
    samples.updated = samples.updated.clone()
    samples.updated[0] = broken
    assert balance(samples, AT, "SGD").shrunk == 0.0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("size", [1.0, 1e6, 1e12, 1e30])
def test_rounding_of_a_huge_update_is_no_decay(size):
    samples = window((0, 1), (), 1.0)
    samples.consumed = vector(2) * size
    samples.updated = samples.weights - 30.0 * samples.consumed
    assert abs(balance(samples, AT, "SGD").shrunk) < 1e-3
    samples.updated = samples.weights * -2.0 - 0.1 * vector(2)
    assert math.isclose(balance(samples, AT, "SGD").shrunk, 3.0, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("factors", "of_all"),
    [((1.0, 1.0), 1.0), ((1.0, 0.0), 1.0), ((0.0, 0.0), 0.0), ((1.0, 2.0), None)],
)
def test_a_mean_of_nothing_says_nothing_of_the_factor_of_others(factors, of_all):
    still = torch.zeros(SIZE)
    samples = Samples([Backward(still, still, still, loss_factor=one) for one in factors])
    assert samples.loss_factor == of_all
