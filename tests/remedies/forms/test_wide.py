"""A line in float32: what it reads in half is widened there, and nowhere else."""

import sys

import torch

from nanstop.records import Atom
from nanstop.remedies.forms.mode import form


def at(line):
    return Atom(remedy="fp32_line", target=f"{__file__}:{line}", value="float32")


def here():
    return sys._getframe(1).f_lineno


def test_only_the_line_that_is_meant_is_widened_and_its_result_stays_wide():
    x = torch.full((4,), 300.0, dtype=torch.float16)
    line = here() + 2
    with form(None, at(line)):
        square = x * x
        other = x * x
    assert square.dtype is torch.float32
    assert square.isfinite().all()
    assert other.dtype is torch.float16
    assert other.isinf().all()


def test_autocast_and_an_asked_for_format_do_not_narrow_it():
    x = torch.full((4, 4), 300.0, dtype=torch.float16)
    line = here() + 2
    with form(None, at(line)), torch.autocast("cpu", dtype=torch.float16):
        found = (x @ x).sum(dtype=torch.float16)
    assert found.dtype is torch.float32
    assert float(found) == 4 * 4 * 4 * 300.0**2


def test_writes_casts_and_attributes_are_the_scripts_own():
    x, kept = torch.ones(3, 4, dtype=torch.float16), torch.ones(4, dtype=torch.float16)
    line = here() + 2
    with form(None, at(line)):
        kept[0], cast, shape = 7.0, x.half(), x.T.shape
    assert float(kept[0]) == 7.0
    assert cast.dtype is torch.float16
    assert shape == (4, 3)


def test_gradients_come_back_in_the_format_of_what_was_read():
    x = torch.full((4,), 200.0, dtype=torch.float16).requires_grad_()
    line = here() + 2
    with form(None, at(line)):
        loss = x.pow(2).mean()
    loss.backward()
    assert x.grad.dtype is torch.float16
    assert torch.equal(x.grad, x.detach() / 2)


def test_what_autocast_would_round_is_computed_in_float32():
    x = torch.full((4, 4), 300.0)
    line = here() + 2
    with form(None, at(line)), torch.autocast("cpu", dtype=torch.float16):
        found = x @ x
        other = x @ x
    assert found.dtype is torch.float32
    assert float(found[0, 0]) == 4 * 300.0**2
    assert other.isinf().all()


def test_casts_of_the_line_are_left_out_only_where_that_is_asked_for():
    x = torch.full((4,), 1e5)
    line = here() + 3
    leaves_out = Atom(remedy="fp32_line", target=f"{__file__}:{line}", value="uncast")
    with form(None, leaves_out):
        found = x.half(), x.to(torch.float16), x.to(dtype=torch.bfloat16), x.int()
    assert [one.dtype for one in found] == [torch.float32] * 3 + [torch.int32]
    line = here() + 2
    with form(None, at(line)):
        found = x.half()
    assert found.isinf().all()


def test_what_another_line_reads_is_as_narrow_as_what_was_read():
    x = torch.full((4,), 300.0, dtype=torch.float16)
    line = here() + 3
    back = Atom(remedy="fp32_line", target=f"{__file__}:{line}", value="and_back:mul")
    with form(None, back):
        mean = (x * x).mean() / 1000
        other = mean + x
        again = mean * 2.0
    assert mean.dtype is torch.float32
    assert (other.dtype, again.dtype) == (torch.float16, torch.float16)
    assert float(again) == 180.0
