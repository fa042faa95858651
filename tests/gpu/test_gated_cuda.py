"""On a GPU: updates that are launched before the host has read whether their window is finite."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanstop
from loop_scripts import investigated, run_script
from loop_scripts import same as same_tensors
from nanstop.hosts.loop import gated_update
from nanstop.hosts.loop.gated_update import GatedUpdate
from nanstop.records import Report

pytestmark = pytest.mark.gpu
STEPS, STRUCK = 70, 55


@pytest.fixture
def gates(monkeypatch):
    begun, begin = [], GatedUpdate.begin
    monkeypatch.setattr(GatedUpdate, "begin", lambda gate: begun.append(gate) or begin(gate))
    return begun


def made(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    net = net.to("cuda", dtype)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)


def batches(dtype, *, bad=False):
    draw = torch.Generator().manual_seed(1)
    windows = [torch.randn(32, 64, generator=draw).to("cuda", dtype) for _ in range(STEPS)]
    if bad:
        windows[STRUCK][0] = 0.0
    return windows


def loss_of(net):
    return lambda batch: F.mse_loss(net(batch) / batch.norm(dim=1, keepdim=True), batch)


def watched(net, optimizer, windows, out):
    with nanstop.watch(net, optimizer, out=out) as watch:
        for batch in windows:
            watch.step(loss_of(net), batch)
            watch.update(clip=0.5)
    return watch


def same(net, other):
    return all(map(torch.equal, net.parameters(), other.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_healthy_loop_is_bitwise_the_plain_one(dtype, gates, tmp_path):
    plain, optimizer = made(dtype)
    for batch in batches(dtype):
        loss_of(plain)(batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    net, optimizer = made(dtype)
    assert watched(net, optimizer, batches(dtype), tmp_path).incidents == ()
    assert same(plain, net)
    assert len(gates) >= 8
    assert not any(gate.is_bad for gate in gates)


def test_a_bad_window_ends_as_one_that_was_waited_for(gates, tmp_path, monkeypatch):
    windows = batches(torch.float32, bad=True)
    net, optimizer = made(torch.float32)
    watch = watched(net, optimizer, windows, tmp_path / "early")
    assert [gate.is_bad for gate in gates].count(True) == 1

    monkeypatch.setattr(gated_update, "WAITED_FOR", frozenset())
    other, optimizer = made(torch.float32)
    waiting = watched(other, optimizer, windows, tmp_path / "late")
    assert same(net, other)
    told = [r.diagnoses[0].code for r in watch.incidents]
    assert told == [r.diagnoses[0].code for r in waiting.incidents] == ["NS206"]
    assert all(bool(p.isfinite().all()) for p in net.parameters())


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
losses = []
for step in range(70):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
    x[0] *= not (BAD and step == 55)
    loss = F.mse_loss(net(x) / x.norm(dim=1, keepdim=True), x)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.detach())
losses = [one.item() for one in losses]
PARAMETERS = [t.clone() for t in (*net.state_dict().values(), torch.cuda.get_rng_state())]
"""


def test_an_unchanged_loop(gates, tmp_path, monkeypatch):
    plain = run_script(tmp_path / "plain.py", SCRIPT, BAD=False)
    healthy, _ = investigated(tmp_path / "healthy.py", SCRIPT, on_failure="repair", BAD=False)
    assert same_tensors(plain["PARAMETERS"], healthy["PARAMETERS"])
    assert plain["losses"] == healthy["losses"]
    assert len(gates) >= 8
    early, news = investigated(tmp_path / "early.py", SCRIPT, on_failure="repair", BAD=True)
    assert [gate.is_bad for gate in gates].count(True) == 1

    monkeypatch.setattr(gated_update, "WAITED_FOR", frozenset())
    late, others = investigated(tmp_path / "late.py", SCRIPT, on_failure="repair", BAD=True)
    assert same_tensors(early["PARAMETERS"], late["PARAMETERS"])
    told = [[r.diagnoses[0].code for r in n if isinstance(r, Report)] for n in (news, others)]
    assert told == [["NS206"], ["NS206"]]
