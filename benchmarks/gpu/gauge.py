"""How fast a range is measured, against a copy of the same bytes on the same device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu.machine import Machine, Row
from nanstop.numerics.tensors import measure, nonfinite

REPEATS = 7


def run(machine: Machine) -> list[Row]:
    """Return a row for each format and look: GB of tensor a second, and its share of a copy's
    bandwidth (a copy reads and writes, a look only reads).
    """
    num_bytes = 2**22 if machine.toy else 2**30
    rows: list[Row] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = torch.randn(num_bytes // dtype.itemsize, device=machine.device).to(dtype)
        target = torch.empty_like(values)
        copied = 2 * _gigabytes(machine, values, lambda v, t=target: t.copy_(v))
        looks: dict[str, Callable[[Tensor], object]] = {
            "narrow look (aminmax)": lambda v: torch.maximum(*(x.abs() for x in torch.aminmax(v))),
            "all of a tensor (measure)": measure,
            "is it finite (nonfinite)": lambda v: nonfinite({"": v}),
        }
        for name, look in looks.items():
            read = _gigabytes(machine, values, look)
            rows.append(
                {
                    "format": str(dtype).removeprefix("torch."),
                    "look": name,
                    "GB/s": round(read, 1),
                    "copy GB/s": round(copied, 1),
                    "share": round(read / copied, 3),
                }
            )
    return rows


def _gigabytes(machine: Machine, values: Tensor, look: Callable[[Tensor], object]) -> float:
    """Return the GB of a tensor that a look goes through in a second: the best of some."""
    look(values)
    best = min(machine.milliseconds(lambda: look(values)) for _ in range(REPEATS))
    return values.nbytes / best / 1e6
