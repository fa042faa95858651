"""Replays of loops whose weights are not the model's own, or are others by the time that a
replay is made.
"""

import pytest
import torch

from doubles.session import ScriptedSession
from loop_scripts import ReplayingSession, run_script, same, weights
from nanstop.replay.step import parameters_of

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.func import functional_call

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
INNER_STEPS = """
for step in range(4):
    optimizer.zero_grad()
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    params = dict(net.named_parameters())
    for _ in range(2):
        inner = F.mse_loss(functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(inner, tuple(params.values()), create_graph=True)
        rate = 1e30 if step == BAD else 0.1
        params = {n: p - rate * g for (n, p), g in zip(params.items(), grads)}
    F.mse_loss(functional_call(net, params, (x,)), y).backward()
    optimizer.step()
"""
OF_ANOTHER = """
fast = {n: (p.detach() + 1).requires_grad_() for n, p in net.named_parameters()}
for step in range(4):
    optimizer.zero_grad()
    x = torch.randn(6, 3) * (float("nan") if step == BAD else 1)
    (functional_call(net, fast, x) - net(x)).square().mean().backward()
    optimizer.step()
"""

OF_EACH_SAMPLE = """
def loss_of(params, row, target):
    return F.mse_loss(functional_call(net, params, row), target)

gradients_of = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
for step in range(4):
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    optimizer.zero_grad()
    gradients = gradients_of({n: p.detach() for n, p in net.named_parameters()}, x, y)
    together = torch.func.vmap(lambda row: functional_call(net, dict(net.named_parameters()), row))
    F.mse_loss(together(x), y).backward()
    for name, p in net.named_parameters():
        p.grad += gradients[name].clamp(-1, 1).mean(0)
    optimizer.step()
"""
OF_A_GRAPH = """
adjacency = (torch.rand(6, 6) < 0.4).float().to_sparse()
for step in range(4):
    optimizer.zero_grad()
    degrees = torch.mm(adjacency, torch.ones(6, 1)) + 1
    rows = torch.mm(adjacency, torch.randn(6, 3)) * (float("nan") if step == BAD else 1)
    (torch.mm(adjacency, net(rows)) / degrees).square().mean().backward()
    optimizer.step()
"""


OF_A_COPY = """
import copy

def updated(fast, rate, gradients):
    for part in fast.modules():
        for name, p in part._parameters.items():
            part._parameters[name] = p - rate * next(gradients)

fast = copy.deepcopy(net)
for step in range(4):
    optimizer.zero_grad()
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    for part, source in zip(fast.modules(), net.modules()):
        part._parameters.update({name: p.clone() for name, p in source._parameters.items()})
    for _ in range(2):
        inner = F.mse_loss(fast(x), y)
        grads = torch.autograd.grad(inner, tuple(fast.parameters()), create_graph=True)
        updated(fast, 1e30 if step == BAD else 0.1, iter(grads))
    F.mse_loss(fast(x), y).backward()
    optimizer.step()
"""
"""What libraries of meta-learning do: a module whose weights are results of those that are
trained.
"""


class Replaying(ScriptedSession):
    """Runs every healthy window again and notes whether loss and gradients come out as they
    were.
    """

    def before_update(self, step):
        with step.isolated():
            pairs = [(step.run(i), loss) for i, loss in enumerate(step.losses)]
            again = [p.grad for p in parameters_of(step.view).values()]
        present = [p.grad for p in parameters_of(step.view).values()]
        self.learnt.append(all(torch.equal(*pair) for pair in pairs) and same(again, present))


@pytest.fixture
def script(tmp_path):
    return lambda source, session=None, **values: run_script(
        tmp_path / "train.py", HEAD + source, session, **({"BAD": None} | values)
    )


@pytest.mark.parametrize(
    "loop", [INNER_STEPS, OF_ANOTHER, OF_A_GRAPH], ids=["inner steps", "of another", "of a graph"]
)
def test_a_model_that_is_called_with_given_weights_is_replayed_with_them(script, loop):
    plain, session = script(loop), Replaying()
    watched = script(loop, session)
    assert session.learnt == [True] * 4
    assert same(weights(watched), weights(plain))


def test_what_a_transform_of_torch_func_calls_is_left_alone(script):
    plain, session = script(OF_EACH_SAMPLE), ReplayingSession()
    watched = script(OF_EACH_SAMPLE, session)
    assert session.completed_steps == [0, 1, 2, 3]
    assert same(weights(watched), weights(plain))


def test_a_failure_of_given_weights_comes_back_and_is_found(script):
    session = ReplayingSession()
    script(INNER_STEPS, session, BAD=2)
    assert session.steps == [2]
    (found,) = session.found
    assert found.fidelity == "bitwise"
    assert "functional_call(net, params" in found.line or "rate * g" in found.line


def test_a_module_of_computed_weights_is_a_function_of_those_that_are_trained(script):
    plain, session = script(OF_A_COPY), Replaying()
    watched = script(OF_A_COPY, session)
    assert session.learnt == [True] * 4
    assert same(weights(watched), weights(plain))


def test_a_failure_of_computed_weights_comes_back_and_is_found(script):
    session, names = ReplayingSession(), []
    session.before_update = lambda step: names.extend(parameters_of(step.view))
    script(OF_A_COPY, session, BAD=2)
    assert names[:4] == ["net_0_weight", "net_0_bias", "net_2_weight", "net_2_bias"]
    (found,) = session.found
    assert (found.fidelity, session.steps) == ("same_failure", [2])
    assert found.line in ("F.mse_loss(fast(x), y).backward()", "inner = F.mse_loss(fast(x), y)")


def test_given_weights_are_no_part_of_the_batch(script):
    session = ScriptedSession()
    batches = []
    session.before_update = lambda step: batches.append(set(step.batches[0]))
    script(INNER_STEPS, session)
    assert batches == [{"input", "y"}] * 4


NOISE = """
for step in range(4):
    optimizer.zero_grad()
    noise = [torch.randn_like(p) * (float("nan") if step == BAD else 0.1) for p in net.parameters()]
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    before = [p.detach().clone() for p in net.parameters()]
    for p, n in zip(net.parameters(), noise):
        CHANGE
    F.mse_loss(net(x * (float("nan") if step == INPUT else 1)), y).backward()
    for p, b in zip(net.parameters(), before):
        UNDO
    optimizer.step()
"""
WAYS = {
    "in place": ("p.data.add_(n)", "p.detach().copy_(b)"),
    "replaced": ("p.data = p.data + n", "p.data = b"),
}


def noisy(way):
    change, undo = WAYS[way]
    return NOISE.replace("CHANGE", change).replace("UNDO", undo)


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_were_changed_since_are_neither_blamed_nor_used_again(script, way):
    session = ReplayingSession("redo")
    ending = script(noisy(way), session, BAD=2, INPUT=None)
    assert session.steps == [2]
    assert session.found == []
    assert "the weights were changed after the backward" in session.refusals[0]
    assert all(w.isfinite().all() for w in weights(ending)), "the update is left out"


@pytest.mark.parametrize("way", WAYS)
def test_what_fails_with_the_present_weights_too_is_found(script, way):
    session = ReplayingSession()
    script(noisy(way), session, BAD=None, INPUT=2)
    (found,) = session.found
    assert found.op == "aten.mul.Tensor"


def test_noise_on_weights_is_not_watched_at_a_price(script):
    plain, session = script(noisy("in place"), INPUT=None), ReplayingSession()
    watched = script(noisy("in place"), session, INPUT=None)
    assert session.steps == []
    assert same(weights(watched), weights(plain))


LEARNED_TEMPERATURE = """
import torch
from torch import nn

torch.manual_seed(0)
net, temperature = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))
optimizer = torch.optim.SGD([*net.parameters(), temperature], lr=1e-2)
for step in range(3):
    scores = net(torch.randn(5, 4))
    if step == 2:
        scores = scores.masked_fill(torch.eye(5, 4, dtype=torch.bool), -torch.inf)
    loss = (scores / temperature).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_gradient_of_what_is_in_no_model_is_found_where_no_other_is_bad(tmp_path):
    session = ReplayingSession()
    ending = run_script(tmp_path / "script.py", LEARNED_TEMPERATURE, session)
    assert [one.line for one in session.found] == [
        "loss = (scores / temperature).logsumexp(1).mean()"
    ]
    assert ending["temperature"].isfinite()
