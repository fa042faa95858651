"""Weights that something writes to between two updates: no update is blamed for them."""

from contextlib import suppress

import pytest
import torch
from torch import nn

import nanstop
from loop_scripts import investigated
from nanstop.errors import TrainingStopped
from nanstop.records import Report
from nanstop.report.text.run_end import RunEnd
from nanstop.store.incidents import load_report

torch.set_num_threads(1)


def run(folder, *, breaks_at, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    watch = nanstop.watch(model, optimizer(model.parameters(), lr=1e-2), out=folder)
    with pytest.raises(TrainingStopped), watch:
        train(model, watch, breaks_at)
    (report,) = watch.incidents
    return report


def train(model, watch, breaks_at):
    for step in range(8):
        watch.step(lambda b: model(b["x"]).square().mean(), {"x": torch.randn(3, 4)})
        watch.update(clip=None)
        if step == breaks_at:
            with torch.no_grad():
                model[0].weight.div_(torch.zeros(()))


def test_an_average_of_nothing_is_no_update(tmp_path):
    report = run(tmp_path, breaks_at=4)
    found = report.diagnoses[0]
    assert (found.code, found.confidence) == ("NS401", "likely")
    assert "made again, the updates up to step 4 leave them finite" in found.cause
    assert report.incident.remade_finite == 4
    assert report.audit[-1].action.kind == "stop"


UNREAD = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=0.0)
for step in range(6):
    ids = torch.arange(8)
    optimizer.zero_grad()
    net(ids).square().mean().backward()
    optimizer.step()
"""


def test_what_no_batch_reads_again_is_found_once_training_is_over(tmp_path):
    """In the update that broke it, and not the last one."""
    _, news = investigated(tmp_path / "script.py", UNREAD)
    report = next(one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code == "NS402"
    assert (report.incident.at.step, report.localization.key.phase) == (0, "optimizer")
    assert [atom.remedy for atom in report.proof.minimal] == ["optimizer_eps"]
    assert report.proof.verdict == "proven"
    (ended,) = [one for one in news if isinstance(one, RunEnd)]
    assert list(ended.steps.values()) == [6]


class CountsInGroups(torch.optim.SGD):
    """Divides by what is 0 at its fifth step."""

    def num_steps(self):
        group = self.param_groups[0]
        group["num"] = group.get("num", 0) + 1
        return group["num"]

    def step(self, closure=None):
        super().step(closure)
        is_fifth = self.num_steps() == 5
        with torch.no_grad():
            self.param_groups[0]["params"][0].div_(torch.tensor(float(not is_fifth)))


class CountsByItself(CountsInGroups):
    num = 0

    def num_steps(self):
        self.num += 1
        return self.num


@pytest.mark.parametrize("optimizer", [CountsInGroups, CountsByItself])
def test_an_update_that_breaks_them_is_found_when_it_is_made_again(optimizer, tmp_path):
    report = run(tmp_path, breaks_at=None, optimizer=optimizer)
    assert report.diagnoses[0].code == "NS402"
    assert report.incident.remade_finite is None


TAKING_TURNS = """
import torch
from torch import nn


class Orthogonal(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm(), alpha=0.1)


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, chosen):
        return sum(expert(x) * (n == chosen) for n, expert in enumerate(self.experts))


torch.manual_seed(0)
model = Chosen()
matrices = [p for p in model.parameters() if p.dim() == 2]
apart = nn.Parameter(torch.ones(1))
first = MAKE(matrices)
second = torch.optim.AdamW(SECOND, lr=1e-3)
for step in range(6):
    loss = model(torch.randn(8, 4), step % 2).square().mean()
    first.zero_grad()
    second.zero_grad()
    loss.backward()
    first.step()
    if second.param_groups[0]["params"][0] is apart:
        apart.square().sum().backward()
    second.step()
    if step == WRITES_AT:
        with torch.no_grad():
            matrices[0].div_(torch.zeros(()))
"""


VECTORS = "[p for p in model.parameters() if p.dim() == 1]"


def taking_turns(folder, make, writes_at, second="[apart]"):
    program = TAKING_TURNS.replace("MAKE", make).replace("WRITES_AT", str(writes_at))
    program = program.replace("SECOND", second)
    with suppress(TrainingStopped):
        investigated(folder / "script.py", program, on_failure="repair")
    (saved,) = sorted((folder / "script").glob("0*/report.json"))
    return load_report(saved)


def test_of_optimizers_that_take_turns_the_next_update_tells(tmp_path):
    report = taking_turns(tmp_path, "Orthogonal", -1)
    assert report.incident.put_right == ("experts.1.weight", "experts.2.weight")
    assert report.diagnoses[0].code == "NS402"
    source = report.localization.first_bad.source
    assert source.text == "p.sub_(p.grad / p.grad.norm(), alpha=0.1)"
    assert report.proof.verdict == "proven"
    assert report.audit[-1].action.kind == "stop"


def test_of_two_optimizers_of_one_model_the_update_that_breaks_them_is_found(tmp_path):
    report = taking_turns(tmp_path, "Orthogonal", -1, VECTORS)
    assert report.incident.put_right == ()
    assert (report.localization.key.phase, report.diagnoses[0].code) == ("optimizer", "NS402")
    source = report.localization.first_bad.source
    assert source.text == "p.sub_(p.grad / p.grad.norm(), alpha=0.1)"
    assert report.proof.verdict == "proven"


def test_what_else_breaks_weights_is_not_told_of_the_next_update(tmp_path):
    report = taking_turns(tmp_path, "(lambda p: torch.optim.SGD(p, lr=1e-3))", 3)
    assert report.incident.put_right == ()
    assert report.localization.key.phase == "forward"
