"""Several optimizers of one model, as Muon for its matrices and AdamW for the rest."""

import pytest
import torch

from loop_scripts import run_script, same, weights
from nanstop.decide.policy import Policy
from nanstop.errors import TrainingStopped
from nanstop.hosts.script import autowatch
from nanstop.session.factory import opener
from nanstop.store.incidents import Store, load_report

torch.set_num_threads(1)

LOOP = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
matrices = torch.optim.SGD(net[1].parameters(), lr=0.05, momentum=0.9)
others = torch.optim.AdamW([*net[0].parameters(), *net[3].parameters()], lr=1e-2, eps=EPS)
optimizers = [matrices, others]
schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=SCALED)
for step in range(8):
    if step < 2:
        ids = torch.randint(0, 32, (128,))  # each row has a gradient in the first
    else:
        ids = torch.randint(0, 8, (16,))
    if step == 0:
        ids = torch.arange(32)
    loss = net(ids).square().mean()
    if step in BAD:
        loss = loss + (net[3].bias * 0).sum().sqrt()
    scaler.scale(loss).backward()
    if CLIPS:
        for one in optimizers:
            scaler.unscale_(one)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for one in optimizers[:: ORDER if step % 3 else 1]:
        scaler.step(one)
    scaler.update()
    for one in (*schedules,):
        one.step()
    net.zero_grad()
"""
KINDS = [
    {"CLIPS": False, "SCALED": False, "ORDER": 1},
    {"CLIPS": True, "SCALED": False, "ORDER": -1},
    {"CLIPS": False, "SCALED": True, "ORDER": -1},
    {"CLIPS": True, "SCALED": True, "ORDER": 1},
]


def reported(folder, source, given, **policy):
    """The variables of a script that was watched, and its reports."""
    store = Store(folder / "incidents", None)
    opening = opener(Policy(**policy), store, lambda _: None, opened=autowatch.opened)
    ending = run_script(folder / "script.py", source, opening, **given)
    return ending, list(store.reports.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_updates_since_one_that_broke_weights_are_made_again_by_both(kind, tmp_path):
    """AdamW's eps of 0 breaks rows of the table that no batch has come to."""
    given = kind | {"BAD": (), "EPS": 1e-8}
    healthy = run_script(tmp_path / "plain.py", LOOP.replace("torch.arange(32)", "ids"), **given)
    source = LOOP.replace("torch.arange(32)", "ids")
    ending, (report,) = reported(tmp_path, source, given | {"EPS": 0.0}, allow=("optimizer_eps",))
    assert (report.diagnoses[0].code, report.localization.key.phase) == ("NS402", "optimizer")
    assert [atom.remedy for atom in report.proof.minimal] == ["optimizer_eps"]
    assert report.proof.verdict == "proven"
    assert report.audit[-1].action.kind == "rollback"
    assert same(weights(ending), weights(healthy))
    rates = [[one.param_groups[0]["lr"] for one in run["optimizers"]] for run in (ending, healthy)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_gradients_that_are_bad_for_one_of_them_leave_out_both_updates(kind, tmp_path):
    given = kind | {"EPS": 1e-8}
    skips = LOOP.replace(
        "    scaler.scale(loss).backward()",
        """
    if step in BAD:
        for one in schedules:
            one.step()
        continue
    scaler.scale(loss).backward()""",
    )
    without = run_script(tmp_path / "plain.py", skips, BAD=(5,), **given)
    ending, (report,) = reported(tmp_path, LOOP, given | {"BAD": (5,)})
    assert report.diagnoses[0].code == "NS304"
    assert report.audit[-1].action.kind == "skip"
    assert same(weights(ending), weights(without))


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_is_bitwise_the_same(kind, tmp_path):
    given = kind | {"BAD": (), "EPS": 1e-8}
    ending, reports = reported(tmp_path, LOOP, given)
    assert not reports
    assert same(weights(ending), weights(run_script(tmp_path / "plain.py", LOOP, **given)))


TURNS = """
import torch
from torch import nn

class Divides(torch.optim.SGD):
    num = 0
    def step(self, closure=None):
        super().step(closure)
        self.num += 1
        if self.num == 6:
            with torch.no_grad():
                self.param_groups[0]["params"][0].div_(0.0)

torch.manual_seed(0)
net, critic = nn.Linear(4, 8), nn.Linear(8, 1)
first = torch.optim.Adam(net.parameters(), lr=1e-3)
second = Divides(critic.parameters(), lr=1e-2)
for step in range(8):
    made = net(torch.randn(16, 4))
    second.zero_grad()
    (critic(made.detach()) - critic(torch.randn(16, 8))).mean().backward()
    second.step()
    first.zero_grad()
    (-critic(made)).mean().backward()
    first.step()
"""


def test_of_optimizers_that_take_turns_over_two_models_it_is_found_as_well(tmp_path):
    with pytest.raises(TrainingStopped):
        reported(tmp_path, TURNS, {})
    report = load_report(tmp_path / "incidents" / "0000" / "report.json")
    assert report.incident.bad_params
    first_bad = report.localization.first_bad
    assert first_bad.source.text.strip() == 'self.param_groups[0]["params"][0].div_(0.0)'


EVERY_SECOND = """
import torch
from torch import nn

torch.manual_seed(0)
encoder, net = nn.Linear(4, 8), nn.Linear(8, 2)
often = torch.optim.Adam(net.parameters(), lr=1e-2)
seldom = torch.optim.Adam(encoder.parameters(), lr=1e-2)
for step in range(8):
    x = torch.randn(16, 4)
    if step == 4:
        BAD
    often.zero_grad()
    net(encoder(x)).square().mean().backward()
    often.step()
    if step % 2:
        seldom.step()
        seldom.zero_grad()
"""


def test_what_a_window_that_is_left_out_has_given_an_optimizer_to_come_is_no_failure_of_the_next(
    tmp_path,
):
    ending, (report,) = reported(tmp_path, EVERY_SECOND.replace("BAD", "x[1, 2] = torch.inf"), {})
    assert report.diagnoses[0].code == "NS501"
    without = run_script(tmp_path / "plain.py", EVERY_SECOND.replace("BAD", "continue"))
    for name in ("encoder", "net"):
        pairs = zip(ending[name].parameters(), without[name].parameters(), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)


IN_TURN = """
import torch
from torch import nn

torch.manual_seed(0)
encoder, net, other = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)
first = torch.optim.Adam([*encoder.parameters(), *other.parameters()], lr=1e-2)
second = torch.optim.Adam(net.parameters(), lr=1e-2)


def both(x):
    first.zero_grad()
    second.zero_grad()
    (net(encoder(x)).square() + other(encoder(x)).square()).mean().backward()
    first.step()
    second.step()


def in_turn(x):
    for optimizer, head in ((second, net), (first, other)):
        encoder.zero_grad()
        optimizer.zero_grad()
        head(encoder(x)).square().mean().backward()
        optimizer.step()


for step in range(8):
    x = torch.randn(16, 4)
    if step == 5:
        BAD
    both(x) if step < 3 else in_turn(x)
"""


def test_what_an_update_that_is_left_out_has_left_is_no_failure_of_one_beside_it(tmp_path):
    ending, (report,) = reported(tmp_path, IN_TURN.replace("BAD", "x[1, 2] = torch.inf"), {})
    assert (report.diagnoses[0].code, report.count) == ("NS501", 2)  # of each one's window
    without = run_script(tmp_path / "plain.py", IN_TURN.replace("BAD", "continue"))
    for name in ("encoder", "net", "other"):
        pairs = zip(ending[name].parameters(), without[name].parameters(), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)
