"""The end of a window, the same for a trainer and a loop:
redone as often, recorded alike, with the same histories.
"""

import json
import math

import pytest
import torch
from torch import nn

import hf_cases as cases
from doubles.session import ScriptedSession
from nanstop.decide.policy import Policy
from nanstop.hosts.loop.step import LoopStep
from nanstop.hosts.loop.watch import watch_loop
from nanstop.hosts.script import autowatch
from nanstop.hosts.trainer.actions import Carrier
from nanstop.hosts.trainer.watch import watch_trainer
from nanstop.records import Atom
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
FAILING = 2


def train(host, folder):
    """Train for five steps whose third has a bad loss the first time;
    return the session and its ``report.json``.
    """
    calls = []

    def spoilt(loss, *, at):
        calls.append(1)
        return loss * float("nan") if len(calls) == at + 1 else loss

    open_session = opener(Policy(), Store(folder), lambda _: None)
    if host == "trainer":
        trainer = cases.build("trainer", folder / "out")
        original = trainer.compute_loss
        trainer.compute_loss = lambda *a, **k: spoilt(original(*a, **k), at=2 * FAILING)
        watch = watch_trainer(trainer, open_session)
        trainer.train()
    else:
        net = nn.Linear(4, 1)
        with watch_loop(net, torch.optim.SGD(net.parameters(), 0.1), open_session) as watch:
            for _ in range(5):
                watch.step(lambda x: spoilt(net(x).square().mean(), at=FAILING), torch.randn(3, 4))
                watch.update()
    (folder,) = [entry for entry in folder.iterdir() if (entry / "report.json").is_file()]
    return watch.session, json.loads((folder / "report.json").read_text())


def met(history, step):
    """The losses that a report's history has of a step."""
    (row,) = [row for row in history if row["name"] == "loss_raw"]
    values = zip(row["steps"], row["values"], strict=True)
    return [float(value) for at, value in values if at == step]


@pytest.mark.parametrize("host", ["trainer", "loop"])
def test_what_became_of_a_redo_is_recorded(tmp_path, host):
    session, report = train(host, tmp_path)
    (entry,) = report["audit"]
    assert (entry["action"]["kind"], entry["outcome"]) == ("redo", "done")
    assert entry["before"] == "loss nan"
    assert math.isfinite(float(entry["after"].removeprefix("loss ")))
    # The incident shows what was met, the run what it went on with.
    assert not all(map(math.isfinite, met(report["incident"]["history"], FAILING)))
    kept = {series.name: series.values for series in session.series.records()}
    assert all(map(math.isfinite, (*kept["loss_raw"], *kept["grad_norm"])))
    assert len(kept["loss_raw"]) == (10 if host == "trainer" else 5)


@pytest.mark.parametrize("host", ["trainer", "loop"])
def test_a_redo_that_fails_is_recorded_as_such(tmp_path, host, monkeypatch):
    def fail(*_):
        raise RuntimeError("not now")

    monkeypatch.setattr(Carrier if host == "trainer" else LoopStep, "redo", fail)
    _, report = train(host, tmp_path)
    (entry,) = report["audit"]
    assert entry["outcome"] == "failed: RuntimeError: not now"
    assert (entry["before"], entry["after"]) == ("loss nan", "")


def loop(session, *, spoil, num_steps=5):
    """The net of a loop whose loss goes through ``spoil(step, loss)``, and the norms of its
    updates.
    """
    torch.manual_seed(0)
    net, norms = nn.Linear(4, 1), []
    with watch_loop(net, torch.optim.SGD(net.parameters(), 0.1), session) as watch:
        for step in range(num_steps):
            watch.step(lambda x, at=step: spoil(at, net(x).square().mean()), torch.randn(3, 4))
            norms.append(watch.update())
    return net, norms


def test_a_loop_is_redone_as_often_as_a_trainer():
    session = ScriptedSession("redo")
    bad = float("nan")
    net, norms = loop(session, spoil=lambda at, loss: loss * bad if at == FAILING else loss)
    assert session.steps == [FAILING] * 3
    assert [norm is None for norm in norms] == [False, False, True, False, False]
    assert {outcome for _, outcome, *_ in session.outcomes} == {"failed: the window fails again"}
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_window_that_was_redone_is_on_the_way_back():
    """Without its update the updates after it would be made from other weights."""
    struck, session = [], ScriptedSession("redo")

    def spoil(at, loss):
        first = at == FAILING and not struck
        struck.extend([1] * first)
        return loss * float("nan") if first or at == 4 else loss

    loop(session, spoil=spoil)
    assert [step.id.step for step in session.failures[-1].rewind.steps] == [0, 1, 2, 3]


def test_a_window_of_which_nothing_is_left_is_no_update():
    """Gradients of zero are one: moments fade, and weights decay."""
    atoms = {0: (Atom(remedy="drop_micro", target="0"),)}
    session = ScriptedSession("redo", atoms=atoms)
    _, norms = loop(session, spoil=lambda _, loss: loss * float("nan"), num_steps=1)
    assert norms == [None]
    assert session.outcomes == [("redo", "done", "loss nan", "")]


def test_no_update_is_blamed_for_a_frozen_weight(tmp_path):
    """Run again from the snapshot on, every update meets it: it is in no snapshot."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net[1].parameters(), 0.1)
    open_session = opener(Policy(), Store(tmp_path), lambda _: None)
    with watch_loop(net, optimizer, open_session) as watch:
        for step in range(4):
            if step == FAILING:
                net[0].weight.data[0, 0] = float("nan")
            watch.step(lambda x: net(x).square().mean(), torch.randn(3, 4))
            watch.update()
    (report,) = watch.session.reports
    assert report.incident.bad_params == ("0.weight",)
    assert [entry.action.kind for entry in report.audit] == ["skip", "skip"]


@pytest.mark.parametrize("bad", ["", "first", "rest"])
def test_a_script_that_clips_a_part_has_one_window_an_update(bad):
    """The rest of its gradients is met at the update: the same window, with the same way back."""
    session, looks = ScriptedSession("skip"), []
    session.before_update = lambda step: looks.append(step.id.step)
    autowatch.install(session)
    try:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            if step == 3:
                net[0].weight.data[0, 0] = float("nan")
            net(torch.randn(3, 4)).square().mean().backward()
            if bad and step == FAILING:
                net[bad == "rest"].weight.grad[0, 0] = float("nan")
            nn.utils.clip_grad_norm_(net[0].parameters(), 1.0)
            optimizer.step()
    finally:
        autowatch.unwatch()
    *_, last = session.failures
    losses = session.series.of("loss_raw")
    assert session.steps == ([FAILING] if bad else []) + [3]
    assert len(losses) == len(session.series.of("grad_norm")) == 4
    good = [0, 1, *([] if bad else [2])]
    assert [step.id.step for step in last.rewind.steps] == good
    assert sorted(set(looks)) == sorted(looks)
    assert set(good) <= set(looks)
