"""Loops over what Lightning's Fabric wraps: its own backward is asked for of nothing that is run
again.

In processes of their own, as `nanstop run` starts them.
"""

from importlib.util import find_spec

import pytest

from lightning_runs import ended

pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.slow,  # trainings in processes of their own
]

SCRIPT = """
import hashlib, json, logging, sys, warnings
import lightning as L
import torch

warnings.filterwarnings("ignore")
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
precision, bad = sys.argv[1], int(sys.argv[2])
L.seed_everything(0, verbose=False)
fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model.load_state_dict(state_dict=model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
model, optimizer = fabric.setup(model, optimizer)
losses = []
for step in range(12):
    x = torch.randn(16, 8)
    found = model(x).float()
    spread = (found - found.mean()).square().sum() * (step != bad)
    loss = (found - x.sum(1, keepdim=True)).square().mean() + 1e-3 * spread.sqrt()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(str(loss.item()))
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(json.dumps([hashlib.sha256(weights).hexdigest(), losses]))
"""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_healthy_loop_is_bitwise_equal(tmp_path, precision):
    plain, *_ = ended(tmp_path / "plain", SCRIPT, precision, "-1", watched=False)
    watched, rows, errors = ended(tmp_path / "watched", SCRIPT, precision, "-1")
    assert watched == plain
    assert rows == ()
    assert "left out" not in errors


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_failing_step_is_run_again_whatever_backward_fabric_has(tmp_path, precision):
    _, (row,), _ = ended(tmp_path / "run", SCRIPT, precision, "5")
    assert (row.code, row.step) == ("NS304", 5)
    (report,) = (tmp_path / "run" / "out").glob("*/report.json")
    said = report.read_text()
    assert '"line":20,"function":"<module>","text":"loss = (found' in said
    assert "`0.weight`" in said
    assert "_forward_module" not in said
