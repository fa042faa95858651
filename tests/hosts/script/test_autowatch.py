"""Unchanged raw loops, watched: nothing changes while all is well;
a failure is caught before its update.
"""

import copy
import io
import pickle
import sys
from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch

from doubles.session import ScriptedSession
from loop_scripts import ReplayingSession, investigated, run_script, same, weights
from nanstop.decide.policy import IN_USE
from nanstop.errors import TrainingStopped
from nanstop.hosts.script import autowatch, steps
from nanstop.hosts.tape import tape_budget
from nanstop.living import living
from nanstop.records import Diagnosis, Report

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8))
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        hidden = self.body(self.embed(ids))
        if BAD == "forward" and (ids == 15).any():
            hidden = hidden / (hidden - hidden)
        if BAD == "backward" and (ids == 15).any():
            hidden = hidden + torch.sqrt((hidden - hidden).abs())
        return self.head(hidden)


def batch(step, micro=0):
    generator = torch.Generator().manual_seed(100 * step + micro)
    ids = torch.randint(0, 15, (4, 6), generator=generator)
    if step == 2 and micro == NUM_MICRO - 1:
        ids[1, 3] = 15
    return ids


NUM_MICRO = 1
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
"""

PLAIN = (
    HEAD
    + """
def loss_of(ids):
    logits = net(ids)
    weight = torch.ones(ids.numel())
    if BAD == "loss" and (ids == 15).any():
        weight = weight * 0
    rows = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    return (rows * weight).sum() / weight.sum()

def train():
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(batch(step))
        loss.backward()
        optimizer.step()

train()
"""
)

CLIPPED = (
    "from torch.nn.utils import clip_grad_norm_\n"
    + HEAD
    + """
NUM_MICRO = 3
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
norms = []
for step in range(4):
    for micro in range(NUM_MICRO):
        ids = batch(step, micro)
        loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()) / NUM_MICRO
        loss.backward()
    norms.append(clip_grad_norm_(net.parameters(), 1.0))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=False)
"""
)

SCALED = (
    HEAD
    + """
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
scales = []
for step in range(5):
    optimizer.zero_grad()
    ids = batch(step)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
    scaler.scale(loss).backward()
    if UNSCALE:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
"""
)

CLIPPED_BEFORE_UNSCALE = SCALED.replace(
    "    if UNSCALE:\n        scaler.unscale_(optimizer)\n", "    if True:\n"
)

SCRIPTS = {
    "plain": (PLAIN, {}),
    "clipped": (CLIPPED, {}),
    "unscaled": (SCALED, {"SCALE": 1024.0, "UNSCALE": True}),
    "scaled": (SCALED, {"SCALE": 1024.0, "UNSCALE": False}),
    "clip before unscale": (CLIPPED_BEFORE_UNSCALE, {"SCALE": 1024.0}),
}


@pytest.fixture
def script(tmp_path):
    """Run a script from a file of its own."""
    return lambda source, session=None, **values: run_script(
        tmp_path / "train.py", source, session, **({"BAD": ""} | values)
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_healthy_loop_is_bitwise_the_same(script, name):
    source, values = SCRIPTS[name]
    plain = script(source, **values)
    state = torch.get_rng_state()
    session = ReplayingSession()
    watched = script(source, session, **values)
    assert same(weights(plain), weights(watched))
    assert torch.equal(state, torch.get_rng_state())
    assert plain.get("norms") == watched.get("norms")
    assert plain.get("scales") == watched.get("scales")
    assert not session.steps
    assert session.completed_steps == list(range(len(session.completed_steps)))
    assert session.num_opened == 1
    assert session.finished == 0


class Ahead(ScriptedSession):
    """Makes each update before the script does, undone; ``made``: the weights after it."""

    def before_update(self, step):
        with step.isolated(with_update=True):
            for micro in range(len(step.batches)):
                step.run(micro)
            step.update()
            made = [p.detach().clone() for p in step.view.root.parameters()]
            self.made[step.id.step] = made
        super().before_update(step)


@pytest.mark.parametrize(
    "clip",
    [
        "clip_grad_norm_(net.parameters(), 0.01)",
        "clip_grad_norm_(net.parameters(), 0.01, norm_type=float('inf'))",
        "clip_grad_norm_(net.head.parameters(), 0.01)",
        "torch.nn.utils.clip_grad_value_(net.parameters(), 1e-4)",
    ],
)
def test_an_update_that_is_made_anew_is_clipped_as_the_script_clips(script, clip):
    loop = f"""
after = []
optimizer = torch.optim.SGD(net.parameters(), 0.5)
for step in range(3):
    optimizer.zero_grad()
    ids = batch(step)
    F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
    {clip}
    optimizer.step()
    after.append([p.detach().clone() for p in net.parameters()])
"""
    session = Ahead()
    session.made = {}
    head = "from torch.nn.utils import clip_grad_norm_\n" + HEAD
    after = script(head + loop, session)["after"]
    for made, own in zip(session.made.values(), after, strict=True):
        assert all(map(torch.equal, made, own))


@pytest.mark.parametrize(
    ("bad", "phase", "line"),
    [
        ("forward", "forward", "hidden = hidden / (hidden - hidden)"),
        ("backward", "backward", "hidden = hidden + torch.sqrt((hidden - hidden).abs())"),
        ("loss", "loss", "return (rows * weight).sum() / weight.sum()"),
    ],
)
def test_a_failure_is_replayed_and_localized_at_once(script, bad, phase, line):
    session = ReplayingSession()
    ending = script(PLAIN, session, BAD=bad)
    assert session.steps == [2]
    (found,) = session.found
    assert (found.micro, found.fidelity, found.phase, found.line) == (0, "bitwise", phase, line)
    assert found.op == "aten.div.Tensor"
    assert session.completed_steps == [0, 1, 3]
    assert all(w.isfinite().all() for w in weights(ending))


def test_what_a_model_returns_in_an_object_of_another_class_is_followed(script):
    policy = """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(4, 2)
    def forward(self, x):
        base = torch.distributions.Normal(self.mean(x), torch.ones(2))
        return torch.distributions.TransformedDistribution(
            torch.distributions.Independent(base, 1), [torch.distributions.TanhTransform()]
        )

policy = Policy()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    actions = torch.full((3, 2), 1.0 if step == 2 else 0.5)
    loss = -policy(torch.randn(3, 4)).log_prob(actions).mean()
    loss.backward()
    optimizer.step()
"""
    session = ReplayingSession()
    script(HEAD + policy, session, BAD="")
    assert session.steps == [2]
    assert session.found[0].op == "aten.atanh.default"
    assert session.found[0].line == "loss = -policy(torch.randn(3, 4)).log_prob(actions).mean()"


RAISING = CLIPPED.replace(
    "clip_grad_norm_(net.parameters(), 1.0)",
    "clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)",
)


def test_what_a_loop_makes_before_its_model_call_is_played_again(script):
    loop = """
for step in range(4):
    optimizer.zero_grad()
    ids = batch(step)
    rewards = ids[:, 0].float()
    weights = rewards / rewards.sum()
    if (ids == 15).any():
        weights = rewards * torch.log(rewards - rewards)
    rows = F.cross_entropy(net(ids).transpose(1, 2), ids, reduction="none")
    (rows.mean(1) * weights).sum().backward()
    optimizer.step()
"""
    session = ReplayingSession()
    script(HEAD + loop, session, BAD="")
    assert session.steps == [2]
    assert session.found[0].op == "aten.log.default"
    assert session.found[0].line == "weights = rewards * torch.log(rewards - rewards)"


def test_what_a_loop_makes_is_played_again_where_it_empties_many_gradients_itself(script):
    loop = """
more = [nn.Parameter(torch.zeros(1)) for _ in range(80)]
for step in range(4):
    ids = batch(step)
    shares = ids[:, 0].float() / ids[:, 0].sum()
    if (ids == 15).any():
        shares = shares * torch.log(shares - shares)
    rows = F.cross_entropy(net(ids).transpose(1, 2), ids, reduction="none")
    (rows.mean(1) * shares).sum().backward()
    optimizer.step()
    for parameter in [*net.parameters(), *more]:
        parameter.grad = None
"""
    session = ReplayingSession()
    script(HEAD + loop, session, BAD="")
    assert session.steps == [2]
    assert session.found[0].line == "shares = shares * torch.log(shares - shares)"


def test_a_clip_that_raises_is_looked_at_before_it_does(script):
    session = ReplayingSession("proceed")
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        script(RAISING, session, BAD="backward")
    assert session.steps == [2]
    assert session.found[0].phase == "backward"


def test_gradients_that_the_script_itself_refuses_are_looked_at_when_it_raises(script, capsys):
    loop = """
def train():
    tries = 0
    for step in (0, 1, 2, 2):
        loss_of(batch(step)).backward()
        if all(bool(p.grad.isfinite().all()) for p in net.parameters()):
            optimizer.step()
        elif (tries := tries + 1) == 2:
            raise RuntimeError("the loss scale cannot go lower")
        optimizer.zero_grad()

try:
    train()
except RuntimeError:
    import sys
    sys.excepthook(*sys.exc_info())
"""
    session = ReplayingSession()
    script(PLAIN.split("def train()")[0] + loop, session, BAD="backward")
    assert session.steps == [2]
    (found,) = session.found
    assert (found.micro, found.phase) == (0, "backward")
    assert "the loss scale cannot go lower" in capsys.readouterr().err


def test_a_clip_does_not_raise_where_the_update_is_left_out(script):
    session = ReplayingSession("skip")
    script(RAISING, session, BAD="backward")
    assert session.steps == [2]


def test_a_clip_that_would_raise_passes_once_the_window_is_made_anew(script):
    session = ScriptedSession("redo")
    flip = "    if step == 2:\n        net.head.weight.grad.numpy()[0, 0] = numpy.nan\n"
    spoiled = "import numpy\n" + RAISING.replace("    norms.append", f"{flip}    norms.append")
    ending = script(spoiled, session)
    assert session.steps == [2]
    assert same(weights(ending), weights(script(RAISING)))


@pytest.mark.parametrize(("kept", "missing"), [("", ("scaler",)), ("scaler", ())])
def test_a_state_that_is_restored_while_the_script_runs_is_looked_at(script, kept, missing):
    resumed = """
optimizer_state, scaler_state = optimizer.state_dict(), scaler.state_dict()
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
optimizer.load_state_dict(optimizer_state)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
if KEPT:
    scaler.load_state_dict(scaler_state)
for step in range(5):"""
    loop = SCALED[SCALED.index("for step in range(5):") :]
    session = ReplayingSession()
    script(
        SCALED + loop.replace("for step in range(5):", resumed, 1),
        session,
        SCALE=8.0,
        UNSCALE=False,
        KEPT=kept,
    )
    (learnt,) = session.learnt
    assert learnt["resume"].step == 5
    assert learnt["resume"].missing == missing
    assert learnt["optimizer"].state_faults == ()


BY_HAND = "[p.grad.div_(scaler.get_scale()) for p in net.parameters()]"


@pytest.mark.parametrize(
    ("step", "sinks"),
    [
        ("optimizer.step()", ("update",)),
        (f"{BY_HAND}; optimizer.step()", ()),
        ("scaler.step(optimizer)", ("unscale",)),
        (
            f"{BY_HAND}; torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0); optimizer.step()",
            (),
        ),
        (
            "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0); scaler.step(optimizer)",
            ("clip", "unscale"),
        ),
        (
            "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0); optimizer.step()",
            ("clip", "update"),
        ),
    ],
)
def test_gradients_that_are_applied_with_their_scale_are_noted(script, step, sinks):
    session = ReplayingSession()
    source = SCALED.replace("scaler.step(optimizer)", step)
    if "scaler.step" not in step:
        source = source.replace("scaler.update()", "pass")
    script(source, session, SCALE=1024.0, UNSCALE=False)
    assert session.facts.sinks == sinks
    assert session.facts.scaler == 1024.0


@pytest.mark.parametrize(
    ("loss", "sinks"), [("(loss / 2 * 4096.0)", ("scale",)), ("(loss * 0.5)", ()), ("loss", ())]
)
def test_a_loss_that_the_loop_scales_itself_is_noted(script, loss, sinks):
    session = ReplayingSession()
    source = SCALED.replace("scaler.scale(loss)", loss).replace("scaler.step(optimizer)", "")
    script(source.replace("scaler.update()", "optimizer.step()"), session, SCALE=1.0, UNSCALE=False)
    assert session.facts.sinks == sinks


def test_a_scaler_that_refuses_gradients_has_the_setup_looked_at(script):
    session = ReplayingSession()
    half = SCALED.replace(
        "    if UNSCALE:",
        "    if step == 2:\n"
        "        net.head.half()\n"
        "        net.head.weight.grad = torch.ones_like(net.head.weight)\n"
        "    if UNSCALE:",
    )
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        script(half, session, SCALE=1024.0, UNSCALE=True)
    (learnt,) = session.learnt
    assert {group.dtype for group in learnt["param_groups"]} == {"float16", "float32"}
    assert not session.steps


def test_an_only_optimizer_of_other_parameters_is_that_of_the_loop(script):
    session = ReplayingSession()
    source = CLIPPED.replace("NUM_MICRO = 3", "NUM_MICRO = 3\nnet.head = nn.Linear(8, 16)")
    source = source.replace("net.parameters(), 1.0", "net.head.parameters(), 1.0")
    script(source, session)
    assert session.view.optimizer is not None


def test_an_overflow_is_not_the_scalers_own_where_it_does_not_take_the_step(script):
    session = ReplayingSession("skip")
    own = SCALED.replace("scaler.step(optimizer)", "optimizer.step()").replace(
        "scaler.update()", "pass"
    )
    script(own, session, SCALE=2.0**120, UNSCALE=False)
    assert session.steps


def test_a_scaler_that_no_loss_has_come_to_yet_is_known(script, monkeypatch):
    others = {id(one) for one in living(torch.amp.GradScaler)}  # of scripts that ran before
    monkeypatch.setattr(
        steps, "living", lambda kind: [o for o in living(kind) if id(o) not in others]
    )
    session = ReplayingSession()
    refusing = SCALED.replace(
        "logits = net(ids)", "logits = net(ids).masked_fill(ids[..., None] == 0, -1e9)"
    )
    with pytest.raises(RuntimeError, match="without overflow"):
        script(refusing, session, SCALE=512.0, UNSCALE=False)
    assert session.facts.scaler == 512.0


def test_an_overflow_that_was_clipped_is_not_the_scalers_own_where_it_does_not_take_the_step(
    script,
):
    session = ReplayingSession("skip")
    clipped = "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0); optimizer.step()"
    own = SCALED.replace("scaler.step(optimizer)", clipped).replace("scaler.update()", "pass")
    ending = script(own, session, SCALE=2.0**120, UNSCALE=False)
    assert session.steps
    assert all(w.isfinite().all() for w in weights(ending))
    assert {one.no_redo for one in session.failures} == {IN_USE}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_failing_micro_batch_is_named(script, name):
    source, values = SCRIPTS[name]
    session = ReplayingSession()
    ending = script(source, session, BAD="forward", **values)
    assert session.steps == [2]
    (found,) = session.found
    assert found.micro == ending["NUM_MICRO"] - 1
    assert found.line == "hidden = hidden / (hidden - hidden)"
    assert all(w.isfinite().all() for w in weights(ending))


@pytest.mark.parametrize("name", ["unscaled", "scaled", "clip before unscale"])
def test_what_the_scaler_skips_stays_the_scalers(script, name):
    source, values = SCRIPTS[name]
    plain = script(source, BAD="forward", **values)
    watched = script(source, ReplayingSession("skip"), BAD="forward", **values)
    assert plain["scales"] == watched["scales"]
    assert plain["scales"][2] == 512.0
    assert same(weights(plain), weights(watched))


@pytest.mark.parametrize("unscale", [True, False])
def test_first_skips_of_a_scaler_are_no_incident(script, unscale):
    values = {"SCALE": 2.0**24, "UNSCALE": unscale}
    session = ReplayingSession()
    watched = script(SCALED, session, **values)
    assert watched["scales"][0] == 2.0**23
    assert not session.steps
    assert same(weights(script(SCALED, **values)), weights(watched))


def test_a_gradient_that_overflows_at_scale_one_is_an_incident(script):
    session = ReplayingSession()
    script(SCALED, session, BAD="backward", SCALE=1024.0, UNSCALE=True)
    assert [set(sources) for sources in session.sources] == [{"grad"}]


@pytest.mark.parametrize("name", SCRIPTS)
def test_redo_makes_the_window_as_if_it_had_not_failed(script, name):
    """The fault strikes once: after the redo everything is bitwise a run that it never struck."""
    source, values = SCRIPTS[name]
    once = source.replace(
        "        return self.head(hidden)",
        "        if (ids == 15).any() and FAULTS:\n"
        "            hidden = hidden * FAULTS.pop()\n"
        "        return self.head(hidden)",
    )
    healthy = script(once, FAULTS=[], **values)
    state = torch.get_rng_state()
    session = ScriptedSession("redo")
    redone = script(once, session, FAULTS=[float("nan")], **values)
    assert session.steps == [2]
    assert same(weights(healthy), weights(redone))
    assert torch.equal(state, torch.get_rng_state())
    assert healthy.get("norms") == redone.get("norms")
    assert healthy.get("scales") == redone.get("scales")


def test_running_statistics_are_mended_by_a_redo_and_by_a_skip(script):
    source = (
        HEAD
        + """
class Bad(nn.Module):
    def forward(self, rows):
        return rows * FAULTS.pop() if FAULTS and COUNT.pop() == 2 else rows

net = nn.Sequential(nn.Linear(4, 4), Bad(), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    COUNT.append(step)
    optimizer.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
    )
    healthy = script(source, FAULTS=[], COUNT=[])
    session = ScriptedSession("redo")
    redone = script(source, session, FAULTS=[float("nan")], COUNT=[])
    assert session.steps == [2]
    assert same(weights(healthy), weights(redone))
    skipped = script(source, ScriptedSession("skip"), FAULTS=[float("nan")], COUNT=[])
    assert all(w.isfinite().all() for w in weights(skipped))
    observed = script(source, ScriptedSession("proceed"), FAULTS=[float("nan")], COUNT=[])
    assert not all(w.isfinite().all() for w in weights(observed))


def test_skip_leaves_weights_and_moments_as_they_were(script):
    source = PLAIN.replace(
        "        optimizer.step()\n",
        "        before = [p.detach().clone() for p in net.parameters()]\n"
        "        moments = [s['exp_avg'].clone() for s in optimizer.state.values()]\n"
        "        optimizer.step()\n"
        "        if step == 2:\n"
        "            FROZEN.append(all(map(torch.equal, before, net.parameters())))\n"
        "            after = [s['exp_avg'] for s in optimizer.state.values()]\n"
        "            FROZEN.append(all(map(torch.equal, moments, after)))\n"
        "            FROZEN.append(all(p.grad is not None for p in net.parameters()))\n",
    )
    frozen = []
    script(source, ReplayingSession("skip"), BAD="forward", FROZEN=frozen)
    assert frozen == [True, True, True]


def test_observe_changes_nothing(script):
    plain = script(PLAIN, BAD="forward")
    watched = script(PLAIN, ReplayingSession("proceed"), BAD="forward")
    assert all(
        map(
            torch.equal,
            map(torch.nan_to_num, weights(plain)),
            map(torch.nan_to_num, weights(watched)),
        )
    )
    assert not weights(watched)[0].isfinite().all()


def test_stop_raises_where_the_update_would_have_been(script):
    session = ReplayingSession("stop")
    with pytest.raises(TrainingStopped, match="training stopped: as told"):
        script(PLAIN, session, BAD="forward")
    autowatch.unwatch()
    assert session.finished == 3


def test_a_script_that_catches_a_stop_goes_on_with_the_weights_it_had(script):
    session = ReplayingSession("stop")
    source = PLAIN.replace(
        "        optimizer.step()\n",
        """        try:
            optimizer.step()
        except Exception as error:
            CAUGHT.append((step, type(error).__name__))
""",
    )
    caught = []
    watched = script(source, session, BAD="forward", CAUGHT=caught)
    assert caught == [(2, "TrainingStopped")]
    assert all(weight.isfinite().all() for weight in weights(watched))
    assert session.completed_steps == [0, 1, 2]
    autowatch.unwatch()
    assert session.finished == 0


def test_losses_that_the_script_leaves_out_itself_can_stop_it_too(script):
    guarded = PLAIN.replace(
        "        loss.backward()\n",
        "        if not loss.isfinite():\n            continue\n        loss.backward()\n",
    )
    with pytest.raises(TrainingStopped, match="training stopped: as told"):
        script(guarded, ReplayingSession("stop"), BAD="forward")


GAN = (
    HEAD
    + """
maker, judge = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
of_maker = torch.optim.Adam(maker.parameters(), 1e-2)
of_judge = torch.optim.Adam(judge.parameters(), 1e-2)
for step in range(4):
    real, noise = torch.randn(8, 4), torch.randn(8, 4)
    if step == 2:
        real = real * FACTOR
    of_judge.zero_grad()
    loss = F.softplus(-judge(real)).mean() + F.softplus(judge(maker(noise).detach())).mean()
    loss.backward()
    of_judge.step()
    of_maker.zero_grad()
    F.softplus(-judge(maker(noise))).mean().backward()
    of_maker.step()
"""
)


def test_two_models_with_an_optimizer_each(script):
    plain = script(GAN, FACTOR=1.0)
    session = ReplayingSession()
    watched = script(GAN, session, FACTOR=1.0)
    assert same(weights(plain, "maker", "judge"), weights(watched, "maker", "judge"))
    assert not session.steps


def test_a_failure_of_one_of_two_models_is_its_own(script):
    session = ReplayingSession()
    ending = script(GAN, session, FACTOR=float("nan"))
    assert session.steps == [2]
    assert session.found[0].fidelity == "bitwise"
    assert session.failures[0].rewritten_at is None, "the maker's backward is no write"
    assert all(w.isfinite().all() for w in weights(ending, "maker", "judge"))


JUDGED_BEFORE = (
    HEAD
    + """
maker = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 4))
judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
of_maker = torch.optim.Adam(maker.parameters(), 1e-2)
of_judge = torch.optim.Adam(judge.parameters(), 1e-2)
for step in range(4):
    judge.zero_grad()
    F.softplus(-judge(torch.randn(8, 4))).mean().backward()
    noise, other = torch.randn(8, 4), torch.randn(8, 4)
    if step == 2 and BAD:
        other[3] = noise[3]
    fake, second = maker(noise).tanh(), maker(other).tanh()
    F.softplus(judge(fake.detach())).mean().backward()
    of_judge.step()
    maker.zero_grad()
    if MOVES and step == 2:
        with torch.no_grad():
            maker[0].bias.add_(0.1)
    apart = (fake - second).abs().sum(1)
    loss = F.softplus(-judge(fake)).mean() + 1e-3 * ((noise - other).norm(dim=1) / apart).mean()
    loss.backward()
    of_maker.step()
"""
)


@pytest.mark.parametrize("moves", [False, True])
def test_a_loss_of_what_was_made_before_an_update_of_another_model(script, moves):
    plain = script(JUDGED_BEFORE, BAD=False, MOVES=moves)
    session = ReplayingSession()
    watched = script(JUDGED_BEFORE, session, BAD=False, MOVES=moves)
    assert same(weights(plain, "maker", "judge"), weights(watched, "maker", "judge"))
    assert not session.steps
    ending = script(JUDGED_BEFORE.replace("nn.Dropout(0.1), ", ""), session, BAD=True, MOVES=moves)
    assert session.steps == [2]
    assert all(w.isfinite().all() for w in weights(ending, "maker", "judge"))
    if moves:  # what made it is no more what it was
        assert not session.found
        return
    (found,) = session.found
    assert (found.fidelity, found.op) == ("bitwise", "aten.div.Tensor")
    assert found.line.startswith("loss = F.softplus(-judge(fake))")


def test_encoder_and_decoder_called_one_after_the_other(script):
    source = (
        HEAD
        + """
encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 4)
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.1)
for step in range(3):
    optimizer.zero_grad()
    code = encoder(torch.randn(8, 4)).relu()
    if step == 1:
        code = code / (code - code)
    decoder(code).square().mean().backward()
    optimizer.step()
"""
    )
    session = ReplayingSession()
    ending = script(source, session)
    (found,) = session.found
    assert (found.fidelity, found.line) == ("bitwise", "code = code / (code - code)")
    assert all(w.isfinite().all() for w in weights(ending, "encoder", "decoder"))


def test_two_backwards_of_one_forward(script):
    source = (
        HEAD
        + """
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    out = net(torch.randn(8, 4))
    out.square().mean().backward(retain_graph=True)
    (out.abs().mean() / (step != BAD_STEP)).backward()
    optimizer.step()
"""
    )
    plain = script(source, BAD_STEP=9)
    session = ReplayingSession()
    assert same(weights(plain), weights(script(source, session, BAD_STEP=9)))
    script(source, session, BAD_STEP=1)
    assert session.steps == [1]
    assert session.found[0].line == "(out.abs().mean() / (step != BAD_STEP)).backward()"


def test_an_id_out_of_range_is_an_incident_and_raises_as_before(script):
    source = PLAIN.replace("ids[1, 3] = 15", "ids[1, 3] = 16")
    session = ReplayingSession()
    with pytest.raises(IndexError, match="index out of range in self"):
        script(source, session)
    assert (session.steps, session.sources) == ([2], [("exception",)])
    assert session.found[0].fidelity == "bitwise"


def test_a_label_out_of_range_is_found_not_of_the_model(script):
    source = CLIPPED.replace("ids.flatten())", "ids.flatten() + 16 * (step == 2))")
    session = ReplayingSession()
    with pytest.raises(IndexError, match="out of bounds"):
        script(source, session)
    assert session.sources == [("exception",)]


def test_a_probability_that_is_not_a_number_is_looked_at_when_its_loss_refuses_it(script):
    loop = """
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    p = torch.sigmoid(net(torch.randn(8, 4)) * (float("nan") if step == 1 else 1.0))
    F.binary_cross_entropy(p, torch.ones(8, 1)).backward()
    optimizer.step()
"""
    session = ReplayingSession()
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        script(HEAD + loop, session)
    assert (session.steps, session.sources) == ([1], [("exception",)])
    assert session.found[0].line.startswith("p = torch.sigmoid(net(")


def test_other_exceptions_pass_without_a_word(script):
    source = PLAIN + "raise KeyboardInterrupt\n"
    session = ReplayingSession()
    with pytest.raises(KeyboardInterrupt):
        script(source, session)
    with pytest.raises(ValueError, match="mine"):
        script(PLAIN.replace("return self.head(hidden)", "raise ValueError('mine')"), session)
    with pytest.raises(SystemExit) as ending:
        script(PLAIN + "import sys; sys.exit(7)\n", session)
    assert ending.value.code == 7
    assert not session.steps


def test_closures(script):
    source = (
        HEAD
        + """
net = nn.Linear(4, 1)
rows, target = torch.randn(16, 4), torch.randn(16, 1)
optimizer = KIND(net.parameters(), lr=0.1)
def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(net(rows), target) * FACTOR
    loss.backward()
    return loss
for step in range(3):
    optimizer.step(closure)
"""
    )
    for kind in (torch.optim.SGD, torch.optim.LBFGS):
        session = ReplayingSession()
        plain = script(source, KIND=kind, FACTOR=1.0)
        assert same(weights(plain), weights(script(source, session, KIND=kind, FACTOR=1.0)))
        assert not session.steps
        ending = script(source, session, KIND=kind, FACTOR=float("nan"))
        assert session.steps
        assert all(w.isfinite().all() for w in weights(ending))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_what_a_closure_is_given_is_played_again(script, kind, inside):
    source = """
optimizer = KIND(net.parameters(), lr=0.1)
for step in range(4):
    values = torch.rand(3, 8) * 0.5
    values[1, 2] = float(step == 2)
    early = None if INSIDE else torch.log(1 - values)
    def closure():
        optimizer.zero_grad()
        given = torch.log(1 - values) if early is None else early
        loss = net.head(given).pow(2).mean()
        loss.backward()
        return loss
    optimizer.step(closure)
"""
    session = ReplayingSession()
    script(HEAD + source, session, BAD="", KIND=kind, INSIDE=inside)
    assert session.steps == [2]
    assert session.found[0].op == "aten.log.default"


def test_a_closure_that_reads_its_weights_outside_of_any_module_is_played_again(script):
    source = """
scale = nn.Parameter(torch.tensor(1.0))
optimizer = torch.optim.LBFGS([scale], lr=1.0, max_iter=4)
def closure():
    optimizer.zero_grad()
    loss = torch.sqrt(scale)
    loss.backward()
    return loss
for step in range(4):
    optimizer.step(closure)
"""
    session = ReplayingSession()
    script(HEAD + source, session, BAD="")
    assert session.steps
    assert not session.refusals
    assert session.found[0].line == "loss = torch.sqrt(scale)"


def test_gradients_of_an_unknown_origin_are_held_back_and_recorded(script):
    source = (
        HEAD
        + """
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    loss = net(torch.randn(8, 4)).square().mean() / (step != 1)
    for p, grad in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))):
        p.grad = torch.from_numpy(grad.numpy().copy())
    optimizer.step()
"""
    )
    session = ReplayingSession()
    ending = script(source, session)
    assert session.steps == [1]
    assert "no model call was seen" in session.refusals[0]
    assert all(w.isfinite().all() for w in weights(ending))


@pytest.mark.parametrize(("num_columns", "is_refused"), [(4, False), (1 << 18, True)])
def test_a_large_input_changed_in_place_is_said_so(script, num_columns, is_refused):
    source = (
        HEAD
        + f"""
net = nn.Linear({num_columns}, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
rows = torch.randn(2, {num_columns})
for step in range(3):
    optimizer.zero_grad()
    loss = net(rows).mean() / (step != 1)
    loss.backward()
    rows.copy_(torch.randn(2, {num_columns}))
    optimizer.step()
"""
    )
    session = ReplayingSession()
    ending = script(source, session)
    assert any("changed in place" in one for one in session.refusals) == is_refused
    assert all(w.isfinite().all() for w in weights(ending))


def test_a_running_total_kept_in_place_does_not_count_replays(script):
    source = (
        HEAD
        + """
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
total, losses = torch.zeros(()), []
for step in range(4):
    optimizer.zero_grad()
    loss = net(torch.randn(8, 4)).square().mean()
    total += loss.detach()
    losses.append(loss.detach())
    if step == 2:
        loss = loss / (loss - loss)
    loss.backward()
    optimizer.step()
"""
    )
    session = ReplayingSession()
    ending = script(source, session)
    assert session.found[0].line == "loss = loss / (loss - loss)"
    assert torch.equal(ending["total"], torch.stack(ending["losses"]).cumsum(0)[-1])


LONG_LOSS = """
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(8):
    optimizer.zero_grad()
    loss = net(torch.randn(8, 4)).square().mean()
    for _ in range(200):
        loss = loss + 0.0
    if step in (5, 7):
        loss = loss / (loss - loss)
    loss.backward()
    optimizer.step()
"""


def test_a_long_loss_not_of_the_model_is_localized_in_a_run_that_is_young(script):
    session = ReplayingSession()
    script(HEAD + LONG_LOSS, session)
    assert session.steps == [5, 7]
    assert session.refusals == []
    assert {f.line for f in session.found} == {"loss = loss / (loss - loss)"}


def test_a_long_loss_not_of_the_model_is_localized_when_it_recurs(script, monkeypatch):
    monkeypatch.setattr(tape_budget, "_RUN_SECONDS", 0.0)
    monkeypatch.setattr(tape_budget, "_TIME_SHARE", 0.0)  # a pause of this machine is no share
    session = ReplayingSession()
    ending = script(HEAD + LONG_LOSS, session)
    assert session.steps == [5, 7]
    assert "recorded from now on" in session.refusals[0]
    assert [f.line for f in session.found] == ["loss = loss / (loss - loss)"]
    assert all(w.isfinite().all() for w in weights(ending))


def test_a_frozen_copy_of_the_model_is_called_beside_it(script):
    source = (
        HEAD
        + """
import copy

class Net(nn.Linear):
    pass

net = Net(4, 4)
reference = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    rows = torch.randn(8, 4)
    made = net(rows)
    with torch.no_grad():
        theirs = reference(rows)
    loss = (made - theirs - 1).square().mean() / (0.0 if step == 2 else 1.0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    session = ReplayingSession()
    ending = script(source, session)
    assert session.steps == [2]
    assert all(w.isfinite().all() for w in weights(ending))


def test_function_modes_of_the_script_keep_their_order(script):
    source = (
        HEAD
        + """
from torch.overrides import TorchFunctionMode
class Counting(TorchFunctionMode):
    count = 0
    def __torch_function__(self, func, types, args=(), kwargs=None):
        Counting.count += 1
        return func(*args, **(kwargs or {}))
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    with Counting():
        out = net(torch.randn(8, 4))
        with torch.device("cpu"):
            loss = out.square().mean()
    with torch.device("cpu"):
        loss = loss + net(torch.ones(8, 4)).mean()
    loss.backward()
    optimizer.step()
count = Counting.count
"""
    )
    plain, watched = script(source), script(source, ReplayingSession())
    assert same(weights(plain), weights(watched))
    assert plain["count"] == watched["count"]
    assert torch._C._len_torch_function_stack() == 0


def test_a_trainer_that_is_given_an_optimizer_trains_under_no_mode(script, tmp_path):
    """What a loop would be made of is over: a tape would take up every operation of the training.
    Each write in place had all of these looked through: 40 steps took 27 times as long.
    """
    pytest.importorskip("transformers.trainer")  # what is not imported yet is not replaced
    source = """
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
import tiny

modes = []
class Looks(TrainerCallback):
    def on_step_end(self, *_, **__):
        modes.append(torch._C._len_torch_function_stack())

model = tiny.llama()
given = (torch.optim.RMSprop(model.parameters(), 1e-4), None)
options = TrainingArguments(FOLDER, max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
rows, looks = tiny.TokenRows(), [Looks()]
Trainer(model, options, train_dataset=rows, callbacks=looks, optimizers=given).train()
"""
    seen = script(source, ReplayingSession(), FOLDER=str(tmp_path / "out"))
    assert seen["modes"] == [0, 0]


def test_compiled_models_are_not_recompiled(script):
    source = (
        HEAD
        + """
import torch._dynamo.testing
torch._dynamo.reset()
counter = torch._dynamo.testing.CompileCounter()
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
compiled = torch.compile(net, backend=counter)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad()
    compiled(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
frames = counter.frame_count
"""
    )
    plain, watched = script(source), script(source, ReplayingSession())
    assert plain["frames"] == watched["frames"] == 1
    assert same(weights(plain), weights(watched))


def test_models_can_be_copied_and_saved_while_watched(script):
    source = (
        PLAIN
        + "COPIES.append(copy.deepcopy(net))\n"
        + "stream = io.BytesIO(); torch.save(net.state_dict(), stream)\n"
    )
    source += "HOOKS.append(len(net._forward_pre_hooks) + len(net._forward_hooks))\n"
    copies, hooks = [], []
    ending = script(source, ReplayingSession(), COPIES=copies, HOOKS=hooks, copy=copy, io=io)
    assert hooks == [0]
    assert same(weights(ending), list(copies[0].state_dict().values()))
    assert "__call__" not in vars(type(ending["net"]))


def test_unwatch_puts_everything_back(script):
    owners = {
        torch.Tensor: ("backward",),
        torch.autograd: ("backward",),
        torch.nn.Module: ("__call__",),
        torch.nn.utils: ("clip_grad_norm_", "clip_grad_value_"),
        torch.amp.GradScaler: ("scale", "unscale_", "step"),
        torch.optim.Optimizer: ("__init__",),
    }
    before = {(o, n): getattr(o, n) for o, names in owners.items() for n in names}
    autowatch.install(ReplayingSession())
    torch.optim.SGD([torch.zeros(1)], 0.1)
    assert torch.Tensor.backward is not before[torch.Tensor, "backward"]
    assert pickle.loads(pickle.dumps(torch.nn.utils.clip_grad_norm_)) is not None
    autowatch.unwatch()
    autowatch.unwatch()
    assert {key: getattr(*key) for key in before} == before
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks


def test_a_loop_without_an_optimizer_does_not_fill_the_memory(script):
    source = (
        HEAD
        + """
net = nn.Linear(4, 4)
for step in range(700):
    net(torch.randn(8, 4)).square().mean().backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.01 * p.grad
            p.grad = None
"""
    )
    assert same(weights(script(source)), weights(script(source, ReplayingSession())))


def test_what_another_watch_owns_is_left_alone(script):
    session = ReplayingSession()
    source = (
        PLAIN.replace("train()\n", "")
        + "from nanstop.hosts.script import autowatch\nwith autowatch.paused():\n    train()\n"
    )
    script(source, session, BAD="forward")
    assert session.num_opened == 0


def test_a_loop_that_watches_itself_is_watched_once(script):
    source = (
        HEAD
        + """
from nanstop.hosts.loop.watch import watch_loop
from nanstop.hosts.script import autowatch
from nanstop.hosts.tape import tape_budget
with watch_loop(net, optimizer, OWN, pause=autowatch.paused) as w:
    for step in range(4):
        w.step(lambda ids: F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()), batch(step))
        w.update()
"""
    )
    own, other = ReplayingSession(), ReplayingSession()
    script(source, other, BAD="forward", OWN=own)
    assert own.steps == [2]
    assert other.num_opened == 0


@pytest.mark.parametrize(
    "check",
    [
        "if not math.isfinite(loss.item()): continue",
        "if torch.isnan(loss): continue",
        "if not torch.isfinite(loss.detach()): continue",
        "if not math.isfinite(loss.detach()): raise KeyError(1)",
    ],
)
def test_a_loss_that_the_script_gives_up_by_itself_is_an_incident(script, check):
    source = PLAIN.replace("        loss.backward()", f"        {check}\n        loss.backward()")
    session = ReplayingSession()
    with pytest.raises(KeyError) if "raise" in check else nullcontext():
        script("import math\n" + source, session, BAD="loss")
    assert session.steps == [2]
    assert session.found[0].line == "return (rows * weight).sum() / weight.sum()"
    assert script("import math\n" + source, own := ReplayingSession()) is not None
    assert not own.steps


class _Odd:
    """A batch that objects to being looked at."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        raise RuntimeError("no length")

    def __bool__(self):
        raise RuntimeError("no truth")


class _Drawn(Mapping):
    """A batch whose values are drawn when they are read."""

    def __init__(self):
        self.num_reads = 0

    def __getitem__(self, name):
        self.num_reads += 1
        return torch.randn(4, 4)

    def __iter__(self):
        return iter(["rows"])

    def __len__(self):
        return 1


ODD = """
import torch
from dataclasses import dataclass, field
from torch import nn

@dataclass
class Out:
    rows: object
    later: object = field(init=False)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def __len__(self):
        return 0

    def forward(self, batch):
        return Out(self.inner(batch["rows"] if hasattr(batch, "keys") else batch.rows))

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
READS = []
for step in range(4):
    drawn = DRAWN()
    for batch in (drawn, ODD(torch.ones(4, 4))):
        optimizer.zero_grad()
        rows = net(batch).rows
        if step == 2 and BAD:
            rows = rows / (rows - rows)
        rows.square().mean().backward()
        optimizer.step()
    READS.append(drawn.num_reads)
"""


def test_objects_of_the_script_are_left_alone(script):
    given = {"DRAWN": _Drawn, "ODD": _Odd, "BAD": False}
    plain, session = script(ODD, **given), ReplayingSession()
    watched = script(ODD, session, **given)
    assert watched["READS"] == [1, 1, 1, 1]
    assert same(weights(plain), weights(watched))
    assert not session.steps


def test_odd_objects_do_not_hide_a_failure(script):
    session = ReplayingSession()
    ending = script(ODD, session, DRAWN=_Drawn, ODD=_Odd, BAD=True)
    assert session.steps == [4, 5]
    assert session.found[1].op == "aten.div.Tensor"
    assert all(w.isfinite().all() for w in weights(ending))


@pytest.mark.parametrize("inner", ["nn.Sequential(nn.Linear(4, 4), nn.Tanh())", "Scored()"])
def test_a_compiled_model_and_one_without_parameters(script, inner):
    source = f"""
import torch
from torch import nn

class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows):
        return self.inner(rows)

torch.manual_seed(0)
net = {inner}
compiled = torch.compile(net, backend="eager")
act = nn.Sequential(nn.Sigmoid())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad()
    out = act(compiled(torch.randn(8, 4)))
    if step == 2 and BAD:
        out = out / (out - out)
    out.square().mean().backward()
    optimizer.step()
"""
    plain, session = script(source, BAD=False), ReplayingSession()
    assert same(weights(plain), weights(script(source, session, BAD=False)))
    assert not session.steps
    ending = script(source, session, BAD=True)
    assert session.steps == [2]
    assert session.found[0].op == "aten.div.Tensor"
    assert all(w.isfinite().all() for w in weights(ending))


INSIDE = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizers = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in net.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for step in range(4):
    rows = torch.randn(8, 4)
    if step == 2 and BAD:
        rows[0] = float("inf")
    net(rows).square().mean().backward()
"""


def test_updates_inside_backward_are_observed_and_never_repeated(script):
    plain, session = script(INSIDE, BAD=False), ReplayingSession()
    assert same(weights(plain), weights(script(INSIDE, session, BAD=False)))
    assert "inside backward" in session.facts.veto
    assert session.completed_steps == [0, 1, 2, 3]
    assert not session.steps
    bad = ReplayingSession("proceed")
    plain, watched = script(INSIDE, BAD=True), script(INSIDE, bad, BAD=True)
    assert bad.steps == [2, 3]
    assert all("inside backward" in refusal for refusal in bad.refusals)
    numbers = [[torch.nan_to_num(w) for w in weights(one)] for one in (plain, watched)]
    assert same(*numbers)


def test_what_an_update_inside_backward_has_broken_is_not_how_the_run_began(tmp_path):
    """Weights and moments of the first step are seen behind its update."""
    adam = INSIDE.replace("SGD([p], 0.1)", "Adam([p], 0.1)").replace("step == 2", "step == 0")
    _, news = investigated(tmp_path / "script.py", adam, BAD=True)
    told = [one.code for one in news if isinstance(one, Diagnosis)]
    report = next(one for one in news if isinstance(one, Report))
    assert (told, [one.code for one in report.diagnoses]) == (["NS116"], ["NS501"])


@pytest.mark.parametrize("kind", ["skip", "proceed"])
def test_one_backward_for_two_optimizers_is_one_failure(script, kind):
    source = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in net]
for step in range(4):
    net.zero_grad()
    loss = net(torch.randn(8, 4)).square().mean()
    if step == 2:
        loss = loss.log() * float("nan")
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
"""
    session = ReplayingSession(kind)
    ending = script(source, session)
    assert session.steps == ([2] if kind == "skip" else [2, 3])
    assert all(w.isfinite().all() for w in weights(ending)) == (kind == "skip")


FUNCTION = """
import torch
from torch import nn

class Log(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, power=1):
        ctx.save_for_backward(rows)
        return torch.tensor(rows.detach().numpy()).log() * power

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.saved_tensors[0], None

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    rows = torch.randn(8, 4)
    if step == 2 and BAD:
        rows[1] = 1e4
    optimizer.zero_grad()
    loss = -Log.apply(net(rows)).mean()
    loss.backward()
    optimizer.step()
"""


def test_a_custom_function_not_of_the_model_is_played_again(script):
    source, apply = FUNCTION, vars(torch.autograd.Function)["apply"]
    plain, session = script(source, BAD=False), ReplayingSession()
    assert same(weights(plain), weights(script(source, session, BAD=False)))
    assert not session.steps
    ending = script(source, session, BAD=True)
    assert session.steps == [2]
    assert [found.fidelity for found in session.found] == ["bitwise"]
    assert all(w.isfinite().all() for w in weights(ending))
    assert vars(torch.autograd.Function)["apply"] is apply


PRUNED = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
for step in range(5):
    if step == 2:
        with torch.no_grad():
            weight = net[0].weight
            weak = weight.unflatten(1, (2, 2)).flatten(1).norm(dim=1).argsort()[:2]
            weight[weak] = 0.0
    optimizer.zero_grad()
    least = net[0].weight.norm(dim=1).min() if BAD else 1.0
    loss = net(torch.randn(8, 4)).square().mean() / least
    loss.backward()
    optimizer.step()
"""


def test_a_view_whose_weight_was_written_to_is_no_reason_to_look_away(script):
    plain, session = script(PRUNED, BAD=False), ReplayingSession()
    assert same(weights(plain), weights(script(PRUNED, session, BAD=False)))
    ending = script(PRUNED, session, BAD=True)
    assert session.steps == [2, 3, 4]
    assert [found.fidelity for found in session.found] == ["bitwise"] * 3
    assert all(w.isfinite().all() for w in weights(ending))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
def test_a_custom_function_inside_a_compiled_model_stays_compiled(script):
    source = """
import torch
from torch import nn

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows):
        return Twice.apply(self.inner(rows))

torch.manual_seed(0)
torch._dynamo.reset()
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
GRAPHS = []

def counting(graph, inputs):
    GRAPHS.append(len(graph.graph.nodes))
    return graph.forward

compiled = torch.compile(net, backend=counting, fullgraph=True)
for step in range(4):
    optimizer.zero_grad()
    compiled(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
    plain, session = script(source), ReplayingSession()
    watched = script(source, session)
    assert same(weights(plain), weights(watched))
    assert watched["GRAPHS"] == plain["GRAPHS"] != []


def test_a_watch_of_the_scripts_own_has_no_mode_beside_it(script):
    source = """
import nanstop
import torch

net = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
total, modes = torch.ones(3).cumsum(0), []
with nanstop.watch(net, optimizer) as watch:
    for _ in range(2):
        watch.step(lambda batch: net(batch).square().mean(), torch.randn(2, 4))
        watch.update(clip=1.0)
        modes.append(torch._C._len_torch_function_stack())
"""
    assert script(source, ReplayingSession())["modes"] == [0, 0]
