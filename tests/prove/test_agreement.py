"""Gradients agree parameter by parameter, in direction and in length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanstop.prove.reference import agreement
from nanstop.prove.reference.agreement import cosine, largest_gap, loss_gap, nearness

G, H = torch.tensor([3.0, 4.0]), torch.tensor([0.5, -1.0])
numbers = st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3)
vectors = st.lists(numbers, min_size=1, max_size=5).map(torch.tensor)
gradients = st.dictionaries(st.sampled_from("abc"), vectors, min_size=1)


@pytest.mark.parametrize(
    ("found", "gap"),
    [
        ({"w": G}, 0.0),
        ({"w": 1000 * G}, 999.0),
        ({"w": -G}, 2.0),
        ({}, 1.0),
        ({"w": G, "v": H}, float(H.norm()) / 0.5),  # the exact run has none for it
    ],
)
def test_length_and_direction_of_every_parameter_count(found, gap):
    assert largest_gap(found, {"w": G}) == pytest.approx(gap)


def test_a_small_gradient_is_measured_by_the_large_ones():
    exact = {"w": torch.tensor([100.0]), "bias": torch.tensor([1e-6])}
    assert largest_gap(exact | {"bias": torch.tensor([-1e-3])}, exact) == pytest.approx(
        1e-4, rel=0.01
    )


def test_a_gradient_that_only_one_has_is_zero_in_the_other():
    assert cosine({"w": G, "v": G}, {"w": G}) == pytest.approx(0.5**0.5)
    assert cosine({}, {}) == 1.0


@given(gradients)
def test_equal_gradients_have_no_gap_and_no_angle(found):
    assert largest_gap(found, found) == 0.0
    assert cosine(found, found) == pytest.approx(1.0)


@given(gradients, st.floats(1.5, 100.0))
def test_a_factor_on_one_parameter_alone_is_seen(found, factor):
    name = max(found, key=lambda one: float(found[one].norm()))
    changed = found | {name: factor * found[name]}
    assert largest_gap(changed, found) == pytest.approx(factor - 1.0, rel=1e-3)


def test_a_loss_gap_is_relative():
    assert loss_gap(2.2, 2.0) == pytest.approx(0.1)


@given(gradients, gradients)
def test_direction_and_length_are_had_of_one_reading(first, second):
    class Read(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    second = {name: one for name, one in second.items() if name not in first} | {
        name: one * 1.5 for name, one in first.items()
    }
    asked = []
    assert nearness(Read(first), second) == (cosine(first, second), largest_gap(first, second))
    assert asked == list(first)


@pytest.mark.parametrize(
    ("places", "there"),
    [
        (("cpu", "cpu"), "cpu"),
        (("cuda:1", "cuda:1"), "cuda:1"),
        (("cuda:0", "cpu"), "cuda:0"),  # what waits in host memory comes back
        (("cpu", "cuda:0"), "cuda:0"),
        (("cuda:0", "cuda:1"), "cpu"),
        (("mps", "cpu"), "cpu"),
    ],
)
def test_gradients_are_compared_where_they_are_computed(monkeypatch, places, there):
    monkeypatch.setattr(agreement, "has_float64", lambda device: device.type != "mps")
    assert agreement._place([torch.device(one) for one in places]) == torch.device(there)
