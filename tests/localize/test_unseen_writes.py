"""Writes that torch does not dispatch; NumPy stands for a kernel that is launched by hand."""

import ctypes
import math
import sys

import numpy as np
import pytest
import torch

from planted import located_body, op_of


@pytest.fixture(params=[False, True], ids=["as it is", "NaN in what is taken"])
def _stale(request):
    """Memory that is taken holds what another tensor has left: NaN, where torch fills it so."""
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


pytestmark = pytest.mark.usefixtures("_stale")


def function(forward, backward=lambda _, grad: grad):
    """Return an autograd function of one tensor."""

    class Launched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(ctx.saved_tensors[0], grad)

    return Launched.apply


def divide(x, y):
    """The kernel: 1 where x is not 0, and NaN where it is."""
    with np.errstate(all="ignore"):
        np.divide(x.numpy(), x.numpy(), out=y.numpy())


def empty(x):
    y = torch.empty_like(x)
    divide(x, y)
    return y


def zeros(x):
    y = torch.zeros(x.shape)
    divide(x, y)
    return y


def split_over_lines(x):
    y = torch.empty_like(x)
    factor = torch.empty(x.shape[:-1])
    with np.errstate(all="ignore"):
        np.divide(
            x.numpy(),
            x.numpy(),
            out=y.numpy(),
        )
    factor.fill_(1)
    return y


def through_a_view(x):
    y = torch.zeros(2, *x.shape)
    divide(x, y[1])
    return y[1]


def taken_elsewhere(x):
    y = room(x)
    divide(x, y)
    return y


def room(x):
    return torch.empty_like(x)


@pytest.mark.parametrize(
    "kernel", [empty, zeros, split_over_lines, through_a_view, taken_elsewhere]
)
def test_a_kernel_is_found_by_its_line_and_what_it_reads(kernel):
    launch = function(kernel)
    found = located_body(lambda x: launch(x * 0.0) + x)
    event = found.first_bad
    assert (event.module, found.origin, found.unseen_write) == ("body", "unknown", "finite")
    assert event.source.text.startswith(("divide(x, y", "np.divide("))
    assert [(stats.finite, stats.absmax) for stats in event.inputs] == [(True, 0.0)]
    assert sum(stats.nan for stats in event.outputs) > 0
    assert found.blind_spots


def test_a_kernel_in_a_backward():
    def backward(x, grad):
        dx = torch.empty_like(grad)
        divide(x, dx)
        return dx

    launch = function(torch.clone, backward)
    found = located_body(lambda x: launch(x * 0.0) + x)
    assert (found.first_bad.phase, found.unseen_write) == ("backward", "finite")
    assert found.first_bad.source.text == "divide(x, dx)"


def poison(x):
    y = torch.empty_like(x)
    y.numpy()[...] = POISON
    return y


POISON = math.nan


def spelled(x):
    y = torch.empty_like(x)
    y.numpy()[x.numpy() == 0] = math.nan
    return y


def by_address(x):
    y = torch.empty_like(x)
    ctypes.memset(y.data_ptr(), 0xFF, y.numel() * y.element_size())
    return y


@pytest.mark.parametrize("write", [poison, spelled, by_address])
def test_a_number_that_the_script_puts_there_is_no_kernels(write):
    launch = function(write)
    found = located_body(lambda x: launch(x * 0.0) + x)
    assert (found.origin, found.unseen_write) == ("unknown", "nonfinite")
    assert found.first_bad.source.text.startswith(("y.numpy()", "ctypes.memset"))


def out_of_a_call(x):
    y = torch.empty_like(x)
    torch.div(x, x, out=y)
    return y


def over_a_view(x):
    y = torch.empty_like(x)
    y.view(-1).copy_((x / x).view(-1))
    return y


@pytest.mark.parametrize("write", [out_of_a_call, over_a_view])
def test_an_operation_that_writes_there_is_seen(write):
    launch = function(write)
    found = located_body(lambda x: launch(x * 0.0) + x)
    assert (op_of(found), found.origin, found.unseen_write) == ("div", "born_here", None)


def test_what_an_earlier_step_has_left_is_no_write():
    kept = torch.full((2, 16, 8), math.nan)

    def stale(x):
        y = kept.view(-1)[: x.numel()].view(x.shape)
        y[:, :8] = x[:, :8]
        return y

    found = located_body(lambda x: function(stale)(x) + x)
    assert found.unseen_write is None


def test_what_was_bad_before_the_kernel_is_where_it_was_born():
    def copied(x):
        y = torch.zeros(x.shape)
        y.numpy()[...] = x.numpy()
        return y

    launch = function(copied)
    found = located_body(lambda x: launch((x * 0.0).log() * 0.0) + x)
    assert (op_of(found), found.origin, found.confidence) == ("log", "born_here", "certain")


def test_a_kernel_behind_a_kernel():
    def copied(x):
        y = torch.zeros(x.shape)
        y.numpy()[...] = x.numpy()
        return y

    first, second = function(empty), function(copied)
    found = located_body(lambda x: second(first(x * 0.0) * 2.0) + x)
    assert found.unseen_write == "finite"
    assert found.first_bad.source.text == "divide(x, y)"


def test_a_tracer_of_the_scripts_own_is_there_again_behind_it():
    def own(*_):
        return None

    launch, earlier = function(empty), sys.gettrace()
    sys.settrace(own)
    try:
        found = located_body(lambda x: launch(x * 0.0) + x)
        assert sys.gettrace() is own
    finally:
        sys.settrace(earlier)
    assert found.unseen_write == "finite"


def test_what_an_operation_of_the_same_line_makes_is_its_own():
    def inline(x):
        y = torch.empty_like(x)
        y.numpy()[...] = (x / x).numpy()
        return y

    launch = function(inline)
    found = located_body(lambda x: launch(x * 0.0) + x)
    assert (op_of(found), found.origin, found.unseen_write) == ("div", "born_here", None)
