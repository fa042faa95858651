"""Loops that take the rows of a batch by an index, and prepare them before a model is called."""

import pytest
import torch

from loop_scripts import run_script, same, weights
from nanstop.decide.policy import Policy
from nanstop.session.factory import opener
from nanstop.store.incidents import Store

torch.set_num_threads(1)

LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = torch.rand(64, 6) + 0.1
targets = data.sum(1, keepdim=True)
if BAD:
    data[37] = 0.0
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
order = torch.randperm(64)
loader = DataLoader(TensorDataset(data, targets), batch_size=8)
BATCHES
    PREPARED
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
BY_SLICE = """
for start in range(0, 64, 8):
    rows, wanted = data[start : start + 8], targets[start : start + 8]
"""
BY_ORDER = """
for start in range(0, 64, 8):
    index = order[start : start + 8]
    rows, wanted = data[index], targets.index_select(0, index)
"""
BY_LOADER = """
for rows, wanted in loader:
"""
INLINE = """
for start in range(0, 64, 8):
    prepared = data[start : start + 8] / data[start : start + 8].norm(dim=1, keepdim=True)
    wanted = targets[start : start + 8]
"""
NORMED = "rows = rows / rows.norm(dim=1, keepdim=True); loss = (net(rows) - wanted).square().mean()"
LATE = "loss = (net(prepared) - targets[start : start + 8]).square().mean()"


CASES = [
    (BY_SLICE, NORMED, "`data`", "rows"),
    (BY_ORDER, NORMED, "`data`", "rows"),
    (BY_LOADER, NORMED, "the data set", "rows"),
    (INLINE, LATE, "`data`", "data"),
]


def watched(folder, batches, prepared, *, bad):
    said = []
    store = Store(folder / "out")
    store.reset()
    source = LOOP.replace("BATCHES", batches.strip()).replace("PREPARED", prepared)
    session = opener(Policy(on_failure="skip"), store, said.append)
    ending = run_script(folder / "script.py", source.replace("BAD", str(bad)), session)
    return ending, [one for one in said if hasattr(one, "incident")]


@pytest.mark.parametrize(("batches", "prepared", "data", "entry"), CASES)
def test_the_sample_and_its_row_are_known(tmp_path, batches, prepared, data, entry):
    """What fails is what the script makes of a batch before it calls its model."""
    _, (report,) = watched(tmp_path, batches, prepared, bad=True)
    assert report.diagnoses[0].code == "NS206"
    incident, rows = report.incident, report.incident.rows
    assert [one.sample for one in report.localization.positions] == [rows.rows.index(37)]
    assert (rows.data, len(rows.rows)) == (data, 8)
    assert entry in {fact.name for fact in incident.batch}


@pytest.mark.parametrize(("batches", "prepared", "data", "entry"), CASES)
def test_a_healthy_run_is_the_plain_one(tmp_path, batches, prepared, data, entry):
    del data, entry
    source = LOOP.replace("BATCHES", batches.strip()).replace("PREPARED", prepared)
    plain = run_script(tmp_path / "plain.py", source.replace("BAD", "False"))
    seen, reports = watched(tmp_path, batches, prepared, bad=False)
    assert same(weights(plain, "net"), weights(seen, "net"))
    assert reports == []
