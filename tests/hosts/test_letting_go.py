"""Models that a script has trained and thrown away are gone when it needs memory for the next."""

import gc
import weakref
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainingArguments

import tiny
from loop_scripts import run_script
from nanstop.decide.policy import Policy
from nanstop.hosts import letting_go
from nanstop.hosts.references import is_held_elsewhere
from nanstop.hosts.script import autowatch
from nanstop.numerics import room
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

FOLDS = """
import gc
import weakref

import torch
from torch import nn

kept, alive = [], []


def train(fold):
    torch.manual_seed(fold)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).to("cpu")
    parameters = list(net.parameters())
    optimizers = [torch.optim.AdamW(some, lr=1e-2) for some in SPLIT(parameters)]
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2) for one in optimizers]
    for step in range(4):
        loss = net(torch.randn(8, 8)).square().mean()
        if step == BAD:
            loss = loss + (net[2].bias * 0).sum().sqrt()
        loss.backward()
        for one in optimizers:
            one.step()
        for one in schedules:
            one.step()
        if not optimizers:
            with torch.no_grad():
                for p in parameters:
                    p -= 0.01 * p.grad
        net.zero_grad()
    with torch.no_grad():
        net.eval()(torch.randn(8, 8))
    kept.extend(weakref.ref(one) for one in (net, parameters[0], *optimizers))


for fold in range(2):
    train(fold)
    FREE()
    alive.append([one() is not None for one in kept])
"""


SPLITS = {"one": "[p]", "two": "[p[:2], p[2:]]", "by hand": "[]"}


@pytest.mark.parametrize(
    ("free", "split", "bad"),
    [
        ("gc.collect()", "one", None),
        ("torch.cuda.empty_cache()", "one", None),
        ("nn.Linear(2, 2).to('cpu')", "one", None),
        ("nn.Linear(2, 2).to('cpu')", "two", None),
        ("nn.Linear(2, 2).to('cpu')", "by hand", None),
        ("nn.Linear(2, 2).to('cpu')", "one", 2),
    ],
)
def test_a_model_and_its_optimizer_are_gone_where_memory_is_freed_or_needed(
    free, split, bad, tmp_path
):
    source = FOLDS.replace("FREE()", free)
    given = {"SPLIT": eval(f"lambda p: {SPLITS[split]}"), "BAD": bad}
    store = Store(tmp_path / "incidents", None)
    ending = run_script(tmp_path / "a.py", source, opener(Policy(), store, lambda _: None), **given)
    assert ending["alive"] == [[False] * len(each) for each in ending["alive"]]
    assert len(store.reports) == (bad is not None)
    plain = run_script(tmp_path / "b.py", source, **given)
    assert plain["alive"] == ending["alive"]


HELD = """
import gc
import weakref

import torch
from torch import nn


class Holder:
    pass


class Silent:
    @property
    def __class__(self):
        raise RuntimeError


def train():
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    return optimizer


def hold():
    optimizer = train()
    seen.append(weakref.ref(optimizer))
    HOLD


def within():
    optimizer = train()
    seen.append(weakref.ref(optimizer))
    LOOK()
    return optimizer is not None


seen, held = [], []
WITHIN or hold()
LOOK()
"""


UPDATES_IN_A_HOOK = """
    p = optimizer.param_groups[0]["params"][0]
    p.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    held.append(p)
"""


@pytest.mark.parametrize(
    ("hold", "is_held"),
    [
        ("pass", False),
        ("held.append(optimizer)", True),
        ("held.append(torch.optim.lr_scheduler.StepLR(optimizer, 2))", True),
        ("held.append(one for one in [optimizer])", True),
        ("held.append(lambda: optimizer)", True),
        # A circle through the optimizer is the script's as far as the script holds a part of it.
        ("one = Holder(); one.it = optimizer; optimizer.owner = one; held.append(one)", True),
        ("one = Holder(); one.it = optimizer; optimizer.owner = one", False),
        # An object that does not say what it is, as those do that stand for others.
        ("one = Silent(); one.it = optimizer; optimizer.owner = one", False),
        # Updates that a hook makes: the script holds the model, which holds the hook.
        (
            UPDATES_IN_A_HOOK,
            True,
        ),
    ],
)
def test_what_the_script_holds_in_any_way_is_held(hold, is_held, tmp_path):
    said = []

    def look():
        gc.collect()
        loops = autowatch._loops
        said.append(is_held_elsewhere(loops.trained(), loops))

    source = HELD.replace("HOLD", hold)
    opening = opener(Policy(), Store(tmp_path / "incidents", None), lambda _: None)
    run_script(tmp_path / "a.py", source, opening, LOOK=look, WITHIN=False)
    assert said == [is_held]


def test_what_a_running_function_holds_is_held(tmp_path):
    said = []

    def look():
        loops = autowatch._loops
        said.append(is_held_elsewhere(loops.trained(), loops))

    source = HELD.replace("HOLD", "pass").replace("WITHIN or", "within() and not WITHIN and")
    opening = opener(Policy(), Store(tmp_path / "incidents", None), lambda _: None)
    run_script(tmp_path / "a.py", source, opening, LOOK=look, WITHIN=True)
    assert said[0] is True


def test_a_trainer_is_gone_where_the_next_model_is_moved(tmp_path):
    kept = []

    def train():
        args = TrainingArguments(**tiny.training_args(tmp_path, max_steps=1))
        trainer = Trainer(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())
        trainer.train()
        kept.extend(map(weakref.ref, (trainer, trainer.model, trainer.optimizer.optimizer)))

    autowatch.install(opener(Policy(), Store(tmp_path / "incidents", None), lambda _: None))
    try:
        train()
        torch.nn.Linear(2, 2).to("cpu")
    finally:
        autowatch.unwatch()
    assert [one() for one in kept] == [None] * 3


@contextmanager
def collections():
    """Whole collections that are made inside."""
    seen = []

    def note(phase, told):
        if phase == "start" and told["generation"] == 2:
            seen.append(told)

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


@pytest.mark.parametrize(("left", "most"), [(2**40, 1), (2**10, 20)])
def test_small_trainers_are_collected_now_and_then_and_large_ones_each_time(
    left, most, monkeypatch
):
    """A collection takes longer than a training of three steps."""
    clock = count(step=0.1)
    monkeypatch.setattr(room, "left_on", lambda _: left)
    found = letting_go.LettingGo(lambda: None, lambda: next(clock))
    gc.disable()
    try:
        with collections() as seen:
            for _ in range(20):
                found.trainer_ended(SimpleNamespace(model=torch.nn.Linear(64, 64)))
                found.look()
                found.look()
    finally:
        gc.enable()
    assert len(seen) == most


class Held:
    """Stands for what watches loops, which alone holds what they have trained."""

    def train(self):
        weights = torch.nn.Linear(64, 64).parameters()
        self.optimizer = torch.optim.SGD(weights, lr=0.1)

    def trained(self):
        return [weakref.ref(self.optimizer)]

    def let_go(self):
        self.optimizer = None


@pytest.mark.parametrize("asked_for", [0, 20])
@pytest.mark.parametrize(("left", "most"), [(2**40, 1), (2**10, 20)])
def test_small_loops_are_collected_now_and_then_and_large_ones_each_time(
    left, most, asked_for, monkeypatch
):
    """``asked_for``: collections that the script asks for itself."""
    clock, held = count(step=0.1), Held()
    monkeypatch.setattr(room, "left_on", lambda _: left)
    monkeypatch.setattr(letting_go, "is_held_elsewhere", lambda *_: False)
    found = letting_go.LettingGo(lambda: held, lambda: next(clock))
    gc.disable()
    try:
        with collections() as seen:
            for _ in range(20):
                held.train()
                found._look_after(gc.collect) if asked_for else found.look()
                assert held.optimizer is None
    finally:
        gc.enable()
    assert len(seen) == asked_for + most
