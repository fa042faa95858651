"""The logarithm of a logarithm of probabilities, as of a KL divergence's target, is told as that;
what is no such logarithm is not.
"""

import pytest

from loop_scripts import investigated
from nanstop.records import Report
from nanstop.report.text.run_end import RunEnd

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
student = nn.Linear(4, 5)
teacher = nn.Linear(4, 5).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), 1e-2)
for step in range(2):
    x = torch.randn(8, 4)
    s, t = student(x).log_softmax(-1), teacher(x).log_softmax(-1)
    loss = LOSS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WRONG = {
    "by torch": 'F.kl_div(s, t, reduction="batchmean")',
    "by hand": "(t * (t.log() - s)).sum(-1).mean()",
}
OTHERS = {
    "weighed": 'F.kl_div(s, 3 * t, reduction="batchmean")',
    "of what is below 0 besides": "torch.xlogy(t, s - 9).mean()",
    "scores": 'F.kl_div(s, teacher(x), reduction="batchmean")',
}
RIGHT = {
    "said": 'F.kl_div(s, t, reduction="batchmean", log_target=True)',
    "probabilities": 'F.kl_div(s, t.exp(), reduction="batchmean")',
}


def told(folder, loss):
    _, news = investigated(folder / "script.py", SCRIPT.replace("LOSS", loss))
    return news


@pytest.mark.parametrize("name", WRONG)
def test_it_is_told_with_its_cure(tmp_path, name):
    report = next(one for one in told(tmp_path, WRONG[name]) if isinstance(one, Report))
    first = report.diagnoses[0]
    assert (first.code, first.confidence) == ("NS118", "certain")
    assert "sum to 1" in first.confirmed
    assert "log_target=True" in first.usual_cure


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_such_logarithm_is_not_called_one(tmp_path, name):
    report = next(one for one in told(tmp_path, OTHERS[name]) if isinstance(one, Report))
    assert [one.code for one in report.diagnoses] == ["NS204"]


@pytest.mark.parametrize("name", RIGHT)
def test_a_target_that_is_right_is_left_in_peace(tmp_path, name):
    assert all(isinstance(one, RunEnd) for one in told(tmp_path, RIGHT[name]))
