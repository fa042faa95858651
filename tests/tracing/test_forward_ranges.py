"""A tap measures one forward of the run itself, changes nothing in it, and is gone after it."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from nanstop.tracing.module_ranges import ModuleEnd, ModuleRanges


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 2)

    def forward(self, x):
        return self.down(self.norm(self.up(x)) * 100)


def num_hooks():
    return len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks)


def tapped(model, *args, only=()):
    tap = ModuleRanges(model, only)
    tap.attach()
    model(*args)
    return tap


def test_ranges_are_those_of_what_modules_read_and_put_out():
    model, x = Net(), torch.randn(3, 4)
    up = model.up(x).detach()
    product = model.norm(up).detach() * 100
    found = tapped(model, x).read()
    assert found[ModuleEnd("up", "output", "float32")] == pytest.approx(float(up.abs().max()))
    assert found[ModuleEnd("down", "input", "float32")] == pytest.approx(float(product.abs().max()))
    assert ModuleEnd("norm", "input", "float32") not in found  # known already: the output of `up`
    assert ModuleEnd("the model", "output", "float32") in found


def test_an_input_that_autocast_narrows_is_read_against_the_narrow_format():
    model, x = Net(), torch.full((3, 4), 1e6)
    with torch.autocast("cpu", dtype=torch.float16):
        found = tapped(model, x).read()
    assert found[ModuleEnd("up", "input", "float16")] == 1e6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_a_module_computes_inside_in_another_format_is_seen(dtype):
    class Narrow(Net):
        def forward(self, x):
            return super().forward((self.up.bias[:4] * x).to(dtype).square().float())

    tap = ModuleRanges(Narrow(), inside=True)
    tap.attach()
    tap._root(torch.randn(3, 4))
    assert tap.formats == {"float32", str(dtype).removeprefix("torch.")}
    assert {spot.dtype for spot in tap.read()} == {"float32"}


def test_one_forward_is_measured_and_no_trace_is_left():
    before, model = num_hooks(), Net()
    tap = tapped(model, torch.randn(3, 4))
    assert num_hooks() == before
    first = tap.read()
    model(torch.full((3, 4), 1e9))
    assert tap.read() == first


def test_a_forward_without_gradients_is_passed_over():
    model = Net()
    tap = ModuleRanges(model)
    tap.attach()
    with torch.no_grad():
        model(torch.randn(3, 4))
    assert tap.read() == {}
    model(torch.randn(3, 4))
    assert tap.read()


def test_a_forward_that_raises_ends_the_look():
    class Broken(Net):
        def forward(self, x):
            self.up(x)
            raise ValueError("mine")

    before, model = num_hooks(), Broken()
    tap = ModuleRanges(model)
    tap.attach()
    with pytest.raises(ValueError, match="mine"):
        model(torch.randn(3, 4))
    assert num_hooks() == before


def test_the_model_can_be_copied_and_saved_meanwhile():
    model = Net()
    tap = ModuleRanges(model)
    tap.attach()
    try:
        torch.save(copy.deepcopy(model), io.BytesIO())
    finally:
        tap.detach()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinite(value):
    found = tapped(Net(), torch.tensor([[1.0, 2.0, 3.0, value]])).read()
    assert found[ModuleEnd("up", "output", "float32")] == math.inf


def test_only_some_modules_are_measured_and_other_models_never():
    model, other = Net(), Net()
    tap = ModuleRanges(model, ["down"])
    tap.attach()
    other(torch.randn(3, 4))
    assert tap.read() == {}
    model(torch.randn(3, 4))
    assert {spot.module for spot in tap.read()} == {"down"}


def test_losses_and_gradients_are_bitwise_the_same():
    def gradients(measured):
        model, x = Net(), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
        tap = ModuleRanges(model)
        if measured:
            tap.attach()
        loss = model(x).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, gradients(True), gradients(False)))
