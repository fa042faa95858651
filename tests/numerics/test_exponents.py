"""Values counted by powers of two."""

import pytest
import torch

from nanstop.numerics.exponents import MOST, exponent_counts

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_values_are_counted_by_exponent(dtype):
    values = torch.tensor([[1.0, -1.5, 2.0, 0.0], [0.25, NAN, INF, -INF]], dtype=dtype)
    assert exponent_counts(values) == ((-2, 1), (0, 2), (1, 1))


def test_the_ends_of_a_format_are_where_they_are():
    assert exponent_counts(torch.tensor([65504.0, 2.0**-24]).half()) == ((-24, 1), (15, 1))


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3),
        torch.full((2,), NAN),
        torch.arange(4),
        torch.empty(0),
        torch.ones(2, dtype=torch.complex64),
        torch.empty(2, device="meta"),
        torch.ones(2).to_sparse(),
    ],
)
def test_what_has_no_values_to_count_has_no_counts(value):
    assert exponent_counts(value) == ()


def test_of_a_large_tensor_a_part_is_counted_and_nothing_is_changed():
    large = torch.ones(3, MOST, requires_grad=True)
    before = large._version
    ((exponent, count),) = exponent_counts(large)
    assert (exponent, large._version) == (0, before)
    assert MOST // 2 <= count <= MOST
