"""Processes that die while they train on a GPU:
what is left of them, with backward in the engine's own threads.
"""

import pytest

from nanstop.commands.run.launch import launch
from nanstop.decide.policy import Policy
from nanstop.store.incidents import load_report, load_summary

pytestmark = pytest.mark.gpu

TRAINING = """
import os, signal
import torch
from torch import nn

class Dying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if step == 2:
            {fatal}
        return gradient * 1.0

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(Dying.apply(self.up(x)).relu())

net = nn.Sequential(Block(), Block()).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(4):
    optimizer.zero_grad()
    net(torch.randn(32, 64, device="cuda")).square().mean().backward()
    optimizer.step()
"""


def run(fatal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING.replace("{fatal}", fatal))
    code = launch(["train.py"], policy=Policy(), out="out", record=True)
    summary = load_summary("out/summary.json")
    return code, summary, load_report(f"out/{summary.incidents[0].folder}")


def test_an_allocation_that_fails_on_the_gpu(tmp_path, monkeypatch):
    code, summary, report = run("torch.empty(2**50, device='cuda')", tmp_path, monkeypatch)
    assert (code, summary.ended) == (1, "out_of_memory")
    assert summary.incidents[0].code == "NS604"
    assert "CUDA out of memory" in report.incident.signals[0].message
    assert report.incident.environment.gpu


def test_the_last_operations_of_a_backward_outlive_it(tmp_path, monkeypatch):
    code, summary, report = run("os.kill(os.getpid(), signal.SIGKILL)", tmp_path, monkeypatch)
    (row,) = summary.incidents
    assert (code, row.code, row.step, row.phase) == (137, "NS601", 2, "backward")
    modules = {event.module for event in report.localization.growth if event.phase == "backward"}
    assert "1.down" in modules
