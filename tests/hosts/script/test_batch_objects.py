"""Batches that are objects of a class of their own, as graphs are."""

import torch

from loop_scripts import investigated, run_script, same
from nanstop.numerics.nested import held_by
from nanstop.records import Report

SCRIPT = """
import torch
from torch import nn

class Graphs:
    def __init__(self, **given):
        self._store = given
        self._slices = {"x": torch.arange(3)}

    def __getattr__(self, name):
        return self.__dict__["_store"][name]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, graphs):
        sums = torch.zeros(3, 8).index_add(0, graphs.batch, self.layer(graphs.x).relu())
        return self.head(sums)

torch.manual_seed(0)
model = Net()
PARAMETERS = list(model.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def given(step):
    x = torch.randn(7, 4)
    if BAD and step == 3:
        x[5, 1] = float("nan")
    return Graphs(x=x, batch=torch.tensor([0, 0, 1, 1, 1, 2, 2]), y=torch.randint(0, 2, (3,)))

for step in range(6):
    graphs = given(step)
    loss = nn.functional.cross_entropy(model(graphs), graphs.y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_a_batch_of_its_own_class_holds_is_the_batch(tmp_path):
    _, news = investigated(tmp_path / "bad.py", SCRIPT, BAD=True)
    (report,) = [one for one in news if isinstance(one, Report)]
    best = report.diagnoses[0]
    assert best.code == "NS501"
    assert "`graphs.x`" in best.title
    assert report.localization.culprit == "batch[graphs.x]"
    (bad,) = [fact for fact in report.incident.batch if fact.num_bad]
    assert (bad.name, bad.shape, bad.bad_rows) == ("graphs.x", (7, 4), (5,))


def test_without_the_fault_nothing_is_told_and_nothing_changes(tmp_path):
    plain = run_script(tmp_path / "plain.py", SCRIPT, BAD=False)
    watched, news = investigated(tmp_path / "watched.py", SCRIPT, BAD=False)
    assert not [one for one in news if isinstance(one, Report)]
    assert same(plain["PARAMETERS"], watched["PARAMETERS"])


def test_names_are_those_of_a_script_and_circles_end():
    class Holder:
        pass

    one = Holder()
    one.x, one._own, one.itself = torch.zeros(1), {"y": torch.zeros(2)}, one
    found = {name: tensor.shape[0] for name, tensor in held_by("b", one, torch.Tensor)}
    assert found == {"b.x": 1, "b.y": 2}
