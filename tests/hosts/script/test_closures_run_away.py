"""LBFGS runs away: an infinite norm of finite gradients is no failed evaluation."""

import torch
from torch import nn

from nanstop.decide.policy import Policy
from nanstop.hosts.script import autowatch
from nanstop.session.factory import opener
from nanstop.store.incidents import Store


def test_no_later_evaluations_gradients_are_replayed_with_the_weights_of_an_earlier(tmp_path):
    torch.manual_seed(0)
    store = Store(tmp_path)
    store.reset()
    autowatch.install(opener(Policy(on_failure="repair"), store, lambda _: None))
    try:
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=20)
        for _ in range(5):
            x = torch.randn(8, 16)
            y = x.sum(-1, keepdim=True)

            def closure(x=x * 30, y=y):
                optimizer.zero_grad()
                loss = ((net(x) - y) ** 4).mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    finally:
        autowatch.unwatch()
    found = [report.diagnoses[0].code for report in store.reports.values()]
    assert "NS404" in found
    # With other kernels one update makes its own weights NaN before anything overflows.
    assert set(found) <= {"NS404", "NS402", "NS401"}
