"""Failures that look alike: each is folded into the one whose line it has, or whose cure it has."""

from loop_scripts import investigated
from nanstop.records import Report

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(6):
    x = torch.rand(6, 4) + 0.5
    h = net(x)
    first = (h.mean(-1) / (x[:, 0] * (step != 1))).mean()
    none = torch.div(h.sum(-1), x[:, 1] * (step not in (2, 4)), rounding_mode="floor").mean()
    last = (h.amax(-1) / (x[:, 2] * (step not in (3, 5)))).mean()
    loss = first + none + last
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_each_line_is_told_once(tmp_path):
    _, news = investigated(tmp_path / "script.py", SCRIPT, on_failure="repair")
    reports = {one.incident.id: one for one in news if isinstance(one, Report)}
    lines = [one.localization.first_bad.source.text[:5] for one in reports.values()]
    assert lines == ["first", "none ", "last "]
    assert reports["0001"].proof.verdict == "none_found"
