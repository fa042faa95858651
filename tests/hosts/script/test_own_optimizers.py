"""Optimizers that a script has written itself: an update that is left out leaves no trace of them,
whatever they read.
"""

import pytest

from loop_scripts import ReplayingSession, investigated, run_script, same
from nanstop.records import Report

SCRIPT = """
import torch
from torch import nn
class {name}(torch.optim.{base}):
    {init}
    @torch.no_grad()
    def step(self):
        self.asked = getattr(self, "asked", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 0.5)
                p.sub_(m, alpha=group["lr"])
        {more}
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = {name}(net.parameters(), lr=0.1)
{scheduler}
for step in range(6):
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(step))
    if step == 2:
        if LEAVES_OUT: continue
        x[3, 1] = float("nan") if BAD else 0.5
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
ASKED = optimizer.asked
PARAMETERS = [*net.parameters(), *(s["m"] for s in optimizer.state.values())]
"""
INIT = "def __init__(self, params, lr): super().__init__(params, dict(lr=lr))"
SPELLINGS = {
    "its own": {"base": "Optimizer", "init": INIT, "more": "pass", "scheduler": ""},
    "of torch's": {"base": "SGD", "init": "pass", "more": "super().step()", "scheduler": ""},
    "of torch's, which is met as well": {
        "base": "SGD",
        "init": "pass",
        "more": "super().step()",
        "scheduler": "torch.optim.SGD(net.parameters(), lr=0.1)",
    },
    "a schedule": {
        "base": "Optimizer",
        "init": INIT,
        "more": "pass",
        "scheduler": "torch.optim.lr_scheduler.StepLR(optimizer, 100)",
    },
}


def trained(path, spelling, session=None, **values):
    values = {"BAD": False, "LEAVES_OUT": False} | values
    source = SCRIPT.format(name="Mine", **SPELLINGS[spelling])
    return run_script(path / "script.py", source, session, **values)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_update_that_is_left_out_is_not_asked_for(tmp_path, spelling):
    session = ReplayingSession("skip")
    watched = trained(tmp_path, spelling, session, BAD=True)
    assert session.steps == [2]
    alone = trained(tmp_path, spelling, LEAVES_OUT=True)
    assert watched["ASKED"] == alone["ASKED"] == 5
    assert same(watched["PARAMETERS"], alone["PARAMETERS"])


def test_a_hook_that_raises_leaves_the_optimizer_as_it_was(tmp_path):
    source = SCRIPT.format(name="Mine", **SPELLINGS["its own"]).replace(
        "for step in range(6):",
        """def hook(*_):
    if step == 2: raise KeyError("a hook of the script's own")
optimizer.register_step_pre_hook(hook)
for step in range(6):""",
    )
    asked = "    try: optimizer.step()\n    except KeyError: pass"
    source = source.replace("    optimizer.step()", asked)
    session = ReplayingSession("skip")
    watched = run_script(tmp_path / "a.py", source, session, BAD=True, LEAVES_OUT=False)
    assert watched["ASKED"] == 4, "the window of the update that raised goes on in the next"
    assert all(one.isfinite().all() for one in watched["PARAMETERS"])


DIVIDES = """
import torch
from torch import nn

class Curvature(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                kept = state.setdefault("kept", torch.zeros_like(p))
                moved = state.setdefault("moved", torch.zeros_like(p))
                moved.mul_(0.9).add_(p.grad / kept)
                kept.add_(p.grad.square())
                p.sub_(moved, alpha=group["lr"])

torch.manual_seed(0)
for kind in (torch.optim.SGD, Curvature):
    net = nn.Linear(4, 2)
    optimizer = kind(net.parameters(), lr=0.1)
    for step in range(2):
        net(torch.rand(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_state_that_the_failing_update_has_broken_itself_is_no_cause(tmp_path):
    _, news = investigated(tmp_path / "divides.py", DIVIDES)
    report = next(one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code == "NS402"
    assert "NS403" not in [one.code for one in report.diagnoses]
    assert report.localization.first_bad.source.text == "moved.mul_(0.9).add_(p.grad / kept)"
