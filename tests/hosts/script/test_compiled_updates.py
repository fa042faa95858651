"""Updates that compiled code makes: it calls no hooks of their optimizers."""

import pytest
import torch

from loop_scripts import investigated, run_script, same
from nanstop.records import Report

torch.set_num_threads(1)
# Of the compiler itself, on inputs that other layers have made and in what it imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

LOOP = """
import torch
import torch._dynamo
from torch import nn

torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class Signs(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})
        self.num_steps = 0

    @torch.no_grad()
    def step(self):
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)


class Training:
    def __init__(self):
        self.net, self.optimizer = net, optimizer
        self.loss = torch.compile(self.own_loss, backend="eager")
        self.update = torch.compile(self.own_update, backend="eager")

    def own_loss(self, out, y):
        return (out - y).pow(2).mean()

    def own_update(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()


HOW

losses = []
for step in range(7):
    for _ in range(2):
        x, y = torch.randn(4, 8), torch.randn(4, 1)
        w = (y > 10).float() if step == BAD else torch.ones(4, 1)
        out = net(x)
        loss = mse(out, y) + (out * w).sum() / w.sum()
        loss.backward()
        losses.append(loss.item())
    update()
    if IS_OPEN:
        optimizer.zero_grad()
PARAMETERS = [*net.state_dict().values(), torch.get_rng_state()]
PARAMETERS = [one.clone() for one in PARAMETERS]
graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
"""
MSE = "mse = nn.functional.mse_loss"
STEP = "update = torch.compile(optimizer.step, backend='eager')"
FUNCTION = "@torch.compile(backend='eager')\ndef update():\n    "
BESIDE = """
def report():
    return [group["lr"] for group in optimizer.param_groups], counter.step


def step_if(is_due):
    if is_due:
        optimizer.step()


class Counter:
    step = 3


counter = Counter()
report, step_if = (torch.compile(one, backend="eager") for one in (report, step_if))
update = torch.compile(optimizer.step, backend="eager")


def mse(out, y):
    report()
    step_if(False)
    return nn.functional.mse_loss(out, y)
"""
HOWS = {
    "its step": STEP,
    "under a schedule": f"torch.optim.lr_scheduler.StepLR(optimizer, 99)\n{STEP}",
    "an optimizer of the script's own": f"optimizer = Signs(net.parameters())\n{STEP}",
    "a function": f"{FUNCTION}optimizer.step()",
    "a method": "training = Training()\nupdate, mse = training.update, training.loss",
    "beside functions that make none": BESIDE,
    "and cleared": f"{FUNCTION}optimizer.step()\n    optimizer.zero_grad()",
}


def script(how):
    made = HOWS[how] if "mse" in HOWS[how] else f"{HOWS[how]}\n{MSE}"
    return LOOP.replace("HOW", made).replace(
        "IS_OPEN", str(how not in ("and cleared", "now and then"))
    )


@pytest.mark.parametrize("how", HOWS)
def test_a_healthy_run_is_as_alone_and_is_watched(how, tmp_path):
    plain = run_script(tmp_path / "plain.py", script(how), BAD=-1)
    healthy, news = investigated(tmp_path / "healthy.py", script(how), BAD=-1)
    assert healthy["losses"] == plain["losses"]
    assert same(healthy["PARAMETERS"], plain["PARAMETERS"])
    assert healthy["graphs"] == plain["graphs"]  # of an own optimizer there may be none
    (ended,) = news
    # Of a function that clears gradients, too, the first update was not known to come.
    assert sum(ended.steps.values()) == 7


@pytest.mark.parametrize("how", HOWS)
def test_a_bad_update_is_told_with_its_line_and_left_out(how, tmp_path):
    ending, news = investigated(tmp_path / "bad.py", script(how), on_failure="skip", BAD=5)
    report = next(one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code == "NS205"
    assert report.incident.at.step == 5
    assert report.localization.first_bad.source.text.strip().endswith("/ w.sum()")
    assert report.proof.verdict == "proven"
    assert all(one.isfinite().all() for one in ending["PARAMETERS"][:-1])
    assert len(news) == 2
