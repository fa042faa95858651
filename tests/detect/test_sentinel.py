"""The window's reading, and naming what is not finite."""

import math

import pytest
import torch

from fnstep import FnStep
from nanstop.detect.sentinel import read_window, tally_gradients, total_norm
from nanstop.detect.signals import alarm_of_reading
from nanstop.numerics.tensors import nonfinite
from nanstop.records import GradientTally
from work import Elements


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


def kinds(value):
    """One tensor of each kind that holds ``value`` among ordinary numbers."""
    plain = torch.ones(6)
    plain[4] = value
    kinds = {str(dtype)[6:]: plain.to(dtype) for dtype in (torch.float64, torch.bfloat16)}
    if not math.isfinite(value):  # e4m3 has a NaN, and e5m2 both
        kinds["float8"] = plain.to(torch.float8_e5m2)
    return kinds | {
        "real": torch.complex(plain, torch.ones(6)),
        "imaginary": torch.complex(torch.ones(6), plain).conj(),
        "transposed": plain.view(2, 3).t(),
        "strided": plain[::2],
        "scalar": plain[4],
        "csr": plain.view(2, 3).to_sparse_csr(),
        "parameter": torch.nn.Parameter(plain),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_value_is_found_in_tensors_of_every_kind(value):
    tensors = kinds(value)
    assert nonfinite(tensors) == tuple(tensors)
    wide = torch.tensor(1e300, dtype=torch.float64)
    assert nonfinite(kinds(3e38 if value > 0 else 0.0) | {"wide": wide}) == ()


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_what_holds_no_values_to_look_at_is_no_failure():
    tensors = {
        "meta": torch.empty(3, device="meta"),
        "flags": torch.ones(3, dtype=torch.bool),
        "whole": torch.full((3,), 2**62),
        "empty": torch.empty(0, 4),
        "complex": torch.empty(0, dtype=torch.complex64),
        "sparse": torch.zeros(4).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }
    assert nonfinite(tensors) == ()


def test_entries_of_a_sparse_gradient_count_as_their_sum():
    twice = torch.sparse_coo_tensor(
        [[1, 1]], [6e4, 6e4], (4,), dtype=torch.half, check_invariants=True
    )
    assert nonfinite({"finite": twice.float(), "overflows": twice}) == ("overflows",)


def test_the_check_reads_each_value_once_and_makes_nothing_of_that_size():
    tensors = {str(dtype): torch.ones(4096, dtype=dtype) for dtype in (torch.float32, torch.half)}
    with Elements() as work:
        assert nonfinite(tensors) == ()
    assert work.num_read < 2 * 4096 + 64
    assert work.num_made < 64


def test_a_norm_that_overflows_names_no_gradient():
    (one,) = parameters(4, dtype=torch.float16)
    one.grad.fill_(6e4)
    assert total_norm([one]).isinf()
    step = FnStep(torch.nn.ParameterDict({"one": one}), None, [{}])
    reading = read_window([], total_norm([one]))
    assert alarm_of_reading(step, reading) is None
    one.grad[2] = float("inf")
    (signal,) = alarm_of_reading(step, reading).signals
    assert (signal.source, signal.name) == ("grad", "one")


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
