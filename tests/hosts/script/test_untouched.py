"""Under observe a run ends as it does without nanstop, whatever its script still holds;
under no policy it dies of nanstop.
"""

import logging
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from loop_scripts import ReplayingSession, assert_left_alone, run_script, same
from nanstop.decide.policy import Policy
from nanstop.hosts.loop.watch import watch_loop
from nanstop.hosts.script import autowatch
from nanstop.session.factory import opener
from nanstop.store.incidents import Store
from random_loops import CLOSING, MIDDLES, Loop, Outcome, Program, programs

QUICK = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(QUICK, max_examples=2000)

GAN = (
    ("forward", 0, "new"),
    ("forward", 1, "detached"),
    ("backward", -1, False, False),
    ("step", 1),
    ("forward", 1, "earlier"),
    ("backward", -1, False, False),
    ("step", 0),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("incidents")


@pytest.fixture(autouse=True)
def _without_words():
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def watched(program, policy, folder):
    """Return the outcome of a run that is watched as ``nanstop run`` does, and the session's
    incidents.
    """
    store = Store(folder)
    store.reset()
    autowatch.install(opener(Policy(on_failure=policy), store, lambda _: None))
    try:
        return Loop(program).run(), store.reports
    finally:
        autowatch.unwatch()


def differences(program, folder):
    """Return what is not the same with and without nanstop under observe."""
    return Loop(program).run().differences(watched(program, "observe", folder)[0])


def deaths(program, policy, folder):
    """Return what is raised before anything is raised without nanstop;
    its own stop does not count.
    """
    plain = Loop(program).run().raised
    try:
        ended, _ = watched(program, policy, folder)
    except SystemExit:
        return {}
    first = min(plain, default=len(program.actions))
    died = {place: what for place, what in ended.raised.items() if place < first}
    return {place: what for place, what in died.items() if what[0] != "TrainingStopped"}


@pytest.mark.parametrize("policy", ["observe", "skip", "repair"])
def test_a_graph_that_outlives_a_failure_of_another_network_can_still_be_used(policy, folder):
    actions = (*GAN * 2, GAN[0], ("spoil", "loss", "nan", 0), *GAN[1:], *GAN)
    program = Program(("batch norm", "tanh"), "adam", actions)
    plain = Loop(program).run()
    outcome, reports = watched(program, policy, folder)
    assert reports
    assert outcome.raised == {}
    assert policy != "observe" or plain.differences(outcome) == []


def test_a_graph_that_outlives_exact_runs_of_its_weights_ends_where_it_did(folder):
    actions = (
        ("forward", 0, "new"),
        ("spoil", "input", "nan", 0),
        ("forward", 0, "detached"),
        ("backward", -1, False, False),
        ("step", 0),
        ("zero", 0, True),
        ("forward", 0, "earlier"),
        ("backward", -1, False, False),
    )
    program = Program(("batch norm",), "adam", actions)
    assert differences(program, folder) == []


def test_models_are_found_after_an_update_without_a_backward(folder):
    failing = (("forward", 0, "new"), ("backward", -1, False, False), ("step", 0))
    actions = (("step", 0), ("spoil", "input", "nan", 0), *failing)
    assert differences(Program(("hooked",), "adam", actions), folder) == []


@pytest.mark.parametrize("fault", [(), (("spoil", "loss", "nan", 0),)], ids=["healthy", "failing"])
@pytest.mark.parametrize("middle", ["remembering", "talking"])
def test_code_of_the_script_remembers_and_says_each_call_once(
    middle, fault, folder, capsys, caplog
):
    logging.disable(logging.NOTSET)
    new = ("forward", 0, "new")
    actions = (new, CLOSING, ("step", 0), ("zero", 0, True)) * 3
    program = Program((middle,), "adam", (*actions, *fault, *actions), goes_on=True)
    plain, printed = Loop(program).run(), capsys.readouterr()
    logged = [record.msg for record in caplog.records]
    outcome, reports = watched(program, "observe", folder)
    assert plain.differences(outcome) == []
    assert capsys.readouterr() == printed
    again = [record.msg for record in caplog.records if record.name != "nanstop"]
    assert again == 2 * logged
    assert bool(reports) == bool(fault)


@QUICK
@given(programs())
def test_observed_programs_end_as_they_do_alone(folder, program):
    assert differences(program, folder) == []


@pytest.mark.slow
@MANY
@given(programs())
def test_many_observed_programs_end_as_they_do_alone(folder, program):
    assert differences(program, folder) == []


@pytest.mark.parametrize("policy", ["skip", "repair"])
@settings(QUICK, max_examples=10)
@given(program=programs())
def test_no_program_dies_of_nanstop(folder, policy, program):
    assert deaths(program, policy, folder) == {}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "repair"])
@MANY
@given(program=programs())
def test_none_of_many_programs_dies_of_nanstop(folder, policy, program):
    assert deaths(program, policy, folder) == {}


def manual(network, watch):
    """Train by the manual interface (``watch`` false:
    without it), a graph of another network alive all the while.
    """
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net = nn.Sequential(nn.Linear(3, 4), MIDDLES[network](), nn.Linear(4, 3))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    bank, outcome = torch.zeros(3), Outcome()
    generator = torch.Generator().manual_seed(3)

    def loss_of(x):
        bank.mul_(0.9).add_(x.mean(0).detach().nan_to_num(), alpha=0.1)
        noise = torch.rand(x.shape, generator=generator)
        return (net(other(x) * bank + noise) - x).square().mean()

    held = other(torch.randn(4, 3)).sum() + net[0](torch.randn(4, 3)).sum() * 0
    hand = watch(net, optimizer) if watch else None
    for step in range(5):
        x = torch.randn(4, 3) + (float("nan") if step == 3 else 0)
        if hand is not None:
            outcome.note(f"loss {step}", hand.step(loss_of, x))
            hand.update(clip=None)
        else:
            loss = loss_of(x)
            loss.backward()
            outcome.note(f"loss {step}", loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    for name, module in (("net", net), ("other", other)):
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            outcome.note(f"{name}.{key}", tensor)
            outcome.note(f"{name}.{key}.grad", tensor.grad)
    outcome.note("bank", bank)
    outcome.note("generator", generator.get_state())
    outcome.note("rng", torch.get_rng_state())
    try:
        held.backward()
    except RuntimeError as error:
        outcome.raised[0] = str(error)
    outcome.note("held", other[0].weight.grad)
    return outcome


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(one, marks=pytest.mark.slow) if one == "statistics" else one
        for one in sorted(MIDDLES)
    ],
)
def test_the_manual_interface_leaves_what_its_loss_function_touches(network, folder):
    store = Store(folder)
    store.reset()
    opened = opener(Policy(on_failure="observe"), store, lambda _: None)
    plain = manual(network, None)
    assert plain.differences(manual(network, partial(watch_loop, open_session=opened))) == []
    assert any(report.replay is not None for report in store.reports.values())


def scaled():
    """Train two networks under one loss scaler, the second loss scaled before the first is
    looked at.
    """
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    scaler, outcome = torch.amp.GradScaler("cpu", init_scale=8.0), Outcome()
    for step in range(4):
        x = torch.randn(4, 3)
        first, second = (scaler.scale(net(x).square().mean()) for net in nets)
        (first * (float("nan") if step == 2 else 1)).backward()
        scaler.unscale_(optimizers[0])
        second.backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        outcome.note(f"scale {step}", scaler.get_scale())
    for place, net in enumerate(nets):
        for name, tensor in net.state_dict().items():
            outcome.note(f"{place}.{name}", tensor.detach())
    return outcome


def test_a_loss_that_was_scaled_before_a_failure_can_still_be_used(folder):
    store = Store(folder)
    store.reset()
    plain = scaled()
    autowatch.install(opener(Policy(on_failure="observe"), store, lambda _: None))
    try:
        seen = scaled()
    finally:
        autowatch.unwatch()
    assert plain.differences(seen) == []
    assert any(report.replay is not None for report in store.reports.values())


BESIDE = """
import torch
from torch import nn
torch.manual_seed(0)
enc, norm, dec = nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 4)
optimizer = torch.optim.SGD([*enc.parameters(), *dec.parameters()], 1e-2)
for step in range(5):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    if step == BAD:
        x[1, 2] = float("inf")
    if step == LEFT:
        continue
    loss = (dec(norm(enc(x))) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
PARAMETERS = [t.clone() for m in (enc, norm, dec) for t in m.state_dict().values()]
"""


@pytest.mark.parametrize("bad", [0, 2])
def test_buffers_of_a_module_that_trains_nothing_are_put_back(tmp_path, bad):
    without = run_script(tmp_path / "without.py", BESIDE, BAD=None, LEFT=bad)["PARAMETERS"]
    healthy = run_script(tmp_path / "plain.py", BESIDE, BAD=None, LEFT=None)["PARAMETERS"]
    session = ReplayingSession()
    watched = run_script(tmp_path / "healthy.py", BESIDE, session, BAD=None, LEFT=None)
    assert same(watched["PARAMETERS"], healthy)
    session = ReplayingSession("skip")
    skipped = run_script(tmp_path / "skipped.py", BESIDE, session, BAD=bad, LEFT=None)
    assert session.steps == [bad]
    assert same(skipped["PARAMETERS"], without)


BY_NAME = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(in_features=8, out_features=16), nn.Tanh(), nn.Linear(16, 1))
net.load_state_dict(state_dict=net.state_dict(), strict=True)
opt = torch.optim.AdamW(params=net.parameters(), lr=1e-2)
opt.load_state_dict(state_dict=opt.state_dict())
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer=opt, lr_lambda=lambda n: 0.9**n)
scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
scaler.load_state_dict(state_dict=scaler.state_dict())
net[0].weight.register_hook(hook=lambda g: g * 1.0)
net[2].weight.register_post_accumulate_grad_hook(hook=lambda p: None)
slope = torch.func.grad(func=lambda w, x: (w * x).sum().square(), argnums=0)
losses = []
for step in range(6):
    x = torch.randn(16, 8)
    opt.zero_grad(set_to_none=True)
    twice = torch.vmap(func=lambda row: row * 2, in_dims=0)(x)
    loss = nn.functional.mse_loss(input=net(input=x), target=twice.sum(1, keepdim=True))
    named = dict(net.named_parameters())
    again = torch.func.functional_call(module=net, parameter_and_buffer_dicts=named, args=(x,))
    loss = loss + 1e-3 * again.square().mean() + 0 * slope(torch.ones(8), x[0]).sum()
    torch.autograd.grad(outputs=loss, inputs=[net[0].weight], retain_graph=True)
    if step % 2:
        torch.autograd.backward(tensors=scaler.scale(outputs=loss), retain_graph=False)
        scaler.unscale_(optimizer=opt)
        nn.utils.clip_grad_norm_(parameters=net.parameters(), max_norm=1.0)
        nn.utils.clip_grad_value_(parameters=net.parameters(), clip_value=1.0)
        scaler.step(optimizer=opt)
        scaler.update(new_scale=None)
    else:
        loss.backward(gradient=torch.ones(()), inputs=list(net.parameters()))
        opt.step(closure=None)
    schedule.step()
    losses.append(loss.item())
PARAMETERS = [*net.parameters(), torch.tensor(losses)]
"""


def test_a_script_may_give_everything_by_its_name(tmp_path):
    plain = run_script(tmp_path / "plain.py", BY_NAME)["PARAMETERS"]
    session = ReplayingSession()
    assert same(run_script(tmp_path / "script.py", BY_NAME, session)["PARAMETERS"], plain)
    assert session.found == []


WRAPPED = """
import torch
from torch import nn
torch.manual_seed(0)
counts = dict.fromkeys(("__call__", "backward", "zero_grad", "load_state_dict", "eval"), 0)
OWNERS = {"backward": torch.Tensor, "zero_grad": torch.optim.Optimizer}
before = {}
def wrapped(name, inner):
    def outer(*args, **kwargs):
        counts[name] += 1
        return inner(*args, **kwargs)
    return outer
def wrap():
    for name in counts:
        owner = OWNERS.get(name, nn.Module)
        before[name] = getattr(owner, name)
        setattr(owner, name, wrapped(name, before[name]))
def unwrap():
    for name, inner in before.items():
        setattr(OWNERS.get(name, nn.Module), name, inner)
if FIRST < 0:
    wrap()
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
other = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(8):
    if step == FIRST:
        wrap()
    if step == LAST:
        unwrap()
    x = torch.randn(16, 8)
    opt.zero_grad()
    if step == 1:
        other = torch.fx.symbolic_trace(other)
    (net[2](net[1](net[0](x))) + other(x)).square().mean().backward()
    opt.step()
    other.load_state_dict(state_dict=other.state_dict())
    net.eval(), net.train()
unwrap()
PARAMETERS = [*net.parameters(), torch.tensor(list(counts.values()))]
"""


@pytest.mark.parametrize(("first", "last"), [(-1, 9), (0, 9), (1, 9), (4, 9), (-1, 3), (0, 1)])
def test_what_a_script_puts_in_the_place_of_torchs_methods_stays_there(tmp_path, first, last):
    values = {"FIRST": first, "LAST": last}
    plain = run_script(tmp_path / "plain.py", WRAPPED, **values)["PARAMETERS"]
    session = ReplayingSession()
    before = nn.Module.__call__
    watched = run_script(tmp_path / "script.py", WRAPPED, session, **values)["PARAMETERS"]
    assert same(watched, plain)
    assert session.found == []
    assert nn.Module.__call__(nn.Identity(), 3) == 3
    assert first >= 0 or nn.Module.__call__ is before


OWN_FUNCTIONS = """
import functools
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
counts = {}
def counted(owner, name, change=lambda result: result):
    inner = getattr(owner, name)
    counts[name] = 0
    @functools.wraps(inner)
    def outer(*args, **kwargs):
        nonlocal inner
        counts[name] += 1
        outer.calls = counts[name]
        return change(inner(*args, **kwargs))
    setattr(owner, name, outer)
    return functools.partial(setattr, owner, name, inner)
undo = [
    counted(F, "cross_entropy", lambda loss: 0.5 * loss),
    counted(F, "layer_norm", lambda rows: rows + 0.1),
    counted(torch.Tensor, "backward"),
    counted(torch.Tensor, "softmax"),
    counted(nn.Linear, "forward", lambda rows: 2 * rows),
]
net = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
losses = []
for step in range(12):
    ids, labels = torch.randint(20, (2, 4, 5))
    loss = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten())
    loss = loss + net(ids).softmax(-1).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    losses.append(loss.item())
for put_back in undo:
    put_back()
PARAMETERS = [*net.parameters(), torch.tensor(list(counts.values()))]
"""


def test_what_a_script_puts_in_the_place_of_torchs_functions_is_applied_once(tmp_path):
    """And what it counts there, no run that is undone has counted."""
    assert_left_alone(tmp_path, OWN_FUNCTIONS)
