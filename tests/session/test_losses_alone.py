"""A loss that is not finite in each step, of which the gradients are: every update is applied."""

from loop_scripts import investigated, run_script, same
from nanstop.records import Report
from nanstop.session.failing.investigation import Investigation

SCRIPT = """
import torch

torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
PARAMETERS = list(net.parameters())
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
target = torch.tensor([0.5, 0.5, 0.0])
for step in range(12):
    out = net(torch.rand(8, 4)).log_softmax(-1)
    loss = (target * (target.log() - out)).sum()
    if step == BAD:
        loss = loss * (out.sum() - out.sum()).sqrt()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _looks(monkeypatch):
    met, look = [], Investigation.look
    monkeypatch.setattr(Investigation, "look", lambda self, one: (met.append(1), look(self, one)))
    return met


def test_it_is_looked_into_ever_more_seldom(tmp_path, monkeypatch):
    met = _looks(monkeypatch)
    plain = run_script(tmp_path / "plain.py", SCRIPT, BAD=-1)
    watched, news = investigated(tmp_path / "loss.py", SCRIPT, on_failure="repair", BAD=-1)
    (report,) = [one for one in news if isinstance(one, Report)]
    assert report.audit[-1].action.kind == "continue"
    assert len(met) == 6  # of the first four, the fifth and the ninth
    assert same(plain["PARAMETERS"], watched["PARAMETERS"])


def test_gradients_that_break_among_them_are_another_failure(tmp_path, monkeypatch):
    _looks(monkeypatch)
    watched, news = investigated(tmp_path / "both.py", SCRIPT, on_failure="skip", BAD=7)
    found = [one.audit[-1].action.kind for one in news if isinstance(one, Report)]
    assert found == ["continue", "skip"]
    assert all(one.isfinite().all() for one in watched["PARAMETERS"])
