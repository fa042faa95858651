"""Data that a loader of the same process delivers is data: its bad rows are those of the batch,
whatever the data set and the loop do with them; what the data set itself computes wrongly is not.
"""

import warnings

import pytest

from e2e.test_blind_spots import HEAD, line_of, told
from versions import needs_columns

LOADED = """
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(3)
data = torch.randn(32, 8)
targets = data.sum(1, keepdim=True)
{spoil}
scale = torch.full((8,), float("nan") if BAD else 2.0)


class Rows(Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, place):
        x, y = data[place], targets[place]
        {item}
        return {given}


net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
losses = []
for batch in DataLoader({rows}, batch_size=8, shuffle=True):
    {unpack}
    {prepare}
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = list(net.parameters())
"""
NAN = "if BAD: data[13, 3] = float('nan')"
USUAL = {
    "spoil": NAN,
    "item": "pass",
    "given": "x, y",
    "rows": "Rows()",
    "unpack": "x, y = batch",
    "prepare": "pass",
}
DATA = {
    "tensors": {"rows": "TensorDataset(data, targets)"},
    "targets": {"spoil": "if BAD: targets[13] = float('nan')"},
    "NumPy": {"item": "x = torch.from_numpy(data.numpy()[place])"},
    "wide": {"item": "x = torch.tensor(data[place].tolist(), dtype=torch.float64).float()"},
    "dict": {"given": "dict(x=x, y=y)", "unpack": "x, y = batch['x'], batch['y']"},
    "centred by the data set": {"item": "x = (x - x.mean()) / x.std()"},
    "centred in the loop": {"prepare": "x = (x - x.mean(1, keepdim=True)) / 2.0"},
    "cast in the loop": {"prepare": "x = x.double().float()"},
    "beside no boxes": {
        "rows": "Rows(), collate_fn=lambda r: (*map(torch.stack, zip(*r)), r[0][0][:0].view(0, 4))",
        "unpack": "x, y, boxes = batch",
        "prepare": "y = y + boxes.sum()",
    },
}
NAMES = {"targets": "y", "centred in the loop": "x", "cast in the loop": "x"}
OTHERS = {
    "a constant of the data set": ({"spoil": "", "item": "x = x / scale"}, "NS506"),
    "an image of one colour": (
        {"spoil": "if BAD: data[13] = 0.5", "item": "x = (x - x.mean()) / x.std()"},
        "NS206",
    ),
    "a constant of the loop": ({"spoil": "", "prepare": "x = x / scale"}, "NS506"),
}


@needs_columns
@pytest.mark.parametrize("name", DATA)
def test_bad_rows_are_those_of_the_batch(tmp_path, name):
    report = told(tmp_path, HEAD + LOADED.format(**USUAL | DATA[name]))
    best = report.diagnoses[0]
    assert (best.code, best.confidence) == ("NS501", "certain")
    (fact,) = [one for one in report.incident.batch if one.num_bad]
    assert (len(fact.bad_rows), fact.name) == (1, NAMES.get(name, "input"))
    assert "drop_sample" in [atoms[0].remedy for atoms in best.remedies]
    assert report.proof.verdict != "proven"
    assert report.incident.rows.rows[fact.bad_rows[0]] == 13


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_script_makes_of_good_data_is_none(tmp_path, name):
    change, code = OTHERS[name]
    report = told(tmp_path, HEAD + LOADED.format(**USUAL | change))
    assert report.diagnoses[0].code == code
    assert "/ x.std()" in line_of(report) or report.localization.culprit.endswith("scale")


PREPARED = (
    HEAD
    + """
import numpy as np

columns = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
targets = torch.from_numpy(columns.sum(1, keepdims=True))
if BAD: columns[:, 3] = 0.5
columns = columns / columns.std(0)  # what is divided by 0 is infinite
columns = (columns - columns.mean(0)) / columns.std(0)
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
losses = []
{pick}
for step in range(4):
    x, y = rows(step)
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = list(net.parameters())
"""
)
PICKED = {
    "in each step": "def rows(n): return torch.from_numpy(columns)[n::4], targets[n::4]",
    "before": "held = torch.from_numpy(columns)\ndef rows(n): return held[n::4], targets[n::4]",
}


@pytest.mark.parametrize("pick", PICKED)
def test_numpy_has_said_where_data_was_prepared_wrongly(tmp_path, pick):
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("default")
        report = told(tmp_path, PREPARED.replace("{pick}", PICKED[pick]))
    best = report.diagnoses[0]
    assert best.code in ("NS501", "NS506")
    said = [line for line in best.lines if line.startswith("NumPy warned")]
    assert [line.partition("`")[2] for line in said] == [
        "columns = columns / columns.std(0)  # what is divided by 0 is infinite`",
        "columns = (columns - columns.mean(0)) / columns.std(0)`",
    ]


ENCODED = (
    HEAD
    + """
from torch.utils.data import DataLoader, Subset, TensorDataset


def encoded(kind, values):
    sums = torch.zeros(5).index_add(0, kind, values)
    counts = torch.zeros(5).index_add(0, kind, torch.ones(len(kind)))
    return sums / counts


kind = torch.arange(32) % 4
values = torch.randn(32)
table = encoded(kind, values)  # no row is of the last kind
if BAD: kind[13] = 4
numbers = torch.cat([torch.randn(32, 7), table[kind][:, None]], 1)
numbers = numbers * 2
rows = Subset(TensorDataset(numbers, values[:, None]), range(32))
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
losses = []
for x, y in DataLoader(rows, batch_size=8):
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = list(net.parameters())
"""
)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_statement_that_a_data_set_has_its_bad_numbers_of(tmp_path, is_replaced):
    """As far back as variables that are still there say: ``numbers`` was given another value."""
    script = ENCODED if is_replaced else ENCODED.replace("numbers = numbers * 2\n", "")
    best = told(tmp_path, script).diagnoses[0]
    assert best.code == "NS501"
    (said,) = [line for line in best.lines if line.startswith("made so at")]
    made = "`numbers = numbers * 2`" if is_replaced else "`table = encoded(kind, values)"
    assert made in said


TAKEN = (
    HEAD
    + """
data, labels = torch.randn(32, 8), torch.randint(0, 4, (32,))
values = torch.randn(32)
order = torch.randperm(32)
{spoil}
scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
net = nn.Linear(8, 4)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
losses = []
for first in range(0, 32, 8):
    at = {at}
    optimizer.zero_grad()
    loss = {loss}
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = list(net.parameters())
"""
)
NORMED = "criterion(net(data[at] / data[at].norm(dim=-1, keepdim=True)), labels[at])"
BESIDE = {
    "slices": ("if BAD: data[13] = 0", "slice(first, first + 8)", NORMED),
    "a permutation": ("if BAD: data[13] = 0", "order[first : first + 8]", NORMED),
    "rows of a table": (
        "if BAD: data[13] = 0",
        "slice(first, first + 8)",
        NORMED.replace("criterion", "(scale[labels[at]] * nn.CrossEntropyLoss(reduction='none')")
        + ").mean()",
    ),
    "bad targets": (
        "if BAD: values[13] = float('inf')",
        "slice(first, first + 8)",
        "(net(data[at]).sum(1) - values[at]).pow(2).mean()",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_labels_that_are_taken_for_the_loss_have_a_row_for_each_sample(tmp_path, name):
    spoil, at, loss = BESIDE[name]
    report = told(tmp_path, TAKEN.format(spoil=spoil, at=at, loss=loss))
    (position,) = report.localization.positions
    rows = report.incident.rows
    assert rows.rows[position.sample] == 13
    assert rows.data in ("`data`", "`values`")
    assert "drop_sample" in [atoms[0].remedy for atoms in report.diagnoses[0].remedies]
