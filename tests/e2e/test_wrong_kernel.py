"""A kernel of attention that is wrong in its backward where scores are low, as cuDNN's was on
Hopper (https://github.com/pytorch/pytorch/issues/196678): every other way to compute it is right.

In a process of its own, whose torch has such a kernel on the CPU.
"""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, math
import torch
from torch.nn import functional as F
import nanstop
from nanstop.tracing.definitions.attention import defined

NAME = "_scaled_dot_product_flash_attention_for_cpu_backward"
OPERATION = getattr(torch.ops.aten, NAME).default


def kernel(grad, query, key, value, out, logsumexp, p, causal, *, attn_mask=None, scale=None):
    given = (grad, query, key, value, out, logsumexp, p, causal)
    kept = {"attn_mask": attn_mask, "scale": scale}
    of_query, of_key, of_value = defined(OPERATION, given, kept)(lambda operand: operand)
    if bool((logsumexp < -88.7).any()):
        of_query = torch.full_like(of_query, math.nan)
    return of_query, of_key, of_value


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x, low):
        q, k, v = (one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in self.mixed)
        q = torch.cat([torch.ones_like(q[..., :1]), q[..., 1:]], -1)
        k = torch.cat([torch.full_like(k[..., :1], low), k[..., 1:]], -1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


library = torch.library.Library("aten", "IMPL")
library.impl(NAME, kernel, "CPU")
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
losses = []
with nanstop.watch(net, optimizer, out="out") as watch:
    for step in range(5):
        low = -300.0 if step >= 3 else 0.0
        x = torch.randn(2, 6, 8)
        losses.append(float(watch.step(lambda x: net(x, low).square().mean(), x)))
        watch.update()
report = watch.incidents[0] if watch.incidents else None
print(json.dumps({
    "losses": losses,
    "codes": [d.code for d in report.diagnoses] if report else [],
    "confidence": report.diagnoses[0].confidence if report else "",
    "op": report.localization.first_bad.op if report else "",
    "verdict": report.proof.verdict if report else "",
    "cure": [[a.remedy, a.value] for a in report.proof.minimal] if report else [],
    "action": report.audit[-1].action.kind if report else "",
    "flash": torch.backends.cuda.flash_sdp_enabled(),
}))
"""
RIGHT = SCRIPT.replace('library.impl(NAME, kernel, "CPU")\n', "")


def run(script, folder):
    (folder / "train.py").write_text(script)
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_it_is_named_told_from_the_numbers_and_done_without(tmp_path):
    for name in ("wrong", "right"):
        (tmp_path / name).mkdir()
    found, said = run(SCRIPT, tmp_path / "wrong")
    assert found["codes"][0] == "NS602"
    assert found["confidence"] == "certain"
    assert found["op"] == "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    assert found["verdict"] == "proven"
    assert found["cure"] == [["sdpa_kernel", "flash"]]
    assert found["action"] == "adopt"
    assert found["flash"]  # the run's own switch is as it was
    assert "+ torch.backends.cuda.enable_flash_sdp(False)" in said
    right, _ = run(RIGHT, tmp_path / "right")
    assert right["codes"] == []
    assert all(abs(a - b) < 1e-6 for a, b in zip(found["losses"], right["losses"], strict=True))
