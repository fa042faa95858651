"""Layers that divide by something of their own weight, which is 0 throughout."""

import torch
from torch import nn
from torch.nn import functional as F

import nanstop
from nanstop.report.text.terminal import render


class Quantised(nn.Linear):
    """Weights rounded to steps of a learned length, which begins at the mean of the weights."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        nn.init.zeros_(self.weight)
        self.length = nn.Parameter(self.weight.detach().abs().mean() * 2)

    def forward(self, x):
        steps = self.weight / self.length
        steps = (steps.round() - steps).detach() + steps
        return F.linear(x, steps * self.length, self.bias)


class OfLengthOne(nn.Linear):
    """A direction that is learned, and no size."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        nn.init.zeros_(self.weight)

    def forward(self, x):
        size = self.weight.abs().sum(1, keepdim=True)
        return F.linear(x, self.weight / size, self.bias)


def _investigated(layer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), layer(6, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with nanstop.watch(net, optimizer) as watch:
        for _ in range(2):
            watch.step(lambda x: (net(x) - 1).square().mean(), torch.randn(5, 4))
            watch.update()
    return watch.incidents[0]


def test_a_form_under_which_a_layer_is_never_trained_is_no_cure():
    incident = _investigated(Quantised)
    assert incident.localization.first_bad.source.text.startswith("steps = self.weight /")
    assert incident.proof.verdict == "none_found"
    assert "`2.weight` is 0 throughout: begin with other values" in " ".join(
        render(incident).split()
    )


def test_a_form_under_which_a_weight_of_zero_is_trained_helps():
    incident = _investigated(OfLengthOne)
    assert incident.proof.verdict != "none_found"
    assert {atom.remedy for atom in incident.proof.minimal} == {"form"}
