"""A model whose class gives its parameters by a method of its own is watched like any other."""

import pytest

import nanstop
from loop_scripts import assert_left_alone, investigated

SCRIPT = """
import torch

torch.manual_seed(0)

class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(6, 1)
        self.target = torch.nn.Linear(6, 1)
        self.target.load_state_dict(self.body.state_dict())

    def NAMED

    def parameters(self, recurse=True):
        for _, one in self.named_parameters(recurse=recurse):
            yield one

    def forward(self, x, reward):
        with torch.no_grad():
            expected = reward + 0.9 * self.target(x)
        return (self.body(x) - expected).pow(2).mean()

model = Loss()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for step in range(6):
    reward = torch.rand(4, 1) * (step != 3 or not globals().get("BAD", True)) + 1e-6 * (step != 3)
    loss = model(torch.randn(4, 6), torch.log(reward))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach() for p in model.parameters()]
"""
# As torchrl's LossModule: what its targets hold is hidden, and duplicates are not asked for.
HIDDEN = """named_parameters(self, prefix="", recurse=True):
        for name, one in super().named_parameters(prefix=prefix, recurse=recurse):
            if not name.startswith("target"):
                yield name, one"""
ALL = """named_parameters(self):
        yield from super().named_parameters()"""


@pytest.mark.parametrize("named", [HIDDEN, ALL.replace("(self)", "(self, recurse=True)")])
def test_the_failing_line_is_told(tmp_path, named):
    script = SCRIPT.replace("NAMED", named)
    _, news = investigated(tmp_path / "script.py", script)
    report = next(one for one in news if isinstance(one, nanstop.Report))
    assert report.incident.at.step == 3
    assert "torch.log(reward)" in report.localization.first_bad.source.text
    assert_left_alone(tmp_path, script)
