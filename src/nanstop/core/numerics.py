"""Ranges of tensors and the formats that hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from nanstop.records import FORMAT_MAX, TensorStats

HALF_FORMATS = (torch.float16, torch.bfloat16)
WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
}
"""The format in which an op is run again to learn whether its own format was too narrow."""


def format_name(dtype: torch.dtype) -> str:
    """Return ``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def format_limit(dtype: torch.dtype) -> float:
    """Return the largest finite value of a floating format, inf for any other."""
    return FORMAT_MAX.get(format_name(dtype), float("inf"))


def is_measurable(tensor: Tensor) -> bool:
    """Return whether a tensor holds dense floating values that can be looked at here."""
    return (
        tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )


def bad_mask(tensor: Tensor) -> Tensor:
    """Return a bool tensor of the same shape: True where the value is NaN or infinite."""
    return ~torch.isfinite(tensor)


@torch.no_grad()
def measure(tensor: Tensor, name: str | None = None) -> TensorStats:
    """Return the full range of a tensor of any shape and format. Synchronises the device.

    ``absmax`` and ``absmin_nonzero`` are over finite values; integer tensors report their range only.
    """
    shape, dtype = tuple(tensor.shape), format_name(tensor.dtype)
    device = tensor.device.type
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return TensorStats(shape=shape, dtype=dtype, device=device, name=name)
    if not tensor.is_floating_point():
        top = float(tensor.detach().to(torch.float64).abs().max())
        return TensorStats(shape=shape, dtype=dtype, device=device, absmax=top, name=name)
    values = tensor.detach()
    tiny = torch.finfo(values.dtype).tiny
    values = values.to(torch.float64) if values.dtype is torch.float64 else values.float()
    bad = bad_mask(values)
    size = values.abs().masked_fill(bad, 0.0)
    nonzero = size > 0
    counts = torch.stack(
        [
            values.isnan().sum(),
            values.isposinf().sum(),
            values.isneginf().sum(),
            (~bad & ~nonzero).sum(),
            (nonzero & (size < tiny)).sum(),
        ]
    ).tolist()
    absmin = float(size.masked_fill(~nonzero, float("inf")).min())
    return TensorStats(
        shape=shape,
        dtype=dtype,
        device=device,
        nan=counts[0],
        posinf=counts[1],
        neginf=counts[2],
        absmax=float(size.max()),
        absmin_nonzero=0.0 if absmin == float("inf") else absmin,
        zeros=counts[3],
        subnormal=counts[4],
        first_bad=_first_index(bad) if sum(counts[:3]) else None,
        name=name,
    )


def _first_index(mask: Tensor) -> tuple[int, ...]:
    flat = int(mask.flatten().to(torch.uint8).argmax())
    return tuple(int(axis) for axis in torch.unravel_index(torch.tensor(flat), mask.shape))


@torch.no_grad()
def nonfinite_names(named: list[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Return the names of tensors that hold a NaN or Inf, in order. One synchronisation for all.

    A norm decides quickly; a norm that overflowed on finite values is confirmed tensor by tensor.
    """
    dense = [(name, tensor) for name, tensor in named if is_measurable(tensor)]
    if not dense:
        return ()
    norms = [torch.linalg.vector_norm(t.detach(), dtype=torch.float32) for _, t in dense]
    suspicious = bad_mask(torch.stack([norm.to(norms[0].device) for norm in norms])).tolist()
    return tuple(
        name
        for (name, tensor), odd in zip(dense, suspicious, strict=True)
        if odd and bool(bad_mask(tensor.detach()).any())
    )
