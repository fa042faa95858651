"""What is counted on bit patterns is what the values themselves say."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanstop.commands.scan import counting
from nanstop.commands.scan.counting import (
    CHUNK_BYTES,
    TARGETS,
    Meter,
    Scratch,
    computed_in,
    fits_of,
    stats_of,
)
from nanstop.numerics.tensors import measure

FORMATS = (*TARGETS, torch.float32, torch.float64)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EDGES = (
    *(0.0, -0.0, 2.0**-10, 2.0**-17, 2.0**-25, 2.0**-14),
    *(448.0, 464.0, 465.0, 61440.0, 65519.0, 65520.0, math.inf, -math.inf, math.nan),
)


@st.composite
def tensors(draw):
    """Values of any bit pattern, or at the edges where a cast changes its nature."""
    dtype = draw(st.sampled_from(FORMATS))
    if draw(st.booleans()):
        values = draw(st.lists(st.sampled_from(EDGES), min_size=1, max_size=40))
        return torch.tensor(values, dtype=torch.float64).to(dtype)
    size = 8 * dtype.itemsize
    patterns = st.integers(0, 2**size - 1)
    values = draw(st.lists(patterns, min_size=1, max_size=40))
    kind = BITS[dtype.itemsize]
    signed = [v - 2**size if v > torch.iinfo(kind).max else v for v in values]
    return torch.tensor(signed, dtype=kind).view(dtype)


def counted(values, step=None):
    scratch = Scratch.new()
    meter, exact = Meter(values.dtype, scratch), values.to(computed_in(values.dtype))
    step = step or len(values)
    for start in range(0, len(values), step):
        meter.take(exact[start : start + step], start=start, part=step)
    return meter.tally()


def seen(values):
    """What ``measure`` says of values, but for what a scan does not count."""
    return replace(measure(values, "w"), minimum=None)


@settings(max_examples=300, deadline=None)
@given(tensors(), st.integers(1, 9))
def test_range_is_that_of_measure(values, step):
    found = stats_of(counted(values, step), tuple(values.shape), values.dtype, "w")
    assert found == seen(values)


@settings(max_examples=300, deadline=None)
@given(tensors())
def test_fit_is_what_a_cast_does(values):
    exact = values.to(computed_in(values.dtype))
    finite = exact[exact.isfinite()]
    for fit, target in zip(fits_of(counted(values), values.dtype), TARGETS, strict=True):
        cast, true = finite.to(target).double(), finite.double().abs()
        # torch 2.13 cuts float8_e4m3fn at 448, earlier ones make it NaN
        over = true > 464.0 if target is torch.float8_e4m3fn else ~cast.isfinite()
        zero = (cast == 0) & (true > 0)
        small = (true > 0) & (true < torch.finfo(target).tiny) & ~zero
        assert (fit.overflow, fit.zero, fit.subnormal) == tuple(
            int(x.sum()) for x in (over, zero, small)
        )
        assert fit.exact


def test_a_whole_chunk_of_small_values_overflows_no_lane():
    values = torch.full((CHUNK_BYTES // 2,), 2.0**-20, dtype=torch.float16)
    values[::3] = 1.0
    found = stats_of(counted(values), tuple(values.shape), values.dtype, "w")
    assert found.subnormal == len(values) - len(values[::3])


@pytest.mark.parametrize("every", [1, 2, 3_000, 50_001, 400_000])
@pytest.mark.parametrize("num", [65_536, 70_001, CHUNK_BYTES // 2])
def test_zeros_of_a_large_chunk_are_counted_wherever_they_lie(every, num):
    values = torch.full((num,), 0.5, dtype=torch.float16)
    values[num - 1] = 0.0
    values[1::every] = -0.0
    found = stats_of(counted(values), (num,), values.dtype, "w")
    assert found == seen(values)


def test_what_was_counted_in_a_part_is_scaled_up_and_said_so():
    values = torch.full((100,), 2.0**-20, dtype=torch.float16)
    meter = Meter(torch.float16, Scratch.new())
    meter.take(values, start=0, part=50)
    meter.take(torch.ones(100, dtype=torch.float16), start=100, part=0)
    fits = {fit.format: fit for fit in fits_of(meter.tally(), torch.float16)}
    assert not fits["float16"].exact
    assert fits["float16"].subnormal == 200  # all of 48 in 100 + 100 values
    assert fits["bfloat16"].exact
    assert counting.subnormal_count(meter.tally(), torch.float16) == (200, False)


def test_first_bad_is_an_index():
    values = torch.ones(4, 6)
    values[2, 3] = math.nan
    assert stats_of(counted(values.flatten(), 5), (4, 6), values.dtype, "w").first_bad == (2, 3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64])
def test_integers_are_not_counted(dtype):
    assert computed_in(dtype) is None
