"""What is read from the losses of a sweep:
the right rates, and nothing where there is only noise.
"""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanstop.commands.lr_range.curve import analyse, has_diverged, rates
from nanstop.errors import NanstopError

PLANNED = rates(1e-6, 1.0, 100)


def curve(rate, noise=0.0, rng=None):
    """Flat at 3 up to 1e-4, falling to 2 at 1e-2, exploding from 1e-1 on."""
    at = math.log10(rate)
    loss = 3.0 - min(max((at + 4.0) / 2.0, 0.0), 1.0)
    loss += 10.0 ** (3.0 * (at + 1.0)) if at > -1.0 else 0.0
    return loss + (rng.gauss(0.0, noise) if rng else 0.0)


def test_rates_rise_by_one_factor():
    assert PLANNED[0] == pytest.approx(1e-6)
    assert PLANNED[-1] == pytest.approx(1.0)
    factors = [after / before for before, after in pairwise(PLANNED)]
    assert max(factors) == pytest.approx(min(factors))


@pytest.mark.parametrize(("low", "high", "steps"), [(1.0, 0.1, 50), (0.0, 1.0, 50), (1e-6, 1.0, 5)])
def test_rates_that_make_no_sweep(low, high, steps):
    with pytest.raises(NanstopError, match="a sweep"):
        rates(low, high, steps)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_the_places_of_a_known_curve(noise):
    rng = random.Random(0)
    found = analyse(PLANNED, 3.0, [curve(rate, noise, rng) for rate in PLANNED])
    assert found.status == "found"
    assert 5e-5 < found.begins < 6e-4
    assert 1e-4 < found.steepest < 1e-2
    assert 5e-3 < found.lowest < 1.5e-1
    assert 0.05 < found.diverges < 1.0
    assert found.begins == found.low <= found.high < found.lowest
    assert 0.7 * noise <= found.noise <= 2.0 * noise


@given(st.integers(0, 500), st.floats(0.01, 10.0))
def test_noise_alone_suggests_nothing(seed, noise):
    rng = random.Random(seed)
    found = analyse(PLANNED, 3.0, [3.0 + rng.gauss(0.0, noise) for _ in PLANNED])
    assert (found.status, found.low, found.high) == ("flat", None, None)
    assert "noise" in found.message


def test_a_loss_that_only_rises_suggests_nothing():
    found = analyse(PLANNED, 3.0, [3.0 + 100.0 * rate for rate in PLANNED])
    assert found.status == "flat"
    assert found.diverges is not None


def test_losses_below_zero_are_losses_too():
    found = analyse(PLANNED, -7.0, [curve(rate) - 10.0 for rate in PLANNED])
    assert found.status == "found"
    assert 0.05 < found.diverges < 1.0


def test_a_sweep_that_ended_at_nan_diverged_there():
    losses = [curve(rate) for rate in PLANNED[:70]] + [math.nan]
    found = analyse(PLANNED, 3.0, losses)
    assert found.status == "found"
    assert found.diverges == PLANNED[70]
    assert len(found.rates) == len(found.losses) == 71
    early = analyse(PLANNED, 3.0, [3.0, 2.9, math.inf])
    assert (early.status, early.diverges) == ("too_short", PLANNED[2])
    assert "not finite after 2 steps" in early.message


def test_when_a_sweep_may_end():
    losses = [curve(rate) for rate in PLANNED]
    ends = next(n for n in range(100) if has_diverged(3.0, losses[:n]))
    assert 0.1 < PLANNED[ends - 1] < 1.0
    assert not has_diverged(3.0, [3.0, 2.9])
    assert has_diverged(3.0, [math.nan])
    rng = random.Random(1)
    noisy = [3.0 + rng.gauss(0.0, 0.5) for _ in range(100)]
    assert not any(has_diverged(3.0, noisy[:n]) for n in range(100))
