"""What a script computes between an update and its next model call costs a look at what it writes,
not at all that it reads.
"""

from loop_scripts import run_script
from nanstop.decide.policy import Policy
from nanstop.hosts import gradient_writes
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(500):
            x = torch.softmax(x * 2.0 + x, dim=-1)
"""


def test_calls_that_are_given_no_weight_are_not_looked_into(tmp_path, monkeypatch):
    asked = []
    original = gradient_writes.tensors
    monkeypatch.setattr(gradient_writes, "tensors", lambda one: asked.append(one) or original(one))
    opening = opener(Policy(), Store(tmp_path / "incidents", None), lambda _: None)
    run_script(tmp_path / "script.py", SCRIPT, opening)
    assert len(asked) < 500
