"""Functions that a script compiles by itself: their calls are operations of its loss."""

import pytest
import torch

from loop_scripts import investigated, run_script, same
from nanstop.records import Report

torch.set_num_threads(1)
# Of the compiler itself, on inputs that other layers have made.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

LOOP = """
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
running = torch.zeros(4)
shadow = [p.detach().clone() for p in net.parameters()]
calls = 0


def prepared(x):
    return (x - x.mean(0)) / x.std(0)


def objective(out, y, w):
    share = (out.softmax(-1) * w[:, None]).sum() / w.sum()
    return F.cross_entropy(F.dropout(out, 0.1), y) + share


def whole(x, y, w):
    global calls
    calls += 1
    return objective(net(x), y, w)


def smoothed(out, y, w):
    with torch.no_grad():
        running.mul_(0.9).add_(out.mean(0), alpha=0.1)
    return objective(out - running, y, w)


def clip(gradients):
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for g in gradients:
        g.mul_(1.0 / norm.clamp(min=1.0))


class Loss:
    def forward(self, out, y, w):
        return objective(out, y, w)


HOW

losses = []
for step in range(7):
    x, y = prepared(torch.randn(16, 8)), torch.randint(0, 4, (16,))
    w = (y == y[0]).float() * (step != BAD)
    loss = LOSS
    optimizer.zero_grad()
    loss.backward()
    clip([p.grad for p in net.parameters()])
    optimizer.step()
    losses.append(f"{loss.item()} {running.sum().item()}")
PARAMETERS = [*net.state_dict().values(), running, torch.tensor(calls), torch.get_rng_state()]
PARAMETERS = [one.clone() for one in PARAMETERS]
graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
"""
COMPILE = "torch.compile({}, backend='eager', dynamic=False{})"
OUTSIDE = "objective(net(x), y, w)"
HOWS = {
    "its loss": (f"objective = {COMPILE.format('objective', '')}", OUTSIDE),
    "as one graph": (f"objective = {COMPILE.format('objective', ', fullgraph=True')}", OUTSIDE),
    "a method": (
        f"Loss.forward = {COMPILE.format('Loss.forward', '')}",
        "Loss().forward(net(x), y, w)",
    ),
    "with the model": (f"whole = {COMPILE.format('whole', '')}", "whole(x, y, w)"),
    "something else": (f"prepared = {COMPILE.format('prepared', '')}", OUTSIDE),
    "what it clips by": (f"clip = {COMPILE.format('clip', '')}", OUTSIDE),
    "with state": (f"smoothed = {COMPILE.format('smoothed', '')}", "smoothed(net(x), y, w)"),
}


def script(how):
    made, loss = HOWS[how]
    return LOOP.replace("HOW", made).replace("LOSS", loss)


@pytest.mark.parametrize("how", HOWS)
def test_a_healthy_run_and_what_is_compiled_for_it_are_as_alone(how, tmp_path):
    plain = run_script(tmp_path / "plain.py", script(how), BAD=-1)
    healthy, news = investigated(tmp_path / "healthy.py", script(how), BAD=-1)
    assert healthy["losses"] == plain["losses"]
    assert same(healthy["PARAMETERS"], plain["PARAMETERS"])
    assert healthy["graphs"] == plain["graphs"] > 0
    assert len(news) == 1  # how it ended


@pytest.mark.parametrize("how", [how for how in HOWS if how != "with state"])
def test_the_line_is_named_and_cured_wherever_it_is_compiled(how, tmp_path):
    plain = run_script(tmp_path / "plain.py", script(how), BAD=5)
    ending, news = investigated(tmp_path / "bad.py", script(how), BAD=5)
    report = next(one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code == "NS205"
    source = report.localization.first_bad.source
    assert source.text.strip().endswith("/ w.sum()")
    assert report.proof.verdict == "proven"
    # What looked into it has counted, drawn and averaged nothing.
    assert ending["losses"] == plain["losses"]
    assert same(ending["PARAMETERS"][-2:], plain["PARAMETERS"][-2:])


def test_a_function_that_writes_to_what_nobody_puts_back_is_not_run_again(tmp_path):
    plain = run_script(tmp_path / "plain.py", script("with state"), BAD=5)
    ending, news = investigated(tmp_path / "bad.py", script("with state"), BAD=5)
    report = next(one for one in news if isinstance(one, Report))
    assert report.localization is None
    assert ending["losses"] == plain["losses"]
    assert same(ending["PARAMETERS"][-2:], plain["PARAMETERS"][-2:])
