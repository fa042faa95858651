"""What an incident has explained is not told once more as another one."""

import torch
from torch import nn

import nanstop


def test_gradients_without_a_norm_have_the_reason_that_a_failure_had(tmp_path):
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def loss(given):
        return (given["c"] + net(given["x"])).exp().mean()

    with nanstop.watch(net, optimizer, out=tmp_path) as watch:
        for step in range(8):
            size = 200.0 if step == 1 else 80.0 if step > 1 else 0.0
            watch.step(loss, {"x": torch.randn(8, 4), "c": torch.full((8, 1), size)})
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            watch.update()
    codes = [incident.diagnoses[0].code for incident in watch.incidents]
    assert codes
    assert "NS307" not in codes
