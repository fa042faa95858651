"""Steps of a small network of which one is spoiled, and what becomes of a loss of theirs."""

import warnings

import torch
from torch import nn

import nanstop
from nanstop.report.text.terminal import render

WIDTH, ROWS = 8, 4


def batch(seed):
    """Scores' scale ``s`` and factor ``z`` by row, a mask, labels, targets, directions."""
    generator = torch.Generator().manual_seed(seed)
    x, z, t, u = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(4))
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    return {
        "x": x,
        "s": torch.ones(ROWS, 1),
        "z": z + 3,
        "m": mask,
        "y": torch.arange(ROWS),
        "t": (t > 0).float(),
        "u": u,
    }


def large(given):
    given["s"][1] = 200.0


def zero(given):
    given["z"][1] = 0.0


def hidden(given):
    given["m"][1] = False


def as_it_is(given):
    pass


def investigated(loss, spoil, **policy):
    """Return the watch over four steps of which the third is spoiled, and the network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with (
        warnings.catch_warnings(),
        nanstop.watch(net, optimizer, policy=nanstop.Policy(**policy)) as watch,
    ):
        warnings.simplefilter("ignore")  # torch says so of a deviation of one
        for step in range(4):
            given = batch(step)
            if step == 2:
                spoil(given)
            watch.step(lambda now: loss(net(now["x"]), now), given)
            watch.update()
    return watch, net


def shown(loss, spoil):
    """The report of the one incident of a loss, and its text."""
    (incident,) = investigated(loss, spoil)[0].incidents
    return incident, render(incident)
