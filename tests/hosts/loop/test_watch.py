"""The manual interface: ``w.step(loss_fn, batch)`` and ``w.update(...)``."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from doubles.session import ScriptedSession
from loop_scripts import ReplayingSession, same
from nanstop.errors import NanstopError, TrainingStopped
from nanstop.hosts.loop.watch import watch_loop
from nanstop.records import Atom

CLIP = 0.5


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def batches(num_steps, num_micro=1, bad=None):
    """``num_steps`` windows of batches; row 0 of window ``bad``'s last one is infinite."""
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        window = [
            {
                "x": torch.randn(8, 4, generator=generator),
                "y": torch.randn(8, 1, generator=generator),
            }
            for _ in range(num_micro)
        ]
        if step == bad:
            window[-1]["x"][0] = float("inf")
        yield window


def loss_of(net):
    return lambda batch: F.mse_loss(net(batch["x"]), batch["y"])


def plain(net, optimizer, windows, *, scaler=None, scheduler=None):
    """The loop as one would write it."""
    for window in windows:
        for batch in window:
            loss = loss_of(net)(batch) / len(window)
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()


def watched(net, optimizer, windows, session, *, loss_fn=None, accumulation=None, **update):
    """The same loop by way of a watch; returns the losses and the norms."""
    losses, norms = [], []
    with watch_loop(net, optimizer, session, accumulation=accumulation) as w:
        for window in windows:
            losses += [w.step(loss_fn or loss_of(net), batch) for batch in window]
            norms.append(w.update(clip=CLIP, **update))
    return losses, norms


def pair():
    net = model()
    return net, torch.optim.AdamW(net.parameters(), 1e-2)


def states(net, optimizer):
    moments = [
        v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)
    ]
    return [*(t.clone() for t in net.state_dict().values()), *moments, torch.get_rng_state()]


@pytest.mark.parametrize("num_micro", [1, 4])
def test_a_healthy_loop_is_bitwise_the_plain_one(num_micro):
    net, optimizer = pair()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    plain(net, optimizer, batches(5, num_micro), scheduler=schedule)
    expected = states(net, optimizer)

    net, optimizer = pair()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    session = ReplayingSession()
    losses, norms = watched(
        net, optimizer, batches(5, num_micro), session, accumulation=num_micro, scheduler=schedule
    )
    assert same(expected, states(net, optimizer))
    assert session.completed_steps == [0, 1, 2, 3, 4]
    assert (session.finished, session.num_opened, session.steps) == (0, 1, [])
    assert len(losses) == 5 * num_micro
    assert not any(loss.requires_grad for loss in losses)
    assert all(norm is not None for norm in norms)


def test_accumulation_is_known_from_the_window_before():
    """Powers of two: the correction of the first window is exact."""
    net, optimizer = pair()
    plain(net, optimizer, batches(4, 4))
    expected = states(net, optimizer)
    net, optimizer = pair()
    watched(net, optimizer, batches(4, 4), ReplayingSession())
    assert same(expected, states(net, optimizer))


def test_with_a_scaler_it_is_bitwise_the_plain_loop():
    net, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain(net, optimizer, batches(4, 2), scaler=scaler)
    expected, scale = states(net, optimizer), scaler.get_scale()
    net, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = ReplayingSession()
    watched(net, optimizer, batches(4, 2), session, scaler=scaler, accumulation=2)
    assert same(expected, states(net, optimizer))
    assert (scaler.get_scale(), session.steps) == (scale, [])


def test_a_scalers_own_skip_is_no_incident():
    net, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    session = ReplayingSession()

    def loss_fn(batch):
        with torch.autocast("cpu", dtype=torch.float16):
            return F.mse_loss(net(batch["x"]), batch["y"].half() * 100)

    before = schedule.last_epoch
    _, norms = watched(
        net, optimizer, batches(3), session, loss_fn=loss_fn, scaler=scaler, scheduler=schedule
    )
    # The first window was scaled after its backward, in float32.
    assert [norm is None for norm in norms] == [False, True, True]
    assert scaler.get_scale() == 2.0**22
    assert (session.steps, schedule.last_epoch) == ([], before + 1)


def test_a_failing_micro_batch_is_named_and_its_update_left_out():
    net, optimizer = pair()
    session = ReplayingSession("skip")
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    before = schedule.last_epoch
    _, norms = watched(
        net, optimizer, batches(4, 3, bad=2), session, scheduler=schedule, accumulation=3
    )
    assert session.steps == [2]
    (found,) = session.found
    assert (found.micro, found.fidelity, found.op) == (2, "bitwise", "aten.addmm.default")
    assert [norm is None for norm in norms] == [False, False, True, False]
    assert schedule.last_epoch == before + 3
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("with_scaler", [False, True])
def test_redo_is_bitwise_a_run_that_did_not_fail(with_scaler):
    faults = []

    def run(session):
        net, optimizer = pair()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if with_scaler else None

        def loss_fn(batch):
            loss = loss_of(net)(batch)
            return loss * faults.pop() if faults and optimizer.state else loss

        watched(
            net, optimizer, batches(4, 2), session, loss_fn=loss_fn, scaler=scaler, accumulation=2
        )
        return states(net, optimizer)

    expected = run(ReplayingSession())
    faults.append(float("nan"))
    session = ScriptedSession("redo")
    assert same(expected, run(session))
    assert session.steps == [1]


@pytest.mark.parametrize("remedy", ["bf16", "init_rows"])
def test_a_remedy_of_what_is_stored_is_on_until_the_update(remedy):
    """Undone before it, the update would meet a row that is still untrained, or gradients in
    another format.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1))
    net[0].weight.data[0] = float("nan")
    if remedy == "bf16":
        net[0].weight.data[0] = 1.0
        net.half()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    seen = []

    def look(*_):
        weight = net[0].weight
        seen.append((weight.dtype, weight.grad.dtype, bool(weight.isfinite().all())))

    optimizer.register_step_pre_hook(look)
    atom = (
        Atom(remedy="bf16")
        if remedy == "bf16"
        else Atom(remedy="init_rows", target="0.weight", value="mean")
    )
    session = ScriptedSession("redo", atoms={0: (atom,)})
    with watch_loop(net, optimizer, session) as w:
        w.step(lambda ids: net(ids).mean() * 1e6, torch.arange(8))
        assert w.update() is not None
    dtype = torch.bfloat16 if remedy == "bf16" else torch.float32
    assert seen == [(dtype, dtype, True)]
    assert all(p.isfinite().all() for p in net.parameters())
    assert net[0].weight.dtype == (torch.float16 if remedy == "bf16" else torch.float32)


@pytest.mark.parametrize("kind", ["raises", "consumes"])
def test_a_loss_function_that_cannot_be_run_again_is_a_record(kind):
    """Redo was resolved and fails: the update is left out and training goes on."""
    net, optimizer = pair()
    calls = []
    supply = iter([1.0, float("nan"), 1.0])

    def loss_fn(batch):
        calls.append(1)
        if kind == "raises":
            if len(calls) == 3:
                raise RuntimeError("not twice")
            return loss_of(net)(batch) * (float("nan") if len(calls) == 2 else 1.0)
        return loss_of(net)(batch) * next(supply)

    session = ScriptedSession("redo")
    with watch_loop(net, optimizer, session) as w:
        for window in batches(2):
            w.step(loss_fn, window[0])
            norm = w.update()
    assert session.steps == [1]
    assert (norm is None) == (kind == "raises")
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_batch_changed_in_place_is_said_so():
    net, optimizer = pair()

    def loss_fn(batch):
        loss = loss_of(net)(batch) * float("nan")
        batch["noise"].zero_()
        return loss

    session = ReplayingSession("redo")
    with watch_loop(net, optimizer, session) as w:
        w.step(loss_fn, next(batches(1))[0] | {"noise": torch.ones(1)})
        assert w.update() is None
    assert "changed in place" in session.refusals[0]


def test_weights_that_an_update_broke_come_with_the_way_back():
    net, optimizer = pair()
    session = ScriptedSession("skip")
    with watch_loop(net, optimizer, session) as w:
        for step, (batch,) in enumerate(batches(4)):
            if step == 2:
                optimizer.param_groups[0]["lr"] = float("inf")
            w.step(loss_of(net), batch)
            w.update()
            if session.steps:
                break
    assert session.steps == [3]
    assert "0.weight" in session.bad_params
    assert [s.id.step for s in session.failures[-1].rewind.steps][-1] == 2
    with session.failures[-1].rewind.rewound():
        assert all(p.isfinite().all() for p in net.parameters())


def test_weights_broken_by_the_last_update_are_reported_at_the_end():
    net, optimizer = pair()
    session = ScriptedSession("skip")
    with watch_loop(net, optimizer, session) as w:
        w.step(loss_of(net), next(batches(1))[0])
        optimizer.param_groups[0]["lr"] = float("inf")
        w.update()
    assert session.steps == [None]
    assert "0.weight" in session.bad_params


def test_numeric_exceptions_are_reported_and_raised():
    net = nn.Embedding(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    session = ReplayingSession()
    w = watch_loop(net, optimizer, session)
    with pytest.raises(IndexError, match="index out of range in self"):
        w.step(lambda ids: net(ids).sum(), torch.tensor([9]))
    assert session.sources == [("exception",)]
    with pytest.raises(ValueError, match="mine"):
        w.step(lambda _: (_ for _ in ()).throw(ValueError("mine")), torch.tensor([1]))
    assert len(session.steps) == 1
    w.step(lambda ids: net(ids).sum(), torch.tensor([1]))
    assert w.update() is not None


def test_stop_raises():
    net, optimizer = pair()
    w = watch_loop(net, optimizer, ReplayingSession("stop"))
    w.step(loss_of(net), next(batches(1, bad=0))[0])
    with pytest.raises(TrainingStopped, match="training stopped: as told"):
        w.update()
    assert all(p.grad is None for p in net.parameters())
    w.close(1)
    assert w.session.finished == 3


def test_tuples_and_tensors_are_batches_too():
    net, optimizer = pair()
    session = ReplayingSession()
    with watch_loop(net, optimizer, session) as w:
        (window,) = batches(1, bad=0)
        x, y = window[0].values()
        w.step(lambda pair: F.mse_loss(net(pair[0]), pair[1]), (x, y))
        w.update()
        w.step(lambda rows: net(rows).mean(), x)
        w.update()
    assert [f.fidelity for f in session.found] == ["bitwise", "bitwise"]


def test_nothing_is_left_on_the_model():
    net, optimizer = pair()
    before = copy.deepcopy(vars(net))
    watched(net, optimizer, batches(1), ReplayingSession())
    assert vars(net).keys() == before.keys()
    assert not net._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n, o: watch_loop(o, n, None), "needs a torch module and a torch optimizer"),
        (lambda n, o: watch_loop(n, o, None, accumulation=0), "accumulation is 0"),
        (lambda n, o: watch_loop(n, o, None).step(3, 4), "int cannot be called"),
        (lambda n, o: watch_loop(n, o, None).step(lambda _: 3, 4), "returned int, not a tensor"),
        (lambda n, o: watch_loop(n, o, None).update(), r"update\(\) without step\(\)"),
    ],
)
def test_wrong_use(call, message):
    with pytest.raises(NanstopError, match=message):
        call(*pair())
