"""Fused updates of unchanged loops that are launched before their window was read: on a CPU that
counts as a device that is waited for.
"""

import pytest

from loop_scripts import ReplayingSession, run_script, same
from nanstop.errors import TrainingStopped
from nanstop.hosts.loop import gated_update
from nanstop.hosts.loop.gated_update import GatedUpdate

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x):
        return self.body(x) / (0.0 if strikes and strikes.pop() else 1.0)

strikes = []
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
other = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=1e-2, fused=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
scaler = torch.amp.GradScaler("cpu", enabled=False)
seen = []
for step in range(8):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    strikes += [True] * (step == BAD)
    loss = (net(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = {clip}
    {between}
    {update}
    schedule.step()
    seen.append(float(norm) if norm is not None else 0.0)
state = [v for one in optimizer.state.values() for v in one.values()]
PARAMETERS = [t.clone() for t in (*net.state_dict().values(), *state, torch.get_rng_state())]
"""
CLIP = "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)"
STEP = "optimizer.step()"
TRIED = """
    try:
        optimizer.step()
    except BaseException as error:
        caught = error
        break
"""
HEALTHY, BAD = -1, 5


class Late(ReplayingSession):
    def may_read_late(self, step):
        return step.id.step > 0


@pytest.fixture
def launched(monkeypatch):
    """Have a CPU count as a device that is waited for; the updates that were launched, in turn."""
    begun, begin = [], GatedUpdate.begin
    monkeypatch.setattr(gated_update, "WAITED_FOR", {"cpu"})
    monkeypatch.setattr(GatedUpdate, "begin", lambda gate: begun.append(gate) or begin(gate))
    return begun


def both(path, session, *, bad, clip=CLIP, between="", update=STEP):
    """Run a script under two sessions: one that reads windows late, and one that waits."""
    source = SCRIPT.format(clip=clip, between=between, update=update)
    late, waiting = session(Late), session(ReplayingSession)
    endings = [
        run_script(path / f"{place}.py", source, one, BAD=bad)
        for place, one in enumerate((late, waiting))
    ]
    assert late.steps == waiting.steps
    assert late.completed_steps == waiting.completed_steps
    assert late.left_out_steps == waiting.left_out_steps
    assert [kind for kind, *_ in late.outcomes] == [kind for kind, *_ in waiting.outcomes]
    assert late.outcomes == waiting.outcomes
    return endings, late


NEXT = {
    "the update": {},
    "a scaler that is off": {"update": "scaler.step(optimizer)"},
    "an update without a clip": {"clip": "loss.detach()"},
    "a rate": {"between": "optimizer.param_groups[0]['lr'] *= 0.9"},
    "a closure of None": {"update": "optimizer.step(None)"},
}
FIRST = {
    "the norm is read": {"between": "seen.append(norm.item())"},
    "the norm is asked": {"between": "if not torch.isfinite(norm): continue"},
    "a gradient is changed": {"between": "net.body[0].weight.grad.mul_(0.5)"},
    "a gradient is read": {"between": "seen.append(float(net.body[0].bias.grad.norm()))"},
    "no update": {"between": "if step % 3 == 2: continue"},
    "another clip": {"between": CLIP},
    "an evaluation": {"between": "net.eval(); net(x); net.train()"},
    "another optimizer": {"between": "other.step()"},
    "another backward": {"between": "(net(x) * 0.1).sum().backward()"},
    "a closure": {"update": "optimizer.step(lambda: loss)"},
}


@pytest.mark.parametrize("how", NEXT)
@pytest.mark.parametrize("answer", ["redo", "skip"])
@pytest.mark.parametrize("bad", [HEALTHY, BAD])
def test_an_update_that_comes_next_is_launched_first(how, answer, bad, launched, tmp_path):
    (early, waited), _ = both(tmp_path, lambda kind: kind(answer), bad=bad, **NEXT[how])
    assert len(launched) == 7
    assert [gate.is_bad for gate in launched].count(True) == (bad == BAD)
    assert same(early["PARAMETERS"], waited["PARAMETERS"])
    assert str(early["seen"]) == str(waited["seen"])
    assert not {"found_inf", "grad_scale"} & set(vars(early["optimizer"]))


@pytest.mark.parametrize("how", FIRST)
@pytest.mark.parametrize("answer", ["redo", "skip"])
@pytest.mark.parametrize("bad", [HEALTHY, BAD])
def test_what_comes_before_the_update_comes_after_the_reading(how, answer, bad, launched, tmp_path):
    (early, waited), late = both(tmp_path, lambda kind: kind(answer), bad=bad, **FIRST[how])
    assert len(launched) <= 5
    assert len(late.steps) == (bad == BAD)
    assert same(early["PARAMETERS"], waited["PARAMETERS"])
    assert str(early["seen"]) == str(waited["seen"])


def test_a_stop_leaves_the_weights_as_they_were(launched, tmp_path):
    source = SCRIPT.format(clip="None", between="", update=TRIED)
    endings = [
        run_script(tmp_path / f"{place}.py", source, kind("stop"), BAD=BAD)
        for place, kind in enumerate((Late, ReplayingSession))
    ]
    assert all(isinstance(one["caught"], TrainingStopped) for one in endings)
    assert launched[-1].is_bad
    assert same(*[list(one["net"].parameters()) for one in endings])


def test_an_update_that_raises_leaves_no_flag_behind(launched, tmp_path):
    source = SCRIPT.format(
        clip=CLIP,
        between="",
        update="""
    if step == 3: optimizer.param_groups[0]["betas"] = "no numbers"
    try: optimizer.step()
    except Exception: optimizer.param_groups[0]["betas"] = (0.9, 0.999)
""",
    )
    early = run_script(tmp_path / "early.py", source, Late(), BAD=BAD)
    waited = run_script(tmp_path / "waited.py", source, ReplayingSession(), BAD=BAD)
    assert same(early["PARAMETERS"], waited["PARAMETERS"])
    assert len(launched) >= 6
