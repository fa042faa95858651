"""An operation that fails by chance: nothing is proven about it, whatever passes once."""

import os

import pytest
import torch
from torch import nn

from nanstop.decide.policy import Policy
from nanstop.hosts.script import autowatch
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

OFTEN = 166
"""Of 256: the operation fails in 65 of 100 calls."""


class ByChance(nn.Module):
    """Leaves the range of float16 when the operating system's random numbers want it to."""

    def forward(self, x):
        if self.training and os.urandom(1)[0] < OFTEN:
            x = (x.half() * 30_000 * 30_000).float()
        return x


def reports_of(folder):
    """Train 12 steps, of which the last six may fail; return what was reported."""
    store = Store(folder)
    store.reset()
    autowatch.install(opener(Policy(on_failure="repair"), store, lambda _: None))
    try:
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), ByChance(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for step in range(12):
            net[2].train(step >= 6)
            x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    finally:
        autowatch.unwatch()
    return list(store.reports.values())


@pytest.mark.parametrize("num_runs", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_no_format_is_proven_to_cure_what_comes_and_goes(tmp_path, num_runs):
    reports = [one for _ in range(num_runs) for one in reports_of(tmp_path)]
    assert len(reports) >= num_runs
    for report in reports:
        assert report.proof is None or report.proof.verdict != "proven", report.proof
        if report.replay is not None and report.replay.fidelity == "different":
            assert report.diagnoses[0].code == "NS603"
