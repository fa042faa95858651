"""Ranges of a window: true values, the formats that the run has for them, masks left out,
nothing changed.
"""

import math

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.measure.ranges import headroom_bits, op_formats, probe_ranges
from nanstop.remedies.precision import reference

torch.set_num_threads(1)


class Cube(nn.Module):
    """``body(x) ** 3``: 300 becomes 2.7e7, which float16 does not hold."""

    def __init__(self, dtype):
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.body.weight)
        self.to(dtype)

    def forward(self, x):
        return self.body(x) ** 3


def step_of(model, x, loss=None):
    return FnStep(model, loss or (lambda m, b: m(b["x"]).float().mean()), [{"x": x}])


def row(rows, op, phase="forward", module=""):
    (found,) = [r for r in rows if (r.phase, r.module, r.op) == (phase, module, op)]
    return found


def test_values_that_overflow_in_the_run_are_seen_as_they_are():
    x = torch.full((2, 4), 300.0, dtype=torch.float16)
    step = step_of(Cube(torch.float16), x)
    rows = probe_ranges(step, formats=op_formats(step), under=lambda: reference(step.view))
    cube = row(rows, "aten.pow.Tensor_Scalar")
    assert (cube.dtype, cube.absmax) == ("float16", 2.7e7)
    assert cube.headroom_bits == pytest.approx(math.log2(65504 / 2.7e7))
    assert rows[0] == cube
    assert row(rows, "aten.mm.default", module="body").absmax == 300.0


def test_backward_is_not_of_the_model_as_the_step_scales_it():
    x = torch.ones(2, 4)
    for scale in (1.0, 65536.0):
        step = step_of(Cube(torch.float32), x, lambda m, b, s=scale: m(b["x"]).sum() * s)
        rows = probe_ranges(step)
        grad = row(rows, "aten.mm.default", phase="backward", module="body")
        assert grad.absmax == 2 * 3 * scale
        assert (grad.headroom_bits < 0) == (scale > 1)


def test_an_op_that_is_float32_in_the_run_is_read_as_float32():
    class Widens(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float16))

        def forward(self, x):
            wide = x.float().pow(2)
            return wide.sqrt().to(x.dtype) * self.scale

    step = step_of(Widens(), torch.full((2, 4), 300.0, dtype=torch.float16))
    rows = probe_ranges(step, formats=op_formats(step), under=lambda: reference(step.view))
    assert row(rows, "aten.pow.Tensor_Scalar").dtype == "float32"
    assert row(rows, "aten.sqrt.default").dtype == "float16"  # what a cast narrows had to fit


def attended(x, mask):
    return torch.softmax(x + mask, -1)


@pytest.mark.parametrize("number", [torch.finfo(torch.float32).min, -1e9, -math.inf])
def test_masks_are_no_range(number):
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            keep = torch.tensor([1.0, 1.0, 0.0, 1.0])
            by_product = torch.zeros(4).masked_fill(keep == 0, number)
            by_arithmetic = (1.0 - keep) * max(number, -1e9)
            full = torch.full((4,), number).where(keep == 0, torch.zeros(()))
            scores = x * self.weight
            return attended(scores, by_product) + attended(scores, by_arithmetic + full)

    rows = probe_ranges(step_of(Masks(), torch.full((2, 4), 5e4)))
    assert row(rows, "aten.add.Tensor").absmax == 5e4
    assert row(rows, "aten.mul.Tensor").absmax == 5e4


def test_a_large_negative_value_that_is_computed_is_a_range():
    rows = probe_ranges(step_of(Cube(torch.float32), torch.full((2, 4), -1e3)))
    assert row(rows, "aten.pow.Tensor_Scalar").absmax == 1e9


def test_headroom():
    assert headroom_bits(65504.0, "float16") == 0.0
    assert headroom_bits(16376.0, "float16") == 2.0
    assert headroom_bits(0.0, "float16") == math.inf


def test_nothing_is_changed():
    model = Cube(torch.float16)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    storages = {n: p.data_ptr() for n, p in model.named_parameters()}
    step, state = step_of(model, torch.ones(2, 4).half()), torch.get_rng_state()
    probe_ranges(step, formats=op_formats(step), under=lambda: reference(step.view))
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])
        assert parameter.data_ptr() == storages[name]
