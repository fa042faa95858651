"""Evaluations of a loop that the script itself finds without a number."""

from loop_scripts import assert_left_alone, investigated
from nanstop.records import Report

NEGATIVE = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, rows):
        hidden = self.first(rows)
        hidden = torch.relu(hidden)
        return torch.log_softmax(self.second(hidden), 1)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
rows, labels = torch.randn(12, 4), torch.arange(12) % 3
held_out = rows[8:].clone()
if BAD:
    held_out[1] = torch.nan
losses = []
for step in range(3):
    loss = F.nll_loss(net(rows[:8]), labels[:8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        losses.append(F.nll_loss(net(held_out), labels[8:]).item())
PARAMETERS = list(net.parameters())
"""


def test_results_below_0_are_told_apart(tmp_path):
    _, news = investigated(tmp_path / "script.py", NEGATIVE, BAD=True)
    report = next(one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code == "NS501"
    assert report.proof is None or report.proof.verdict != "proven"


def test_a_healthy_one_is_left_alone(tmp_path):
    assert_left_alone(tmp_path, NEGATIVE)


BY_HAND = """
net = nn.Linear(4, 3)
rows, labels = torch.randn(12, 4), torch.arange(12) % 3
for step in range(3):
    net.zero_grad()
    F.cross_entropy(net(rows), labels).backward()
    for weight in net.parameters():
        weight.data.add_(weight.grad, alpha=-0.1)
with torch.no_grad():
    loss = F.cross_entropy(net(rows * torch.nan), labels).item()
"""


def test_one_after_updates_by_hand_has_their_number(tmp_path):
    head = NEGATIVE.partition("class Net")[0]
    _, news = investigated(tmp_path / "script.py", head + BY_HAND)
    report = next(one for one in news if isinstance(one, Report))
    assert report.incident.at.step == 3
