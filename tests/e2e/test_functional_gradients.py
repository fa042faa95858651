"""Loops that take their gradients with ``torch.func`` are watched and run again."""

import pytest
import torch

from e2e.scripts import HEAD
from loop_scripts import assert_left_alone, investigated, run_script
from nanstop.report.text.run_end import RunEnd

HEAD = HEAD.replace('BAD = "bad" in sys.argv\n', "")
LOOP = """
from torch.func import functional_call, grad, grad_and_value, vmap
net = nn.Linear(4, 3)
params = {name: p.detach() for name, p in net.named_parameters()}
weight, bias = params["weight"], params["bias"]
losses = []

def loss_of(weight, bias, x, factor=1.0):
    length = (x @ weight.T + factor * bias).square().sum(1)
    return torch.sqrt(length).mean()

def of_params(params, x):
    length = functional_call(net, params, (x,)).square().sum(1)
    return torch.sqrt(length).mean(), length.detach()

for step in range(4):
    x = torch.randn(6, 4)
    if BAD and step == 2:
        x[1], bias = 0.0, bias * 0
        params = {**params, "bias": bias}
    STEP
PARAMETERS = [weight, bias, *params.values()]
"""
STEPS = {
    "grad": "weight = weight - 0.1 * grad(loss_of)(weight, bias, x, factor=1.0)",
    "several": (
        "(g, h), loss = grad_and_value(loss_of, argnums=(0, 1))(weight, bias, x); "
        "weight, bias = weight - 0.1 * g, bias - 0.1 * h; losses.append(loss.item())"
    ),
    "a dict": (
        "g, (loss, _) = grad_and_value(of_params, has_aux=True)(params, x); "
        "params = {n: p - 0.1 * g[n] for n, p in params.items()}; losses.append(loss.item())"
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_gradients_of_a_function(tmp_path, name):
    source = HEAD + LOOP.replace("STEP", STEPS[name])
    assert_left_alone(tmp_path, source)
    _, news = investigated(tmp_path / "bad.py", source, BAD=True)
    report = news[0]
    assert report.diagnoses[0].code == "NS304"
    assert (report.incident.at.step, report.localization.key.phase) == (2, "backward")
    assert "torch.sqrt(length)" in report.localization.first_bad.source.text
    assert report.replay.num_failed == report.replay.runs


@pytest.mark.parametrize(
    "use",
    [
        "each = vmap(grad(lambda w, row: (row * w).sum()), (None, 0))(weight, x[:, None] * 0 + 1)",
        "second = grad(lambda b: grad(lambda c: c.pow(3).sum())(b).sum())(bias)",
        "grad(lambda w: w.sum())(weight)",
    ],
)
def test_transforms_around_a_gradient_are_as_without_nanstop(tmp_path, use):
    source = HEAD + LOOP.replace("STEP", use)
    plain = run_script(tmp_path / "plain.py", source, BAD=False)
    found, news = investigated(tmp_path / "script.py", source, BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)
    for name in ("each", "second"):
        assert name not in plain or torch.equal(plain[name], found[name])
