"""What ``torch.func`` makes of a function is one operation of a loss."""

import pytest
import torch

from loop_scripts import ReplayingSession, investigated, run_script, same
from nanstop.report.text.run_end import RunEnd

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

HEAD = """
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
net.eval()
params = dict(net.named_parameters())
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
draws = torch.Generator().manual_seed(0)
losses, seen = [], []
def u(given, x):
    far = torch.sqrt((x ** 2).sum())
    return functional_call(net, given, (x[None],)).squeeze() * far
for step in range(5):
    x = torch.rand(8, 2, generator=draws) + 0.1
    if step == 3 and BAD:
        x[3] = 0.0
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach().clone() for p in net.parameters()]
PARAMETERS += [torch.tensor(seen), torch.get_rng_state()]
"""
LOSSES = {
    "jacrev": "loss = vmap(jacrev(u, argnums=1), (None, 0))(params, x).square().sum()",
    "jacfwd": "loss = vmap(jacfwd(u, argnums=1), (None, 0))(params, x).square().sum()",
    "grad": "loss = vmap(grad(u, argnums=1), in_dims=(None, 0))(params, x).square().sum()",
    "hessian": "loss = vmap(hessian(u, argnums=1), (None, 0))(params, x).square().sum()",
    "beside a model call": (
        "loss = net(x).mean() + torch.vmap(jacrev(u, 1), (None, 0))(params, x).square().sum()"
    ),
}


def trained(folder, loss, session=None, *, is_bad=False):
    return run_script(folder / "script.py", HEAD.format(loss=loss), session, BAD=is_bad)


@pytest.mark.parametrize("name", LOSSES)
def test_what_fails_inside_has_its_line(tmp_path, name):
    session = ReplayingSession()
    trained(tmp_path, LOSSES[name], session, is_bad=True)
    assert session.steps == [3]
    assert session.refusals == []
    assert session.found[0].line == "far = torch.sqrt((x ** 2).sum())"
    assert session.found[0].fidelity in ("bitwise", "same_failure")


HEALTHY = {
    **LOSSES,
    "dropout": (
        "net.train(); loss = vmap(u, (None, 0), randomness='different')(params, x).square().sum()"
    ),
    "ensemble": (
        "stacked, _ = stack_module_state([net, net])\n"
        "    made = vmap(lambda given: functional_call(net, given, (x,)))(stacked)\n"
        "    loss = net(x).square().mean() + made.mean().detach()"
    ),
    "of samples": (
        "each = vmap(grad(lambda given, one: u(given, one).square()), (None, 0))(params, x)\n"
        "    size = sum(one.flatten(1).square().sum(1) for one in each.values()).sqrt().detach()\n"
        "    loss = (vmap(u, (None, 0))(params, x).square() / size.clamp(min=1.0)).mean()"
    ),
    "without a gradient": (
        "with torch.no_grad(): far = vmap(u, (None, 0))(params, x)\n"
        "    loss = (net(x).squeeze() - far).square().mean()"
    ),
    "what counts": (
        "loss = vmap(lambda one: (seen.append(1), u(params, one))[1])(x).square().mean()"
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_where_nothing_fails_nothing_changes(tmp_path, name):
    plain, session = trained(tmp_path, HEALTHY[name]), ReplayingSession()
    watched = trained(tmp_path, HEALTHY[name], session)
    assert not session.steps
    assert watched["losses"] == plain["losses"]
    assert same(watched["PARAMETERS"], plain["PARAMETERS"])


@pytest.mark.parametrize("name", ["jacrev", "what counts"])
def test_looks_at_healthy_steps_leave_the_function_alone(tmp_path, name):
    plain = trained(tmp_path, HEALTHY[name])
    watched, news = investigated(
        tmp_path / "watched.py", HEAD.format(loss=HEALTHY[name]), BAD=False
    )
    assert all(isinstance(one, RunEnd) for one in news)
    assert watched["losses"] == plain["losses"]
    assert same(watched["PARAMETERS"], plain["PARAMETERS"])


def test_functions_of_torch_are_put_back(tmp_path):
    before = {name: vars(torch.func)[name] for name in ("vmap", "jacrev", "hessian")}
    trained(tmp_path, LOSSES["jacrev"], ReplayingSession())
    assert all(vars(torch.func)[name] is one for name, one in before.items())
    assert torch.vmap is before["vmap"]
    assert not hasattr(torch, "jacrev")
