"""Which updates are rehearsed, and what becomes of those that are left out or cannot be."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nanstop
from loop_scripts import run_script
from nanstop.decide.policy import Policy
from nanstop.detect.foresight import Foresight
from nanstop.detect.rates import given
from nanstop.hosts.script import autowatch
from nanstop.measure.rehearsal import Rehearsal
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

torch.set_num_threads(1)


def step_of(dtype, **options):
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **({"lr": 1e-4} | options))
    return SimpleNamespace(view=SimpleNamespace(optimizer=optimizer, root=model))


def gradient(step, index, size=1e-4):
    weight = step.view.root.weight
    generator = torch.Generator().manual_seed(index)
    weight.grad = (size * torch.randn(weight.shape, generator=generator)).to(weight.dtype)


def test_the_first_updates_and_later_two_in_a_row(monkeypatch):
    asked, step, foresight = [], step_of(torch.bfloat16), Foresight()
    monkeypatch.setattr(Rehearsal, "rehearse", lambda _: asked.append(number) or ())
    for number in range(70):
        gradient(step, number)
        foresight.ruinous(step)
    assert asked == [*range(10), 16, 17, 32, 33, 64, 65]


def test_float32_weights_are_not_rehearsed(monkeypatch):
    step, foresight = step_of(torch.float32), Foresight()
    monkeypatch.setattr(Rehearsal, "rehearse", lambda _: 1 / 0)
    gradient(step, 0)
    assert foresight.ruinous(step) == ()
    assert not foresight.over


def test_an_update_that_was_left_out_is_still_expected():
    step, foresight, told = step_of(torch.float16, fused=True), Foresight(), []
    for index in range(6):
        gradient(step, min(index, 1))
        found = foresight.ruinous(step)
        told.append(bool(found))
        if found:
            foresight.left_out()
        else:
            step.view.optimizer.step()
    assert told == [False, *[True] * 5]


def test_optimizers_are_followed_one_by_one():
    calm, bad, foresight = step_of(torch.bfloat16), step_of(torch.float16), Foresight()
    for index in range(3):
        gradient(calm, index)
        gradient(bad, index)
        assert not foresight.ruinous(calm)
        assert foresight.ruinous(bad)


class Keeping(torch.optim.SGD):
    """It has hold of what is not its own."""

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr)
        self.model = model


def test_what_cannot_be_rehearsed_is_said_once(tmp_path, capsys):
    model = nn.Linear(4, 4).half()
    with nanstop.watch(model, Keeping(model, 1e-2), out=tmp_path) as watch:
        for _ in range(3):
            watch.step(lambda x: model(x).float().square().mean(), torch.ones(2, 4).half())
            watch.update()
    said = capsys.readouterr().err
    assert said.count("updates cannot be judged before they are applied: it holds a Linear") == 1
    assert not watch.incidents


SCHEDULES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("rate", SCHEDULES)
def test_an_update_at_a_rate_that_is_no_number_is_left_out_before_it_is_made(tmp_path, rate):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    factors = [1.0, 1.0, *[SCHEDULES[rate]] * 4, 1.0, 1.0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, 7)])
    kept = []
    with nanstop.watch(model, optimizer, out=tmp_path) as watch:
        for _ in range(7):
            watch.step(lambda x: model(x).square().mean(), torch.randn(3, 4))
            watch.update()
            schedule.step()
            kept.append(model.weight.detach().clone())
    (report,) = watch.incidents
    assert report.diagnoses[0].code == "NS402"
    assert f"the learning rate is {rate}" in report.diagnoses[0].cause
    assert [entry.action.kind for entry in report.audit] == ["skip"] * 4
    assert all(torch.equal(one, kept[1]) for one in kept[2:6])
    assert not torch.equal(kept[6], kept[5])
    assert kept[6].isfinite().all()
    assert not any(one.code == "NS113" for one in watch.findings)


POLY = """
import numpy as np, torch
def poly(optimizer, base, step, total):
    with np.errstate(all="ignore"):
        rate = base * np.power(1 - step / total, 0.9)
    for group in optimizer.param_groups:
        group["lr"] = rate
{other}
torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    poly(optimizer, 0.1, step, 3)
    optimizer.zero_grad()
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
"""
SETS_TOO = "def reset(optimizer): optimizer.param_groups[0]['lr'] = 0.1"


LOGS = "def shown(metrics, optimizer): metrics['lr'] = optimizer.param_groups[0]['lr']"


@pytest.mark.parametrize(("other", "is_named"), [("", True), (LOGS, True), (SETS_TOO, False)])
def test_the_only_line_that_sets_a_rate_by_hand_is_named(tmp_path, monkeypatch, other, is_named):
    sessions, files = [], given._files
    own = [str(tmp_path / "poly.py")]  # modules of other tests set rates as well
    monkeypatch.setattr(given, "_files", lambda: (one for one in files() if one in own))
    autowatch.install(opener(Policy(), Store(tmp_path), lambda _: None, opened=sessions.append))
    try:
        run_script(tmp_path / "poly.py", POLY.replace("{other}", other))
    finally:
        autowatch.unwatch()
    (report,) = sessions[0].reports
    best = report.diagnoses[0]
    assert best.code == "NS402"
    assert any('group["lr"] = rate' in line for line in best.lines) == is_named


RESTORED = """
import copy, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
inputs = torch.randn(32, 8)
def train(optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        (net(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
first = torch.optim.AdamW(net.parameters(), lr=1e-3)
train(first, 3)
state = copy.deepcopy(first.state_dict())
{damage}
second = torch.optim.AdamW(net.parameters(), lr=1e-3)
second.load_state_dict(state)
before = copy.deepcopy(net.state_dict())
train(second, 4)
moved = {name: not torch.equal(p, before[name]) for name, p in net.state_dict().items()}
is_finite = all(p.isfinite().all() for p in net.parameters())
"""
DAMAGE = {
    "first moment": 'state["state"][2]["exp_avg"][0, 3] = float("nan")',
    "second moment": 'state["state"][0]["exp_avg_sq"][:] = float("nan")',
    "negative": 'state["state"][2]["exp_avg_sq"][0, 3] = -1.0',
}


def restored(tmp_path, damage, policy):
    sessions = []
    session = opener(policy, Store(tmp_path), lambda _: None, opened=sessions.append)
    source = RESTORED.replace("{damage}", damage)
    return run_script(tmp_path / "restored.py", source, session), sessions[0]


@pytest.mark.parametrize("kind", DAMAGE)
def test_updates_that_go_on_from_broken_state_are_left_out_before_they_are_made(tmp_path, kind):
    left, session = restored(tmp_path, DAMAGE[kind], Policy())
    (report,) = session.reports
    assert report.diagnoses[0].code == "NS403"
    assert report.proof.verdict == "proven"
    assert [entry.action.kind for entry in report.audit] == ["skip"] * 4
    assert left["is_finite"]
    assert not any(left["moved"].values())


def test_such_an_update_is_made_anew_where_that_is_allowed(tmp_path):
    policy = Policy(allow=("optimizer_swap",))
    left, session = restored(tmp_path, DAMAGE["first moment"], policy)
    (report,) = session.reports
    assert [entry.action.kind for entry in report.audit] == ["rollback"]
    assert left["is_finite"]
    assert all(left["moved"].values())


def test_state_that_ruins_nothing_is_asked_of_once(tmp_path):
    left, session = restored(tmp_path, DAMAGE["negative"].replace("-1.0", "-1e-9"), Policy())
    assert [one.code for one in session.findings] == ["NS403"]
    assert not session.reports
    assert left["is_finite"]
    assert all(left["moved"].values())
