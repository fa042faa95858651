"""The window's reading, and naming what is not finite."""

import math

import pytest
import torch

from nanstop.core.sentinel import (
    nonfinite,
    nonfinite_gradients,
    read_window,
    tally_gradients,
    total_norm,
)
from nanstop.records import GradientTally


def parameters(*sizes, dtype=torch.float32):
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for size in sizes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def test_a_reading_is_the_values_of_the_window():
    reading = read_window(
        [torch.tensor(1.5, dtype=torch.float16), torch.tensor(float("nan"))],
        torch.tensor(2.0, dtype=torch.bfloat16),
    )
    assert reading.losses[0] == 1.5
    assert math.isnan(reading.losses[1])
    assert (reading.norm, reading.found_inf) == (2.0, False)
    assert reading.bad_losses == (1,)
    assert not reading.quiet


@pytest.mark.parametrize(
    ("loss", "norm", "flag", "quiet"),
    [
        (1.0, 1.0, 0.0, True),
        (1.0, 1.0, 1.0, False),
        (1.0, math.inf, 0.0, False),
        (-math.inf, 1.0, 0.0, False),
    ],
)
def test_quiet_means_nothing_to_look_at(loss, norm, flag, quiet):
    values = (torch.tensor(value) for value in (loss, norm, flag))
    one, total, found = values
    assert read_window([one], total, [found]).quiet is quiet


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_reusing_the_norm_is_clipping_bitwise(norm_type, dtype):
    ours, theirs = parameters(5, (3, 4), dtype=dtype), parameters(5, (3, 4), dtype=dtype)
    norm = total_norm(ours, norm_type)
    torch.nn.utils.clip_grads_with_norm_(ours, 0.5, norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
    assert torch.equal(norm, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_names_of_bad_tensors_in_order():
    tensors = {
        "b": torch.tensor([1.0, float("nan")]),
        "fine": torch.tensor([torch.finfo(torch.float16).max], dtype=torch.float16),
        "a": torch.tensor([[float("-inf")]], dtype=torch.float16),
        "packed": torch.zeros(3, dtype=torch.uint8),
        "empty": torch.empty(0),
        "absent": None,
        "sparse": torch.sparse_coo_tensor([[0]], [float("inf")], (4,), check_invariants=True),
    }
    assert nonfinite(tensors) == ("b", "a", "sparse")
    assert nonfinite({}) == ()


def test_a_norm_that_overflows_names_no_gradient():
    (one,) = parameters(4, dtype=torch.float16)
    one.grad.fill_(6e4)
    assert total_norm([one]).isinf()
    assert nonfinite_gradients([("one", one)]) == ()
    one.grad[2] = float("inf")
    assert nonfinite_gradients([("one", one)]) == ("one",)


def test_tally_of_gradients():
    found = tally_gradients(
        [
            torch.tensor([1.0, 2.0]),
            torch.tensor([0.0, math.nan]),
            torch.tensor([math.inf, math.nan]),
            torch.zeros(3),
            torch.zeros(0),
            None,
            torch.tensor([[1.0, math.inf]]).to_sparse(),
        ]
    )
    assert found == GradientTally(num_total=5, num_bad=3, num_inf=2, num_zero=1)
    assert tally_gradients([]) == GradientTally(num_total=0, num_bad=0)
