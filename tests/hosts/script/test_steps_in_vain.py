"""Updates that are asked for without a backward, told when the script is over. What only looks like
it is left in peace.
"""

import textwrap

import pytest

from loop_scripts import investigated
from nanstop.hosts.script import autowatch
from nanstop.records import Diagnosis, Report

LOOP = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 3))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
X = torch.randn(96, 6)
for x in X.split(8):
    {body}
"""
LOSS = "loss = net(x).square().mean()"
RATES = "opt.step(); schedule.step()"
SCHEDULE = "schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)\nfor x in"
ATTACK = "x = x.requires_grad_(True); net(x).sum().backward(); net.zero_grad()"
TIMED = (LOSS, "loss.backward()")


def told_of(path, *lines, before="for x in"):
    source = LOOP.format(body="\n    ".join(lines)).replace("for x in", before)
    _, news = investigated(path / "script.py", textwrap.dedent(source))
    autowatch.finish()
    found = [one for one in news if isinstance(one, Diagnosis)]
    found += [one.diagnoses[0] for one in news if isinstance(one, Report)]
    return {one.code: one for one in found}


def test_a_forgotten_backward(tmp_path):
    (found,) = told_of(tmp_path, LOSS, "opt.zero_grad()", "opt.step()").values()
    assert (found.code, found.title) == ("NS114", "no backward was made")
    assert found.source.text == "opt.step()"


@pytest.mark.parametrize(
    ("lines", "before"),
    [((RATES,), SCHEDULE), ((ATTACK,), "for x in"), ((LOSS,), "for x in"), (TIMED, "for x in")],
    ids=["rates that are plotted", "gradients of inputs", "losses alone", "timed backwards"],
)
def test_what_is_no_training(tmp_path, lines, before):
    assert not told_of(tmp_path, *lines, before=before)
