"""What a function under ``torch.vmap`` has left at an object cannot be read when it has ended."""

import nanstop
from loop_scripts import assert_left_alone, investigated

SCRIPT = """
import torch

torch.manual_seed(0)

class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(3, 6, 1))

    def forward(self, x):
        def one(weight):
            self.last = x @ weight
            return self.last.tanh()
        return torch.vmap(one)(self.weights).mean(0)

model = Heads()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for step in range(6):
    share = torch.rand(4, 1)
    if step == 3 and globals().get("BAD", True):
        share[2] = 0
    loss = (model(torch.randn(4, 6)) - torch.log(share)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach() for p in model.parameters()]
"""


def test_a_step_is_run_again_all_the_same(tmp_path):
    _, news = investigated(tmp_path / "script.py", SCRIPT)
    report = next(one for one in news if isinstance(one, nanstop.Report))
    assert report.replay is not None
    assert report.failures == ()
    assert "torch.log(share)" in report.localization.first_bad.source.text
    assert_left_alone(tmp_path, SCRIPT)
