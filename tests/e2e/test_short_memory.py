"""An investigation that runs out of memory at any of its runs: training goes on, nothing untrue is
said.
"""

from __future__ import annotations

from ctypes import c_long
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanstop

FAILING, STEPS = 2, 4


class Short(nn.Module):
    """A layer that memory is too short for at some of its calls while ``on``.

    ``calls`` counts them where nobody puts it back: each run again undoes what it writes.
    """

    def __init__(self, at: range) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).half()
        self.at, self.calls, self.on = at, c_long(0), c_long(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.on.value:
            self.calls.value += 1
            if self.calls.value in self.at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return x + self.inner(x)


class Loud(nn.Module):
    """Squares what comes in: 300 has no square in float16."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Net(nn.Module):
    def __init__(self, at: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList((Short(at), Loud(), nn.Linear(8, 8).half()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.float().square().mean().sqrt()


def calls_of_a_run(out: Path, at: range) -> int:
    """Train four steps, of which one overflows and runs out of memory ``at`` some of the calls that
    its investigation makes; return how many these were.
    """
    torch.manual_seed(0)
    net = Net(at)
    short = net.layers[0]
    assert isinstance(short, Short)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    with nanstop.watch(net, optimizer, out=out) as watch:
        for number in range(STEPS):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number)).half()
            watch.step(lambda batch: net(batch["x"]), {"x": 400 * x if number == FAILING else x})
            short.on.value = int(number == FAILING)
            watch.update()
            short.on.value = 0
    (report,) = watch.incidents
    assert report.diagnoses[0].code in ("NS201", "NS000"), report.diagnoses
    assert report.proof is None or not report.proof.chance
    assert all(bool(p.isfinite().all()) and p.dtype is torch.float16 for p in net.parameters())
    return short.calls.value


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("places", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_memory_that_ends_at_any_call(tmp_path: Path, places: int, length: int) -> None:
    num_calls = calls_of_a_run(tmp_path / "whole", range(0))
    assert num_calls > 30
    for first in range(1, num_calls, max(1, num_calls // places)):
        calls_of_a_run(tmp_path / str(first), range(first, first + length))
