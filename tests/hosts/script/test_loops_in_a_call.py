"""Modules whose own call is a step of a training: it makes a backward and an update."""

from loop_scripts import investigated, run_script, same
from nanstop.records import Report

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Linear):
    def parameters(self):
        return list(super().parameters())

class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net(4, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def forward(self, x, y):
        scale = x.sum(1, keepdim=True).log1p() if BAD else 1.0
        loss = functional.mse_loss(scale * self.net(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

torch.manual_seed(0)
meta = Meta()
PARAMETERS = list(meta.parameters())
LOSSES = []
for step in range(6):
    x = torch.rand(8, 4) / 8 - (9 if step == 3 else 0)
    LOSSES.append(meta(x, torch.rand(8, 1)))
"""


def test_updates_inside_of_a_call_are_watched_from_the_second_on(tmp_path):
    watched, news = investigated(tmp_path / "bad.py", SCRIPT, on_failure="skip", BAD=True)
    (report,) = [one for one in news if isinstance(one, Report)]
    first = report.localization.first_bad
    assert first.op == "aten.log1p.default"
    assert "log1p() if BAD" in first.source.text
    assert all(one.isfinite().all() for one in watched["PARAMETERS"])


def test_a_healthy_one_is_left_as_it_is(tmp_path):
    plain = run_script(tmp_path / "plain.py", SCRIPT, BAD=False)
    watched, news = investigated(tmp_path / "watched.py", SCRIPT, BAD=False)
    (end,) = news
    assert list(end.steps.values()) == [5]
    assert same(plain["PARAMETERS"], watched["PARAMETERS"])
    assert plain["LOSSES"] == watched["LOSSES"]
