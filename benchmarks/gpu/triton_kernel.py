"""A row norm by hand, in Triton: x / rms(x), with no epsilon, so that a row of zeros is 0 / 0.

Its source is a user's as he would write it: a kernel forward and one backward, launched from an
``autograd.Function`` or registered as an operation of torch.
"""

# pyright: basic

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_forward(x_ptr, y_ptr, inverse_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width)
    tl.store(inverse_ptr + row, inverse)
    tl.store(y_ptr + row * width + columns, x * inverse, mask=inside)


@triton.jit
def _norm_backward(g_ptr, y_ptr, inverse_ptr, dx_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(g_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.load(inverse_ptr + row)
    dx = inverse * (g - y * (tl.sum(g * y, axis=0) / width))
    tl.store(dx_ptr + row * width + columns, dx, mask=inside)


def _forward(x: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    x = x.contiguous()
    y = torch.empty_like(x)
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _norm_forward[(inverse.numel(),)](
        x, y, inverse, width, BLOCK=triton.next_power_of_2(width), num_warps=4
    )
    return y, inverse


def _backward(g: Tensor, y: Tensor, inverse: Tensor) -> Tensor:
    width = y.shape[-1]
    dx = torch.empty_like(y)
    _norm_backward[(inverse.numel(),)](
        g.contiguous(), y, inverse, dx, width, BLOCK=triton.next_power_of_2(width), num_warps=4
    )
    return dx


class RowNorm(torch.autograd.Function):
    """The kernels launched from an ``autograd.Function``: torch dispatches nothing for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, inverse = _forward(x)
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _backward(grads[0], *ctx.saved_tensors)


def row_norm(x: Tensor) -> Tensor:
    """Return x / rms(x) over the last axis, in the format of x, by ``RowNorm``."""
    return RowNorm.apply(x)


@torch.library.triton_op("rowwise::unit", mutates_args=())
def _registered(x: Tensor) -> tuple[Tensor, Tensor]:
    return _forward(x)


@torch.library.triton_op("rowwise::unit_backward", mutates_args=())
def _registered_backward(g: Tensor, y: Tensor, inverse: Tensor) -> Tensor:
    return _backward(g, y, inverse)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)


def _differentiate(ctx: Any, grad: Tensor, _grad_of_inverse: Tensor) -> Tensor:
    return _registered_backward(grad, *ctx.saved_tensors)


_registered.register_autograd(_differentiate, setup_context=_keep)


def registered_row_norm(x: Tensor) -> Tensor:
    """Return x / rms(x) over the last axis, in the format of x, by operations of torch's own
    dispatcher, ``rowwise::unit`` and its backward.
    """
    return _registered(x)[0]
