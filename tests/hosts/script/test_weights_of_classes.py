"""A tensor of the script's own that a loss keeps as a buffer is no buffer that a replay moves."""

import pytest

import nanstop
from loop_scripts import assert_left_alone, investigated

SCRIPT = """
import torch

torch.manual_seed(0)
rows = torch.randn(24, 6)
labels = torch.randint(0, 3, (24,))
counts = torch.bincount(labels, minlength=4)
weights = counts.sum() / (4 * counts.clamp(min=0 if globals().get("BAD", True) else 1))
model = torch.nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
criterion = torch.nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1)
losses = []
for batch, target in zip(rows.split(6), labels.split(6)):
    optimizer.zero_grad()
    loss = CRITERION(model(batch), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach() for p in model.parameters()]
"""


@pytest.mark.parametrize(
    "criterion", ["criterion", "torch.nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1)"]
)
def test_a_first_step_with_them_is_replayed(tmp_path, criterion):
    script = SCRIPT.replace("CRITERION", criterion)
    _, news = investigated(tmp_path / "script.py", script)
    first = next(one for one in news if isinstance(one, nanstop.Report))
    assert (first.incident.at.step, first.failures) == (0, ())
    assert first.replay is not None
    assert first.diagnoses[0].code == "NS506"
    assert first.localization.first_bad.source.text.startswith(f"loss = {criterion}")
    assert_left_alone(tmp_path, script)
