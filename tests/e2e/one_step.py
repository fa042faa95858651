"""The diagnoses of one step of a small network with a loss that a test gives."""

from contextlib import suppress

import torch
from torch import nn

import nanstop

ROWS, WIDTH = 4, 8


def said(loss, **batch):
    """Return the diagnoses of the incident of one step with ``loss(net, batch)``."""
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with (
        nanstop.watch(net, optimizer, policy="observe") as watch,
        suppress(IndexError, RuntimeError),
    ):
        watch.step(lambda given: loss(net, given), batch)
        watch.update()
    return watch.incidents[0].diagnoses


def x(zero_row=None):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(ROWS, WIDTH, generator=generator)
    if zero_row is not None:
        values[zero_row] = 0.0
    return values
