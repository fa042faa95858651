"""The backward of an ``autograd.Function`` divides by what its forward kept: what was rounded to 0
is told from what is 0.
"""

import pytest
import torch

from e2e.one_step import said, x

TINY = 1e-30


class UnitRows(torch.autograd.Function):
    """Guards its forward and not its backward."""

    @staticmethod
    def forward(ctx, rows, power, mask):
        squares = rows.square() if power else rows * (rows if mask is None else mask)
        total = squares.sum(-1, keepdim=True)
        ctx.save_for_backward(rows, total)
        return rows / total.sqrt().clamp(min=1e-3)

    @staticmethod
    def backward(ctx, gradient):
        rows, total = ctx.saved_tensors
        return gradient * rows * total.rsqrt(), None, None


def loss_of(scale, *, power=False, mask=None):
    return lambda net, b: UnitRows.apply(net(b["v"]) * scale, power, mask).square().sum()


@pytest.mark.parametrize("power", [True, False])
def test_squares_that_were_rounded_to_0_are_named(power):
    found = said(loss_of(TINY, power=power), v=x())[0]
    assert found.code == "NS304"
    assert found.cause == "the formula of its own backward meets a number that was rounded to 0"
    assert any("rounds to 0 what is not 0" in line for line in found.lines)


@pytest.mark.parametrize("loss", [loss_of(0.0), loss_of(1.0, mask=torch.zeros(4, 8))])
def test_what_is_0_was_not_rounded(loss):
    found = said(loss, v=x())[0]
    assert found.code == "NS304"
    assert found.cause.startswith("the formula of its own backward has no value in ")
    assert not any("rounds to 0" in line for line in found.lines)
