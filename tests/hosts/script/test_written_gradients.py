"""Updates of gradients that no backward has made: the script writes them."""

import math

import pytest

from loop_scripts import ReplayingSession, investigated, run_script, same
from nanstop.decide.decision import Decision
from nanstop.records import Report
from nanstop.report.text.run_end import RunEnd

PER_SAMPLE = """
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
def one(params, x, y, weight):
    out = functional_call(net, params, (x[None],))
    return weight * nn.functional.cross_entropy(out, y[None])
norms = []
for step in range(6):
    x, y, weight = torch.randn(8, 4), torch.randint(0, 3, (8,)), torch.ones(8)
    if step == 3 and BAD:
        weight[5] = 0
    optimizer.zero_grad()
    params = {name: p.detach() for name, p in net.named_parameters()}
    of = vmap(grad(one), in_dims=(None, 0, 0, 0))(params, x, y, weight)
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in of.values()]).norm(dim=0)
    factor = 1.0 / norm
    for name, p in net.named_parameters():
        p.grad = torch.einsum("n,n...->...", factor, of[name]) / 8
        NOISE
    CLIP
    optimizer.step()
    norms.append(norm.mean().item())
PARAMETERS = [p.detach().clone() for p in net.parameters()] + [torch.get_rng_state()]
"""
ADDED_UP = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
x = torch.randn(16, 4)
norms = []
for step in range(6):
    with torch.no_grad():
        added = [torch.zeros_like(p) for p in net.parameters()]
        for _ in range(4):
            moves = [torch.randn_like(p) * 0.05 for p in net.parameters()]
            for p, move in zip(net.parameters(), moves):
                p.add_(move)
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            for p, move in zip(net.parameters(), moves):
                p.sub_(move)
            for one, move in zip(added, moves):
                one.add_(move * (loss if step != 3 or not BAD else loss * 0 / 0))
        for p, one in zip(net.parameters(), added):
            p.grad = one / 4
    optimizer.step()
    norms.append(loss.item())
PARAMETERS = [p.detach().clone() for p in net.parameters()] + [torch.get_rng_state()]
"""
SCRIPTS = {
    "of samples": PER_SAMPLE.replace("NOISE", "").replace("CLIP", ""),
    "with noise": PER_SAMPLE.replace("NOISE", "p.grad += torch.randn_like(p.grad)").replace(
        "CLIP", ""
    ),
    "clipped": PER_SAMPLE.replace("NOISE", "").replace(
        "CLIP", "nn.utils.clip_grad_norm_(net.parameters(), 1.0)"
    ),
    "added up": ADDED_UP,
}
REFUSED = {
    # What was added in place is not made again, and is no data.
    "added up": "cannot be made again",
    "with noise": "writes its gradients by operations that were not recorded",
}


def trained(folder, name, session=None, *, is_bad=False):
    return run_script(folder / "script.py", SCRIPTS[name], session, BAD=is_bad)


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_update_that_would_ruin_the_weights_is_left_out(tmp_path, name):
    session = ReplayingSession(Decision(kind="skip"))
    trained_by = trained(tmp_path, name, session, is_bad=True)
    assert session.steps == [3]
    assert all(bool(p.isfinite().all()) for p in trained_by["PARAMETERS"])
    if name in REFUSED:
        assert REFUSED[name] in session.refusals[0]
    else:
        assert [one.line for one in session.found] == ["factor = 1.0 / norm"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_where_nothing_fails_nothing_changes(tmp_path, name):
    plain = trained(tmp_path, name)
    watched, news = investigated(tmp_path / "watched.py", SCRIPTS[name], BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)
    assert watched["norms"] == plain["norms"]
    assert math.isfinite(sum(plain["norms"]))
    assert same(watched["PARAMETERS"], plain["PARAMETERS"])


def test_numbers_of_the_script_are_looked_at_in_every_update(tmp_path):
    source = """
import torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(4):
    for p in net.parameters():
        p.grad = torch.full_like(p, 1.0 if step != 2 else float("nan"))
    optimizer.step()
PARAMETERS = list(net.parameters())
"""
    session = ReplayingSession(Decision(kind="skip"))
    ended = run_script(tmp_path / "script.py", source, session)
    assert session.steps == [2]
    assert all(bool(p.isfinite().all()) for p in ended["PARAMETERS"])


def test_a_number_of_the_data_is_not_said_to_be_left_out(tmp_path):
    source = """
import torch
from torch.func import functional_call, grad
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
rows = torch.randn(32, 4).tolist()
rows[17][0] = float("nan")
for step in range(4):
    x, y = torch.tensor(rows[8 * step : 8 * step + 8]), torch.ones(8, 1)
    params = {name: p.detach() for name, p in net.named_parameters()}
    of = grad(lambda given: (functional_call(net, given, (x,)) - y).square().mean())(params)
    for name, p in net.named_parameters():
        p.grad = of[name].clone()
    optimizer.step()
PARAMETERS = list(net.parameters())
"""
    ended, news = investigated(tmp_path / "script.py", source, on_failure="repair")
    assert all(bool(p.isfinite().all()) for p in ended["PARAMETERS"])
    (report,) = [one for one in news if isinstance(one, Report)]
    assert report.diagnoses[0].code in ("NS501", "NS506")
    assert report.proof is None or report.proof.verdict != "proven"
