"""Variables that are not finite before the first step: the statements that gave them their values
are run again, and the line that makes them so is named, and mended where it is known how.
"""

import warnings

import pytest

from e2e.test_blind_spots import HEAD, told

HELD = (
    HEAD
    + """
import numpy as np
from statistics import mean

calls = []


def standardised(rows):
    return (rows - rows.mean(0)) / rows.std(0)


def noted(rows):
    calls.append(rows)
    return rows


table = np.random.default_rng(0).normal(size=(32, 8))
labels = torch.arange(32) % (3 if BAD else 4)
{prepare}
net = nn.Linear(8, 4)
loss_of = nn.CrossEntropyLoss({weight})
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
losses = []
for first in range(0, 32, 8):
    {step}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = list(net.parameters())
"""
)
CONSTANT = "if BAD: table[:, 3] = 7.0\n"
OF_DATA = "loss = loss_of(net(data[first : first + 8]), labels[first : first + 8])"
OF_ROWS = "x = data[first : first + 8]\n    loss = loss_of(net(x), labels[first : first + 8])"
BY_ARRAY = "where(deviation == 0, 1, deviation)"
MENDED = {
    "NumPy": (
        CONSTANT
        + "deviation = table.std(0)\n"
        + "data = torch.tensor((table - table.mean(0)) / deviation).float()",
        OF_DATA,
        BY_ARRAY,
    ),
    "overwritten": (
        CONSTANT
        + "data = torch.from_numpy(table).float()\n"
        + "data = (data - data.mean(0)) / data.std(0)",
        OF_ROWS,
        "divisor.masked_fill(divisor == 0, 1)",
    ),
    "a function's line": (
        CONSTANT + "data = standardised(torch.from_numpy(table).float())",
        OF_DATA,
        "divisor.masked_fill(divisor == 0, 1)",
    ),
}


def report_of(folder, prepare, step, weight=""):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return told(folder, HELD.format(prepare=prepare, step=step, weight=weight))


@pytest.mark.parametrize("name", MENDED)
def test_the_line_is_mended_and_its_code_was_run(tmp_path, name):
    prepare, step, code = MENDED[name]
    report = report_of(tmp_path, prepare, step)
    best = report.diagnoses[0]
    assert best.code in ("NS501", "NS506")
    assert best.at_source is not None
    (said,) = [line for line in best.lines if line.startswith("made so at")]
    assert "/" in said
    change = nanstop_change(report)
    assert code in change.files[0].after


def nanstop_change(report):
    from nanstop.rewrite.change import change_for
    from nanstop.rewrite.files import read

    return change_for(report, read)


def test_the_first_line_that_makes_it_so_is_named(tmp_path):
    prepare = (
        "counts = torch.bincount(labels, minlength=4).float()\n"
        "weights = counts.sum() / counts\n"
        "weights = weights / weights.sum()\n"
        "data = torch.from_numpy(table).float()"
    )
    best = report_of(tmp_path, prepare, OF_DATA, "weight=weights").diagnoses[0]
    assert best.code == "NS506"
    (said,) = [line for line in best.lines if line.startswith("made so at")]
    assert "`weights = counts.sum() / counts`" in said
    assert best.at_source is None  # what a class without samples weighs nobody knows


UNKNOWN = {
    "a missing value": (
        "if BAD: table[5, 3] = float('nan')\ndata = torch.tensor(table / table.std(0)).float()"
    ),
    "a call that leaves something": CONSTANT
    + "data = noted(torch.from_numpy(table).float())\ndata = data / data.std(0)",
    "changed since": CONSTANT
    + "data = torch.from_numpy(table).float()\n"
    + "data = (data - data.mean(0)) / data.std(0)\ndata[0, 0] = 5.0",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_said_of_what_is_not_made_again_alike(tmp_path, name):
    best = report_of(tmp_path, UNKNOWN[name], OF_DATA).diagnoses[0]
    assert best.code in ("NS501", "NS506")
    assert best.at_source is None
    assert not [line for line in best.lines if line.startswith("made so at")]
