"""A tensor that is not finite and that a script keeps for several steps."""

import pytest

from loop_scripts import investigated, run_script, same
from nanstop.records import Report

POLICY = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
optimizer = torch.optim.Adam(net.parameters(), 3e-3)
losses = []
def logits_of(x, legal):
    return net(x).masked_fill(~legal, FILL)
for epoch in range(2):
    x, legal = torch.randn(12, 8), torch.rand(12, 6) > 0.3
    legal[:, 0] = True
    with torch.no_grad():
        old = torch.log_softmax(logits_of(x, legal), -1)
    for step in range(3):
        new = torch.log_softmax(logits_of(x, legal), -1)
        far = {far}
        loss = far - new[:, 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
PARAMETERS = [p.detach().clone() for p in net.parameters()]
"""


def reports_of(path, **values):
    _, news = investigated(path / "script.py", POLICY.format(far=values.pop("far")), **values)
    return [one for one in news if isinstance(one, Report)]


FAR = "(old.exp() * (old - new)).sum(-1).mean()"


def test_what_is_kept_for_later_steps_is_told_once_of_its_cause(tmp_path):
    reports = reports_of(tmp_path, far=FAR, FILL=float("-inf"))
    assert len({one.incident.id for one in reports}) == 1
    assert reports[0].diagnoses[0].code == "NS204"


@pytest.mark.slow
def test_another_line_that_reads_it_is_another_failure(tmp_path):
    far = (
        f"{FAR}\n"
        "        if step == 2: far = ((old - new).mean() * 0).nan_to_num(1.0) if epoch else "
        "(old[:, 1:] - new[:, 1:]).mean()"
    )
    reports = reports_of(tmp_path, far=far, FILL=float("-inf"))
    assert len({one.incident.id for one in reports}) > 1


def test_a_finite_fill_is_left_alone(tmp_path):
    source = POLICY.format(far=FAR)
    plain = run_script(tmp_path / "plain.py", source, FILL=-1e4)
    watched, news = investigated(tmp_path / "watched.py", source, FILL=-1e4)
    assert not [one for one in news if isinstance(one, Report)]
    assert watched["losses"] == plain["losses"]
    assert same(watched["PARAMETERS"], plain["PARAMETERS"])
