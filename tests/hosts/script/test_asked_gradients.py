"""Loops that ask for gradients with ``torch.autograd.grad`` and make updates of them: a failure is
found where it is born, and a healthy twin is left as it is.
"""

import linecache

import pytest
import torch

from e2e.scripts import HEAD
from loop_scripts import ReplayingSession, investigated, run_script
from nanstop.hosts.script import autowatch
from nanstop.report.text.run_end import RunEnd

HEAD = HEAD.replace('BAD = "bad" in sys.argv\n', "from torch.func import functional_call\n")
NET = """
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
weights = list(net.parameters())
"""
LOOP = """
for step in range(5):
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    out = FORWARD
    if BAD and step == 3:
        y = out.detach().clone()
    loss = (out - y).square().sum(1).sqrt().mean()
    UPDATE
    losses.append(loss.item())
PARAMETERS = list(weights)
"""
BARE = """
weights = [torch.randn(6, 3).div(3).requires_grad_(), torch.zeros(3, requires_grad=True)]
W, b = weights
"""
GIVEN = """
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
given = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
weights = list(given.values())
"""
ASK = "grads = torch.autograd.grad(loss, weights)"
RENAME = "given = dict(zip(given, weights))"
UPDATES = {
    "data": (NET, "net(x)", f"{ASK}; [p.data.sub_(0.1 * g) for p, g in zip(weights, grads)]"),
    "no_grad": (
        NET,
        "net(x)",
        """grads = torch.autograd.grad(inputs=net.parameters(), outputs=loss)
    with torch.no_grad():
        for p, g in zip(weights, grads): p.sub_(g, alpha=0.1)""",
    ),
    "the graph is kept": (
        NET,
        "net(x)",
        """grads = torch.autograd.grad(loss, net.parameters(), retain_graph=True)
    with torch.no_grad():
        for p, g in zip(weights, grads): p -= 0.1 * g""",
    ),
    "new leaves": (
        BARE,
        "x @ W + b",
        f"{ASK}; weights = W, b = [(p - g / 9).detach().requires_grad_() for p, g in PAIRS]",
    ),
    "a chain": (BARE, "x @ W + b", f"{ASK}; weights = W, b = W - grads[0] / 9, b - grads[1] / 9"),
    "a large chain": (
        BARE.replace("6, 3", "1 << 17, 3").replace(".div(3)", ".mul(1e-3)"),
        "x.tile(1, 1 << 17)[:, :1 << 17] @ W + b",
        f"{ASK}; weights = W, b = W - grads[0] / 9e6, b - grads[1] / 9",
    ),
    "given weights": (
        GIVEN,
        "functional_call(net, given, (x,))",
        (f"{ASK}; weights = [(p - 0.1 * g).detach().requires_grad_() for p, g in PAIRS]; {RENAME}"),
    ),
    "given weights and backward": (
        GIVEN,
        "functional_call(net, given, (x,))",
        (
            "loss.backward(); weights = [(p - 0.1 * p.grad).detach().requires_grad_() for p in "
            f"weights]; {RENAME}"
        ),
    ),
    "an optimizer": (
        NET + "optimizer = torch.optim.Adam(weights, 1e-2)",
        "net(x)",
        f"{ASK}\n    for p, g in zip(weights, grads): p.grad = g\n    optimizer.step()",
    ),
    "two halves and an optimizer": (
        NET + "optimizer = torch.optim.Adam(weights, 1e-2)",
        "net(x)",
        """again = torch.autograd.grad(net(x).square().mean(), weights)
    grads = torch.autograd.grad(loss, weights)
    optimizer.zero_grad()
    for p, g, h in zip(weights, grads, again): p.grad = (g + h) / 2
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()""",
    ),
    "bare tensors and an optimizer": (
        BARE + "optimizer = torch.optim.SGD(weights, 1e-2)",
        "x @ W + b",
        f"{ASK}\n    for p, g in zip(weights, grads): p.grad = g.mul_(0.5)\n    optimizer.step()",
    ),
}


def spelled(begin, forward, update):
    loop = LOOP.replace("FORWARD", forward).replace("UPDATE", update)
    loop = loop.replace("PAIRS", "zip(weights, grads)")
    return HEAD + begin + "\nlosses = []" + loop


def told(folder, source):
    """Return what is said of a failing script, after its healthy twin was left alone."""
    plain = run_script(folder / "plain.py", source, BAD=False)
    healthy, news = investigated(folder / "healthy.py", source, BAD=False)
    assert [type(one) for one in news] == [RunEnd]
    assert healthy["losses"] == plain["losses"]
    assert all(map(torch.equal, healthy["PARAMETERS"], plain["PARAMETERS"]))
    _, news = investigated(folder / "bad.py", source, BAD=True)
    return [one for one in news if not isinstance(one, RunEnd)]


def line_of(report):
    source = report.localization.first_bad.source
    return linecache.getline(source.file, source.line)


@pytest.mark.parametrize("name", UPDATES)
def test_a_derivative_that_is_undefined_is_found_where_it_is_born(tmp_path, name):
    report = told(tmp_path, spelled(*UPDATES[name]))[0]
    best, replay = report.diagnoses[0], report.replay
    assert (best.code, best.confidence, report.incident.at.step) == ("NS304", "certain", 3)
    assert report.localization.first_bad.phase == "backward"
    assert ".sqrt()" in line_of(report)
    assert replay.num_failed == replay.runs == 3


INNER = """
weights = [(torch.randn(1, 8) / 2).requires_grad_(), (torch.randn(8, 1) / 2).requires_grad_()]
losses = []

def net(x, p):
    return torch.tanh(x @ p[0]) @ p[1]

def error(out, y):
    return (out - y).square().mean(0).sqrt().sum()

for step in range(4):
    whole = 0.0
    for task in range(3):
        x = torch.rand(10, 1)
        y = torch.sin(x * (task + 1))
        if BAD and step == 2 and task == 1:
            y = net(x, weights).detach()
        fast = weights
        for _ in range(2):
            inner = torch.autograd.grad(error(net(x, fast), y), fast, create_graph=CREATE)
            fast = [p - 0.1 * g for p, g in zip(fast, inner)]
        whole = whole + error(net(x + 1, fast), torch.sin((x + 1) * (task + 1)))
    OUTER
    losses.append(float(whole.detach()))
PARAMETERS = list(weights)
"""
BY_HAND = """outer = torch.autograd.grad(whole, weights)
    with torch.no_grad():
        for p, g in zip(weights, outer): p -= 0.01 * g"""
BY_OPTIMIZER = """optimizer.zero_grad()
    for p, g in zip(weights, torch.autograd.grad(whole, weights)): p.grad = g
    optimizer.step()"""


@pytest.mark.slow
@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("outer", [BY_HAND, BY_OPTIMIZER])
def test_an_inner_loop_that_fails(tmp_path, outer, create):
    source = INNER.replace("OUTER", outer).replace("CREATE", str(create))
    if outer is BY_OPTIMIZER:
        source = source.replace("losses =", "optimizer = torch.optim.SGD(weights, 0.01)\nlosses =")
    report = told(tmp_path, HEAD + source)[0]
    best, is_alone = report.diagnoses[0], not create and outer is BY_HAND
    assert (best.code, best.confidence) == ("NS304", "certain")
    assert ".sqrt()" in line_of(report)
    # Each gradient that no graph goes on from is that of an update, as far as anybody can tell.
    assert report.incident.at.step == 2 or is_alone


def test_gradients_of_several_losses_whose_graphs_are_kept(tmp_path):
    source = """
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
losses = []
for step in range(5):
    x = torch.randn(8, 6)
    out = net(x)
    gate = out[:, 1].sigmoid() if not (BAD and step == 3) else out[:, 1].sigmoid() * 0 + 1
    first, second = out[:, 0].abs().mean(), -(1 - gate).log().mean()
    parts = [torch.autograd.grad(one, net.parameters(), retain_graph=True) for one in
             (first, second)]
    with torch.no_grad():
        for p, *grads in zip(net.parameters(), *parts):
            p -= 0.01 * sum(grads)
    losses.append(second.item())
PARAMETERS = list(net.parameters())
"""
    report = told(tmp_path, HEAD + source)[0]
    assert (report.diagnoses[0].code, report.incident.at.step) == ("NS207", 3)
    assert ".log()" in line_of(report)


def test_questions_about_a_model_that_is_not_trained_are_left_alone(tmp_path):
    source = """
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
weights, losses = list(net.parameters()), []
for i in range(3):  # a saliency map
    x = torch.randn(3, 6, requires_grad=True)
    losses.append(torch.autograd.grad(net(x)[:, 0].sum(), x)[0].sum().item())
for i in range(4):  # an attack
    x = x.detach().requires_grad_()
    x = x + 0.1 * torch.autograd.grad(net(x).square().sum(), x)[0].sign()
v = [torch.randn_like(p) for p in weights]
for i in range(3):  # the power method
    grads = torch.autograd.grad(net(x.detach()).square().mean(), weights, create_graph=True)
    along = sum((g * one).sum() for g, one in zip(grads, v))
    v = torch.autograd.grad(along, weights)
    losses.append(sum(one.square().sum() for one in v).sqrt().item())
PARAMETERS = weights
"""
    plain = run_script(tmp_path / "plain.py", HEAD + source)
    watched, news = investigated(tmp_path / "watched.py", HEAD + source)
    assert [type(one) for one in news] == [RunEnd]
    assert watched["losses"] == plain["losses"]
    assert all(p.grad is None for p in watched["weights"])


def test_a_cure_makes_gradients_again_that_were_asked_for(tmp_path):
    source = """
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
losses = []
for step in range(5):
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    out = net(x * (4000.0 if step == 2 else 1.0)).softmax(-1)
    loss = -out.gather(1, y[:, None]).log().mean()
    for p, g in zip(net.parameters(), torch.autograd.grad(loss, net.parameters())):
        p.grad = g
    optimizer.step()
"""
    watched, news = investigated(tmp_path / "cured.py", HEAD + source, on_failure="repair")
    assert news[0].proof.verdict == "proven"
    assert news[0].audit[-1].action.kind == "redo"
    assert watched["optimizer"].state[watched["net"][0].weight]["step"] == 5
    assert all(p.isfinite().all() for p in watched["net"].parameters())


@pytest.mark.parametrize("made", ["torch.autograd.grad", "torch.func.grad"])
def test_compiled_functions_have_torchs_own_functions_inside(tmp_path, monkeypatch, made):
    monkeypatch.setattr(autowatch, "_compiles_functions", False)
    body = {
        "torch.func.grad": "torch.func.grad(lambda z: z.sin().sum())(x).sum() + net(x).sum()",
        "torch.autograd.grad": "net(x).square().sum()",
    }[made]
    source = f"""
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)

@torch.compile(fullgraph=True, backend="eager")
def objective(x):
    return {body}

losses = []
for step in range(3):
    loss = objective(torch.randn(3, 4))
    optimizer.zero_grad()
    for p, g in zip(net.parameters(), torch.autograd.grad(loss, net.parameters())):
        p.grad = g
    optimizer.step()
    losses.append(loss.item())
"""
    plain = run_script(tmp_path / "plain.py", HEAD + source)
    session = ReplayingSession()
    watched = run_script(tmp_path / "watched.py", HEAD + source, session)
    assert watched["losses"] == plain["losses"]
    assert not session.steps


def test_an_input_that_has_a_gradient_is_no_weight(tmp_path):
    source = """
net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
losses = []
for step in range(12):
    x = torch.rand(6, 2).requires_grad_()
    slope = torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]
    loss = (slope - 1.0).square().mean() + net(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.1 * p.grad
            p.grad = None
    losses.append(loss.item())
"""
    watched, news = investigated(tmp_path / "watched.py", HEAD + source)
    assert [type(one) for one in news] == [RunEnd]
    assert watched["losses"] == run_script(tmp_path / "plain.py", HEAD + source)["losses"]
