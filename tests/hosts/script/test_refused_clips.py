"""A clip that raises for a norm that is not finite, before the loss scaler could leave the update
out: what would be the scaler's own is told, and left out.
"""

import pytest

import nanstop
from loop_scripts import assert_left_alone, investigated, run_script

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24 if globals().get("BAD", True) else 64.0)
losses = []
for step in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(5, 4)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=RAISES)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
PARAMETERS = [p.detach() for p in net.parameters()]
"""
RAISING = SCRIPT.replace("RAISES", "True")


def _reports(news):
    return [one for one in news if isinstance(one, nanstop.Report)]


def test_what_a_clip_refuses_under_a_scaler_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        run_script(tmp_path / "plain.py", RAISING)
    _, news = investigated(tmp_path / "script.py", RAISING, on_failure="skip")
    report = _reports(news)[0]
    assert report.incident.at.step == 0
    assert report.diagnoses[0].code == "NS301"
    assert "under a loss scale of" in report.diagnoses[0].cause


@pytest.mark.parametrize("script", [RAISING, SCRIPT.replace("RAISES", "False")])
def test_a_scale_that_fits_is_left_alone(tmp_path, script):
    assert_left_alone(tmp_path, script)


def test_without_the_exception_it_is_the_scalers_own(tmp_path):
    _, news = investigated(tmp_path / "script.py", SCRIPT.replace("RAISES", "False"))
    assert not _reports(news)
