"""A buffer that training has made NaN while every loss of it is finite: an evaluation shows it, and
the line that writes to the buffer is told.
"""

import pytest

import nanstop
from loop_scripts import assert_left_alone, investigated
from nanstop.report.text.blocks.evidence import evidence

SCRIPT = """
import torch
from torch import nn

class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("variance", torch.ones(1))

    def forward(self, x):
        OTHER
        return x

class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("variance", torch.ones(dim))

    def forward(self, x):
        if self.training:
            mean, variance = x.mean(0), x.var(0, unbiased=False)
            with torch.no_grad():
                WRITE
        else:
            mean, variance = 0.0, self.variance
        return (x - mean) / torch.sqrt(variance + 1e-5)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), Norm(6), Other(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for number in (8, 8, 1 if globals().get("BAD", True) else 3):
    model.train()
    loss = model(torch.randn(number, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.ones(5, 4)).square().mean().item())
PARAMETERS = [p.detach() for p in model.parameters()]
"""
LERP = "self.variance.lerp_(variance * len(x) / torch.tensor(len(x) - 1.0), 0.1)"
SET = (
    "self.variance = 0.9 * self.variance + (x - mean).square().sum(0) / torch.tensor(len(x) - 1.0)"
)


def _told(tmp_path, script):
    _, news = investigated(tmp_path / "script.py", script)
    report = next(one for one in news if isinstance(one, nanstop.Report))
    assert report.diagnoses[0].code == "NS506"
    assert report.incident.at.step == 3 or report.localization.key.phase == "evaluate"
    return [text for block in evidence(report.diagnoses[0], report) for text in block.cells]


@pytest.mark.parametrize("write", [LERP, SET])
def test_the_line_that_writes_to_a_buffer_is_told(tmp_path, write):
    script = SCRIPT.replace("WRITE", write).replace("OTHER", "")
    number = script[: script.index(write)].count("\n") + 1
    assert f"steps write to it at script.py:{number}: `{write}`" in _told(tmp_path, script)
    assert_left_alone(tmp_path, script)


OTHERS = {
    "two lines": (f"{LERP}; self.variance.mul_(1.0)", ""),
    "another class": ("pass", "self.variance.mul_(1.0)"),
}


@pytest.mark.parametrize("spelled", OTHERS)
def test_no_line_is_told_where_it_is_not_the_only_one_of_its_class(tmp_path, spelled):
    write, other = OTHERS[spelled]
    script = SCRIPT.replace("WRITE", write.replace("; ", "\n                "))
    script = script.replace("OTHER", other)
    if spelled == "another class":
        script = script.replace("    losses.append(loss.item())", BY_HAND)
    assert not any("steps write to it" in text for text in _told(tmp_path, script))


BY_HAND = """    losses.append(loss.item())
    if number == 1:
        dict(model.named_buffers())["1.variance"].fill_(float("nan"))"""
