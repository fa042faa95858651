"""A model that TorchScript has compiled is watched as its own code is, and a module that is traced
is left alone.
"""

import warnings

import pytest
import torch

from loop_scripts import investigated, run_script, same, weights
from nanstop.records import Report
from nanstop.report.text.run_end import RunEnd

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated from torch 2.10 on

TRAINED = """
import torch
from torch import nn

torch.manual_seed(0)
net = torch.jit.script(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(6):
    x = torch.randn(8, 3)
    if BAD and step == 3:
        x[2] = float("nan")
    loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TRACED = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 3)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    net(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    traced = torch.jit.trace(net, torch.ones(1, 3))
"""


def test_a_row_of_nan_is_found(tmp_path):
    ending, news = investigated(tmp_path / "script.py", TRAINED, on_failure="repair", BAD=True)
    (report,) = (one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code == "NS501"
    assert [one.sample for one in report.localization.positions] == [2]
    assert report.proof.verdict == "isolated"
    assert all(one.isfinite().all() for one in weights(ending))


@pytest.mark.parametrize("source", [TRAINED, TRACED], ids=["trained", "traced"])
def test_a_healthy_run_is_as_without_nanstop(source, tmp_path):
    plain = run_script(tmp_path / "plain.py", source, BAD=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        ending, news = investigated(tmp_path / "watched.py", source, BAD=False)
    assert [type(one) for one in news] == [RunEnd]
    assert same(weights(plain), weights(ending))
