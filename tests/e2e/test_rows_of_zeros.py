"""A kernel that divides by norms inside of itself: which rows are zero is found by experiment."""

import pytest
import torch

from loop_scripts import investigated
from nanstop.records import Report

torch.set_num_threads(1)

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
net = nn.Sequential(
    nn.utils.parametrizations.weight_norm(nn.{layer}), nn.Flatten(), nn.Linear({inner}, 4)
)
with torch.no_grad():
    net[0].parametrizations.weight.original1[3] = 0
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(2):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn({batch})), torch.randint(4, (6,))).backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("layer", "inner", "batch"),
    [("Linear(8, 5)", 5, (6, 8)), ("Conv1d(2, 5, 3)", 30, (6, 2, 8))],
    ids=["Linear", "Conv1d"],
)
def test_the_norm_of_a_row_of_zeros_is_named(tmp_path, layer, inner, batch):
    source = SCRIPT.format(layer=layer, inner=inner, batch=batch)
    _, news = investigated(tmp_path / "script.py", source)
    best = next(one for one in news if isinstance(one, Report)).diagnoses[0]
    assert (best.code, best.confidence) == ("NS206", "certain")
    assert "original1` are 0 throughout" in best.cause
    assert best.confirmed


HARMLESS = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 4)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(2):
    x = torch.randn(6, 8)
    x[2] = 0
    opt.zero_grad()
    torch.fmod(net(x), x[:, :4]).sum().backward()
    opt.step()
"""


def test_zeros_that_are_no_norms_are_not_told_as_such(tmp_path):
    _, news = investigated(tmp_path / "script.py", HARMLESS)
    best = next(one for one in news if isinstance(one, Report)).diagnoses[0]
    assert best.code == "NS204"
