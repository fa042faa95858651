"""One batch that sends a training off, some updates before anything is not finite; and a loss that
jumps and stays where nothing ever fails.
"""

import pytest

from loop_scripts import assert_left_alone, investigated
from nanstop.records import Diagnosis, Report

LOOP = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), lr={rate}, momentum=0.9)
X, losses = torch.randn(384, 10), []
Y = X[:, :3].argmax(1)
if BAD: X[91] *= {size}
for step in range(24):
    rows = slice(16 * step, 16 * step + 16)
    loss = nn.functional.cross_entropy(net(X[rows]), Y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach().clone() for p in net.parameters()]
"""


def told_of(path, size, rate=0.05):
    _, news = investigated(path / "script.py", LOOP.format(size=size, rate=rate), BAD=True)
    return news


def test_the_batch_that_training_ran_away_after(tmp_path):
    report = next(one for one in told_of(tmp_path, 1e30) if isinstance(one, Report))
    diagnosis = report.diagnoses[0]
    assert (diagnosis.code, diagnosis.confidence) == ("NS504", "certain")
    assert "sample 11 of step 5" in diagnosis.title
    assert "row 91 of `X`" in diagnosis.lines[0]
    assert report.proof.verdict == "proven"
    assert [atom.remedy for atom in report.proof.minimal] == ["clip"]


def test_a_rate_at_which_every_batch_runs_away_is_none_of_theirs(tmp_path):
    news = told_of(tmp_path, 1.0, rate=1e12)
    report = next(one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code != "NS504"
    assert report.incident.apart is None


@pytest.mark.parametrize("size", [1e12, 1e6])
def test_a_finite_loss_that_jumps_and_stays(tmp_path, size):
    news = told_of(tmp_path, size)
    found = [one for one in news if isinstance(one, Diagnosis)]
    assert [(one.code, one.seen.step) for one in found] == [("NS404", 5)]


def test_a_spike_that_training_comes_back_from(tmp_path):
    source = LOOP.format(size=1e6, rate=0.05).replace(
        "    optimizer.step()",
        "    nn.utils.clip_grad_norm_(net.parameters(), 0.1)\n    optimizer.step()",
    )
    _, news = investigated(tmp_path / "script.py", source, BAD=True)
    assert not [one for one in news if isinstance(one, Diagnosis)]
    assert_left_alone(tmp_path, source)


def test_a_loss_that_leaves_zero(tmp_path):
    """A critic before its first reward and after."""
    source = LOOP.format(size=1.0, rate=1e-3)
    source = source.replace(
        "    optimizer.zero_grad()",
        "    loss = loss * (1e-8 if step < 6 else 1.0)\n    optimizer.zero_grad()",
    )
    _, news = investigated(tmp_path / "script.py", source, BAD=True)
    assert "NS404" not in [one.code for one in news if isinstance(one, Diagnosis)]
