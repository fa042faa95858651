"""Embeddings whose gradients are sparse: a cure is tried on them as on any other."""

import torch

from loop_scripts import investigated
from nanstop.records import Report

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(0)
table = nn.Embedding(20, 4, sparse=True)
PARAMETERS = list(table.parameters())
optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
for step in range(4):
    ids = torch.randint(0, 20, (8,))
    score = table(ids).sum(1) - (120.0 if step == 2 else 0.0)
    loss = LOSS(score)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
BY_HAND = "-torch.log(torch.sigmoid(score)).mean()"
EXPERT = "-functional.logsigmoid(score).mean()"


def test_a_failing_step_is_run_again_under_a_proven_cure(tmp_path):
    cured, news = investigated(
        tmp_path / "by_hand.py", SCRIPT.replace("LOSS(score)", BY_HAND), on_failure="repair"
    )
    (report,) = [one for one in news if isinstance(one, Report)]
    assert not report.failures
    assert (report.diagnoses[0].code, report.proof.verdict) == ("NS207", "proven")
    expert, told = investigated(tmp_path / "expert.py", SCRIPT.replace("LOSS(score)", EXPERT))
    assert not [one for one in told if isinstance(one, Report)]
    assert all(map(torch.allclose, cured["PARAMETERS"], expert["PARAMETERS"]))
