"""Updates that are launched before the values of their window were read, and left out by the
device where these are bad. On a CPU, whose fused optimizers take the same flag.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanstop
from nanstop.errors import TrainingStopped
from nanstop.hosts.loop import gated_update
from nanstop.hosts.loop.gated_update import GatedUpdate
from nanstop.replay.copies.rewind import SnapshotKeeper

STEPS, STRUCK = 44, 39


@pytest.fixture
def gates(monkeypatch):
    """Have a CPU count as a device that is waited for; what was launched early, in turn. No update
    waits for a snapshot but the first: others come by the time that a run has taken.
    """
    keeper = partial(SnapshotKeeper, time_share=0.0, late_share=0.0)
    monkeypatch.setattr("nanstop.hosts.window.ends.SnapshotKeeper", keeper)
    begun = []
    begin = GatedUpdate.begin
    monkeypatch.setattr(gated_update, "WAITED_FOR", {"cpu"})
    monkeypatch.setattr(
        GatedUpdate, "begin", lambda gate: begun.append(gate) or begin(gate), raising=True
    )
    return begun


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=draw) for _ in range(STEPS)]


def made(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return net, kind(net.parameters(), lr=1e-2, fused=True, **options)


def loss_of(net):
    def loss(batch):
        out = net(batch)
        return F.mse_loss(torch.sqrt(out.square()), batch)

    return loss


def state(net, optimizer):
    held = [v for one in optimizer.state.values() for v in one.values() if torch.is_tensor(v)]
    return [*(p.detach().clone() for p in net.parameters()), *(v.clone() for v in held)]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def trained(tmp_path, kind, windows, loss_fn=None, **options):
    net, optimizer = made(kind)
    norms = []
    watch = nanstop.watch(net, optimizer, out=tmp_path, **options)
    with watch as w:
        for batch in windows:
            w.step((loss_fn or loss_of)(net), batch)
            norms.append(w.update(clip=0.5))
    return state(net, optimizer), norms, watch


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_healthy_loop_is_bitwise_the_plain_one(kind, gates, tmp_path):
    net, optimizer = made(kind)
    expected = []
    for batch in batches():
        loss_of(net)(batch).backward()
        expected.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()

    ended, norms, watch = trained(tmp_path, kind, batches())
    assert same(state(net, optimizer), ended)
    assert same(expected, norms)
    assert watch.incidents == ()
    assert len(gates) >= 5  # those behind the first, which are looked at more closely
    assert not any(gate.is_bad for gate in gates)


def struck(net):
    """Return a loss that divides by 0 in one batch: its first row is 0."""

    def loss(batch):
        return F.mse_loss(net(batch) / batch.norm(dim=1, keepdim=True), batch)

    return loss


def with_zeros():
    windows = batches()
    windows[STRUCK][0] = 0.0
    return windows


@pytest.mark.parametrize("policy", ["repair", "skip"])
def test_a_bad_window_ends_as_one_that_was_waited_for(policy, gates, tmp_path, monkeypatch):
    kind, options = torch.optim.AdamW, {"policy": policy}
    ended, norms, watch = trained(tmp_path / "early", kind, with_zeros(), struck, **options)
    assert [gate.is_bad for gate in gates].count(True) == 1

    monkeypatch.setattr(gated_update, "WAITED_FOR", frozenset())
    before = len(gates)
    waited, others, waiting = trained(tmp_path / "late", kind, with_zeros(), struck, **options)
    assert len(gates) == before
    assert same(waited, ended)
    assert [one is None for one in norms] == [one is None for one in others]
    told = [(r.incident.id, r.diagnoses[0].code, r.audit[-1].outcome) for r in watch.incidents]
    assert told == [
        (r.incident.id, r.diagnoses[0].code, r.audit[-1].outcome) for r in waiting.incidents
    ]
    assert [code for _, code, _ in told] == ["NS206"]
    assert all(bool(one.isfinite().all()) for one in ended)


def test_a_run_that_is_to_stop_has_the_weights_from_before_the_update(gates, tmp_path):
    net, optimizer = made(torch.optim.AdamW)
    with nanstop.watch(net, optimizer, out=tmp_path, policy="stop") as w:
        for batch in with_zeros()[:STRUCK]:
            w.step(struck(net), batch)
            w.update(clip=0.5)
        before = state(net, optimizer)
        w.step(struck(net), with_zeros()[STRUCK])
        with pytest.raises(TrainingStopped):
            w.update(clip=0.5)
    assert gates[-1].is_bad
    assert same(before, state(net, optimizer))


def scaled(net):
    return lambda batch: net(batch[0]).mean() * batch[1]


def test_finite_gradients_of_an_infinite_norm_are_applied(gates, tmp_path, monkeypatch):
    windows = [(batch, 1e30 if at == STRUCK else 1.0) for at, batch in enumerate(batches())]
    early, norms, watch = trained(tmp_path / "early", torch.optim.AdamW, windows, scaled)
    assert [gate.is_bad for gate in gates].count(True) == 1
    assert float(norms[STRUCK]) == float("inf")
    assert watch.incidents == ()

    monkeypatch.setattr(gated_update, "WAITED_FOR", frozenset())
    assert same(trained(tmp_path / "late", torch.optim.AdamW, windows, scaled)[0], early)


@pytest.mark.parametrize("why", ["observed", "hooked", "not fused"])
def test_an_update_is_waited_for(why, gates, tmp_path):
    net, optimizer = made(torch.optim.AdamW)
    if why == "hooked":
        optimizer.register_step_post_hook(lambda *_: None)
    if why == "not fused":
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    options = {"policy": "observe"} if why == "observed" else {}
    with nanstop.watch(net, optimizer, out=tmp_path, **options) as w:
        for batch in batches():
            w.step(loss_of(net), batch)
            w.update()
    assert gates == []
