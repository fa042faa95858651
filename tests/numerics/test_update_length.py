import math

import pytest
import torch

from nanstop.numerics.update_length import held_against

NAMED = {"a": torch.zeros(100), "b": torch.zeros(4), "c": torch.zeros(4)}
A, B, C = NAMED.values()


@pytest.mark.parametrize(
    ("groups", "of_b"),
    [
        ([{"params": [A, B, C]}], 0.2),  # a tenth of 10 / sqrt(100), times sqrt(4)
        (
            [{"params": [A]}, {"params": [B, C]}],
            0.003,
        ),  # what others do at another rate is no measure
        ([], 0.2),
    ],
)
def test_what_hardly_moves_may_go_as_far_as_others_of_its_group(groups, of_b):
    held = held_against({"a": 10.0, "b": 1e-6, "c": 0.03}, NAMED, groups)
    assert held["a"] == 10.0
    assert held["b"] == pytest.approx(of_b)


def test_what_is_not_finite_in_float32_measures_nothing():
    held = held_against({"a": math.inf, "b": math.nan, "c": 0.03}, NAMED, [])
    assert held["a"] == math.inf
    assert math.isnan(held["b"])
    assert held["c"] == 0.03
