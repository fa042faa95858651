"""Which variable a line reads that holds what an earlier pass of a loop has come to."""

import pytest
import torch

from loop_scripts import investigated
from nanstop.localize.carried import carried_into
from nanstop.records import SourceLine
from nanstop.store.incidents import load_report

NAN = torch.tensor(torch.nan)
CARRIED = {
    "of a loop": (
        """
for x in data:
    mean = 0.9 * mean + x  # read
    fail()
""",
        "mean",
        3,
    ),
    "in place of itself": (
        """
while True:
    mean = mean + x  # read
    fail()
""",
        "mean",
        3,
    ),
    "given later": (
        """
for x in data:
    loss = x / (mean + 1.0)  # read
    if len(data):
        mean = loss.detach()
    fail()
""",
        "mean",
        5,
    ),
    "of the outer loop": (
        """
for epoch in range(3):
    for x in data:
        loss = x / mean  # read
    mean = loss.detach()
    fail()
""",
        "mean",
        5,
    ),
    "an attribute": (
        """
class Running:
    def __init__(self):
        self.mean = mean

    def take(self, x):
        self.mean = 0.9 * self.mean + x  # read
        return self.mean

running = Running()
running.take(x)
fail()
""",
        "running.mean",
        7,
    ),
    "global": (
        """
def take(x):
    global mean
    out = mean * x  # read
    mean = out.detach()
    fail()

take(x)
""",
        "mean",
        5,
    ),
    "an entry": (
        """
means = [mean]
for x in data:
    loss = x - means[0]  # read
    means[0] = loss.detach()
    fail()
""",
        "means[0]",
        5,
    ),
    "over lines": (
        """
for x in data:
    mean = (
        0.9 * mean  # read
        + x
    )
    fail()
""",
        "mean",
        3,
    ),
}
NOT_CARRIED = {
    "given before": """
for x in data:
    mean = x.mean()
    loss = x / mean  # read
    mean = loss * torch.nan
    fail()
""",
    "an argument": """
def take(x, mean):
    mean = 0.9 * mean + x  # read
    fail()

take(x, mean)
""",
    "of the same name elsewhere": """
def take(x):
    mean = x
    for _ in range(2):
        mean = 0.9 * mean + x  # read
    return mean

take(x)
fail()
""",
    "in a function of the loop": """
for x in data:
    def later():
        mean = 1
    loss = x / mean  # read
    fail()
""",
    "two of them": """
spread = mean
for x in data:
    loss = (x - mean) / spread  # read
    mean, spread = loss, loss
    fail()
""",
    "the batch that was fetched before": """
for x in data:
    loss = mean.sum()  # read
    mean = x
    fail()
""",
    "no loop": """
loss = mean / 2  # read
fail()
""",
}


class Failed(Exception):
    """Where a step fails."""


def found_in(folder, text):
    file = folder / "script.py"
    file.write_text(text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "# read" in row)
    found = []

    def fail():
        found.append(carried_into(SourceLine(file=str(file), line=line, function="f", text="")))
        raise Failed

    variables = {"data": [torch.tensor(1.0)], "x": torch.tensor(1.0), "mean": NAN, "fail": fail}
    with pytest.raises(Failed):
        exec(compile(text, str(file), "exec"), variables | {"torch": torch})
    return found[0]


@pytest.mark.parametrize("name", CARRIED)
def test_carried(tmp_path, name):
    text, variable, line = CARRIED[name]
    found = found_in(tmp_path, text)
    assert (found.name, found.line.line, found.before) == (variable, line, True)


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_not_carried(tmp_path, name):
    assert found_in(tmp_path, NOT_CARRIED[name]) is None


def test_a_line_without_source():
    assert carried_into(None) is None
    assert carried_into(SourceLine(file="<string>", line=1, function="f", text="")) is None


EARLIER_POLICY = """
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Linear(4, 3)
optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
for rollout in range(2):
    states, legal = torch.randn(8, 4), torch.rand(8, 3) > 0.5
    legal[:, 0] = True
    with torch.no_grad():
        old = policy(states).masked_fill(~legal, -torch.inf).log_softmax(-1)
    for epoch in range(2):
        new = policy(states).masked_fill(~legal, -torch.inf).log_softmax(-1)
        loss = (old.exp() * (old - new)).sum(-1).mean() if epoch else -new[:, 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_what_an_earlier_window_computed_is_told_with_its_line(tmp_path):
    investigated(tmp_path / "script.py", EARLIER_POLICY, on_failure="repair")
    reports = [load_report(file) for file in (tmp_path / "script").glob("0*/report.json")]
    told = [one.diagnoses[0] for one in reports if one.diagnoses[0].code == "NS501"]
    line = "script.py:12: `old = policy(states).masked_fill(~legal, -torch.inf).log_softmax(-1)`"
    assert told
    assert all(any(line in said for said in one.lines) for one in told)
