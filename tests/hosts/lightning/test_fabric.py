"""Loops over what Lightning's Fabric wraps: its own backward is asked for of nothing that is run
again.

In processes of their own, as `nanstop run` starts them.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from nanstop.store.incidents import load_summary

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


def run(folder, *words, watched=True):
    """Return what a training came to, and the rows of its summary."""
    folder.mkdir()
    (folder / "loop.py").write_text(SCRIPT)
    before = ("-m", "nanstop", "run", "--out", "out") if watched else ()
    done = subprocess.run(
        [sys.executable, *before, "loop.py", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "left out" not in done.stderr
    rows = load_summary(folder / "out" / "summary.json").incidents if watched else ()
    return json.loads(done.stdout.splitlines()[-1]), rows


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_healthy_loop_is_bitwise_equal(tmp_path, precision):
    plain, _ = run(tmp_path / "plain", precision, "-1", watched=False)
    watched, rows = run(tmp_path / "watched", precision, "-1")
    assert watched == plain
    assert rows == ()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_failing_step_is_run_again_whatever_backward_fabric_has(tmp_path, precision):
    _, (row,) = run(tmp_path / "run", precision, "5")
    assert (row.code, row.step) == ("NS304", 5)
    (report,) = (tmp_path / "run" / "out").glob("*/report.json")
    said = report.read_text()
    assert '"line":20,"function":"<module>","text":"loss = (found' in said
    assert "`0.weight`" in said
    assert "_forward_module" not in said
