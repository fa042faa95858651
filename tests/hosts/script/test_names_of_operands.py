"""What the script calls the tensors of its loss is read of its source once, not in each step."""

from loop_scripts import run_script
from nanstop.decide.policy import Policy
from nanstop.hosts.tape import tape_calls
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
states, returns, advantages = torch.randn(64, 4), torch.randn(64), torch.randn(64)
for step in range(24):
    rows = torch.randperm(64)[:8]
    value = model(states[rows]).view(-1)
    loss = ((value - returns[rows]) ** 2).mean() - (value * advantages[rows]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_line_of_each_step_is_read_once(tmp_path, monkeypatch):
    read, original = [], tape_calls.spelled

    def spelled(tree, span, number):
        read.append((span, number))
        return original(tree, span, number)

    monkeypatch.setattr(tape_calls, "spelled", spelled)
    tape_calls._operands_at.cache_clear()
    opening = opener(Policy(), Store(tmp_path / "incidents", None), lambda _: None)
    run_script(tmp_path / "script.py", SCRIPT, opening)
    assert read
    assert len(read) == len(set(read))
