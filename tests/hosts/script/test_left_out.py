"""Batches that a script leaves out by itself: because of a bad number, or for another reason."""

import pytest

from loop_scripts import ReplayingSession, investigated, run_script, same
from nanstop.localize import own_answer
from nanstop.records import Report

SCRIPT = """
import math, numpy as np, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
losses, best = [], torch.tensor(math.inf)
def batch(step):
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(step)) + 0.5
    x[1, 2] = 0.0 if BAD and step == 2 else 1.0
    return x
for step in range(6):
    x = batch(step)
    out = net(x)
    rows = (out * x.log() * (1.0 - x)).square()
    loss = rows.mean() - (rows.mean().detach() if step == 2 else 0.0)
    {check}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [t.clone() for t in (*net.state_dict().values(), torch.get_rng_state())]
"""
BORN = "rows = (out * x.log() * (1.0 - x)).square()"
SKIPS = "if loss != loss: continue"


def trained(path, check, session=None, *, is_bad=False):
    return run_script(path / "script.py", SCRIPT.format(check=check), session, BAD=is_bad)


@pytest.mark.parametrize(
    "check",
    [
        "if loss != loss: continue",
        "if not (loss == loss): continue",
        "if loss.data != loss.data: continue",
        "if not loss < 1e9: continue",
        "if loss.item() != loss.item(): continue",
        "if np.isnan(loss.detach().numpy()): continue",
        "if loss.isnan().item(): continue",
        "if torch.stack([loss]).isnan().any(): continue",
        "if (loss * out).isnan().sum() > 0: continue",
        "if not torch.isfinite(loss * rows).all(): continue",
        "if (rows - rows != 0).any(): continue",
    ],
)
def test_each_way_to_ask_whether_a_number_is_bad(tmp_path, check):
    session = ReplayingSession()
    trained(tmp_path, check, session, is_bad=True)
    assert session.steps == [2]
    assert session.found[0].line == BORN
    assert session.found[0].op == "aten.log.default"


ZERO = "torch.zeros(1, requires_grad=True)"


@pytest.mark.parametrize(
    "check",
    [
        f"if not torch.isfinite(loss): loss = {ZERO}.sum()",
        f"loss = {ZERO} if torch.isnan(loss).any() else loss",
        "if loss != loss: loss = torch.tensor(0.0, requires_grad=True)",
        "if math.isnan(loss.item()): loss = out.detach().sum().mul(0.0).requires_grad_()",
    ],
)
def test_a_loss_that_is_replaced_because_it_is_bad(tmp_path, check):
    session = ReplayingSession()
    ending = trained(tmp_path, check, session, is_bad=True)
    assert session.steps == [2]
    assert session.found[0].line == BORN
    assert same(ending["PARAMETERS"], trained(tmp_path, check, is_bad=True)["PARAMETERS"])


@pytest.mark.parametrize(
    "check",
    [
        f"if loss < 0.05: loss = {ZERO}.sum()",
        f"if torch.isnan(loss) or step % 2: loss = {ZERO}",
        "if not torch.isfinite(loss): loss = loss.detach()",
        f"finite = torch.isfinite(out).all().item(); ({ZERO} * loss.item()).backward()",
    ],
)
def test_a_loss_that_is_replaced_for_another_reason(tmp_path, check):
    session = ReplayingSession()
    watched = trained(tmp_path, check, session)
    assert session.steps == []
    assert same(watched["PARAMETERS"], trained(tmp_path, check)["PARAMETERS"])


MASKED = "out.masked_fill(out < out.max() + (step % 2) - 0.5, -math.inf)"


@pytest.mark.parametrize(
    "check",
    [
        "if loss < 0.05: continue",
        "if not loss > 0.05: continue",
        f"if ({MASKED} == -math.inf).all(): continue",
        f"if {MASKED}.max() == -math.inf: continue",
        f"if {MASKED}.max().item() == -math.inf: continue",
        f"if torch.isinf({MASKED}.max()): continue",
        "if step % 3 == 0 and loss < best: continue",
        "if step % 2 and (torch.cdist(out, out).fill_diagonal_(math.inf) < 9).any(): continue",
        "if (out.argmax(-1) == x.argmax(-1)).sum().item() >= 0 and step % 2: continue",
        "if (torch.where(out > 0, out.log(), 0.0) > -9).any() and step % 2: continue",
        "if (out.log()[out > 0] > -9).any() and step % 2: continue",
        "if step % 2 and (loss + 1).mul(1000).exp() > 5: continue",
    ],
)
def test_what_is_left_out_for_another_reason(tmp_path, check):
    plain, session = trained(tmp_path, check), ReplayingSession()
    watched = trained(tmp_path, check, session)
    assert len(plain["losses"]) < 6
    assert not session.steps
    assert watched["losses"] == plain["losses"]
    assert same(watched["PARAMETERS"], plain["PARAMETERS"])


def test_a_question_between_two_calls_of_a_model_leaves_the_window_whole(tmp_path):
    """The micro-batch that is asked about goes on, and is what fails later."""
    more = "if (out > 0).any(): loss = loss + (net(x) * x.log()).square().mean()"
    session = ReplayingSession()
    trained(tmp_path, more, session, is_bad=True)
    assert session.steps == [2]
    assert session.found[0].line == BORN
    assert not session.refusals
    plain = trained(tmp_path, more)
    assert same(trained(tmp_path, more, ReplayingSession())["PARAMETERS"], plain["PARAMETERS"])


def test_numbers_that_are_ordinary_are_not_asked_about_for_ever(tmp_path, monkeypatch):
    runs, attempt = [], own_answer.attempt
    monkeypatch.setattr(own_answer, "attempt", lambda *a, **k: runs.append(1) or attempt(*a, **k))
    trained(tmp_path, "if (out > 9).any() or step: continue", ReplayingSession())
    first = len(runs)
    check = "\n    ".join(
        ["if step == 0: pass", *["elif (out > 9).any(): pass"] * 20, "else: continue"]
    )
    trained(tmp_path, check, ReplayingSession())
    assert first <= 2
    assert len(runs) - first <= 16


@pytest.mark.parametrize(
    ("check", "said"), [("if loss != loss: break", "ends its training"), (SKIPS, "out by itself")]
)
def test_a_script_that_ends_there_is_told_from_one_that_goes_on(tmp_path, check, said):
    source = SCRIPT.format(check=check)
    _, news = investigated(tmp_path / "script.py", source, on_failure="repair", BAD=True)
    report = next(one for one in news if isinstance(one, Report))
    assert said in report.audit[0].action.reason


IN_A_LIBRARY = """
import sys, torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        out = torch.sqrt(self.layer(x).square().mean(1) - SHIFT)
        torch.testing.assert_close(out + 0.0, out + OFF)
        return out

net = Net()
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
try:
    for step in range(3):
        loss = net(torch.ones(2, 4) * (step + 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
except AssertionError:
    sys.excepthook(*sys.exc_info())
"""


@pytest.mark.parametrize(("shift", "off", "steps"), [(1e3, 0.0, [0]), (0.0, 1.0, [])])
def test_what_a_library_raises_in_a_model_is_told_where_the_script_ends(
    tmp_path, shift, off, steps
):
    session = ReplayingSession()
    run_script(tmp_path / "script.py", IN_A_LIBRARY, session, SHIFT=shift, OFF=off)
    assert session.steps == steps
