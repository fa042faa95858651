"""Weights that something writes to between two updates: no update is blamed for them."""

import pytest
import torch
from torch import nn

import nanstop
from nanstop.errors import TrainingStopped

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
