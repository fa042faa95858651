"""What a loop does beside its steps: an operation of a rollout that refuses a number ends the
script, and is looked at where it stands; one of a loss that the script tries again does not count.
"""

import pytest

from e2e.scripts import run
from loop_scripts import assert_left_alone, investigated, run_script
from nanstop.records import Report
from nanstop.report.text.run_end import RunEnd

ROLLOUTS = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 4)
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
PARAMETERS = list(net.parameters())
ONES = torch.ones(6, 1)


def act(step, scores):
    DRAW


def train():
    for step in range(5):
        with torch.no_grad():
            action = act(step, net(torch.randn(6, 3)))
        loss = (net(torch.randn(6, 3)).sum(-1) - action.sum()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


try:
    train()
except CAUGHT:
    pass
except Exception:
    sys.excepthook(*sys.exc_info())  # what the interpreter does where nobody catches it
"""
LAST = 3
REFUSED = {
    "a temperature of 0": (
        "return torch.multinomial((scores / max(3.0 - step, 0.0 if BAD else 0.5)).softmax(-1), 1)",
        "div",
    ),
    "a deviation below 0": (
        "return torch.normal(scores[:, :1], ONES if not BAD or step < 3 else scores[:, 1:2] - 9.0)",
        "normal",
    ),
}


def source(drawn, caught="()"):
    return ROLLOUTS.replace("DRAW", drawn).replace("CAUGHT", caught)


@pytest.mark.parametrize("refused", REFUSED)
def test_what_a_rollout_refuses_is_an_incident_of_its_own_line(refused, tmp_path):
    drawn, op = REFUSED[refused]
    plain = run_script(tmp_path / "plain.py", source(drawn), BAD=False)
    healthy, news = investigated(tmp_path / "healthy.py", source(drawn), BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)
    assert all(map(lambda a, b: bool((a == b).all()), healthy["PARAMETERS"], plain["PARAMETERS"]))
    _, news = investigated(tmp_path / "bad.py", source(drawn), BAD=True)
    report, end = news[0], news[-1]
    event = report.localization.first_bad
    assert (report.diagnoses[0].code, event.name, event.phase) == ("NS204", op, "generate")
    assert (report.incident.at.step, not end.lost) == (LAST, True)


# Whatever was compiled before in this process has switched the check of distributions off.
POLICY = """
def act(step, scores):
    return torch.distributions.Normal(scores[:, :1], 1.0).sample()


def train():
    for step in range(5):
        seen = torch.randn(6, 3)
        bad = BAD and step == 3
        SPOILT
        SCOPE:
            mean = net(seen)[:, :2]
            mean = SCALED
            policy = torch.distributions.Normal(mean, 1.0, validate_args=True)
            action = policy.sample()
        again = torch.distributions.Normal(net(seen)[:, :2], 1.0, validate_args=True)
        loss = -again.log_prob(action).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
NAN = "float('nan') if bad else 1.0"
NO_NUMBERS = {
    "of the data": (f"seen[2, 1] *= {NAN}", "mean", "NS501"),
    "of a formula": ("", "mean + torch.sqrt(0.0 * mean - (3.0 if bad else 0.0))", "NS204"),
    "of the weights": (f"net.bias.data[0] *= {NAN}", "mean", "NS401"),
}


@pytest.mark.parametrize("of", NO_NUMBERS)
@pytest.mark.parametrize("scope", ["with torch.no_grad()", "if True"])
def test_a_distribution_that_refuses_what_is_no_number(of, scope, tmp_path):
    spoilt, scaled, code = NO_NUMBERS[of]
    told = POLICY.replace("SPOILT", spoilt).replace("SCOPE", scope).replace("SCALED", scaled)
    written = source("return scores[:, :1]")
    written = written[: written.index("def act")] + told + written[written.index("\n\ntry:") :]
    plain = run_script(tmp_path / "plain.py", written, BAD=False)
    healthy, news = investigated(tmp_path / "healthy.py", written, BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)
    assert all(map(lambda a, b: bool((a == b).all()), healthy["PARAMETERS"], plain["PARAMETERS"]))
    _, news = investigated(tmp_path / "bad.py", written, BAD=True)
    report, end = news[0], news[-1]
    assert (report.diagnoses[0].code, report.incident.at.step) == (code, LAST)
    assert (report.replay.fidelity, not end.lost) == ("bitwise", True)
    # The line that called the model has no operation of its own; of weights it is who wrote them.
    said = "written to by" if code == "NS401" else "Normal("
    found = report.localization.first_bad.source
    assert found is not None or any(said in one for one in report.diagnoses[0].lines)


ASSERTED = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 4)
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
try:
    for step in range(4):
        hidden = net(torch.randn(6, 3))
        nearest = hidden.masked_fill(hidden > 1.0, float("inf")).amin(1)
        hidden = hidden.masked_fill(hidden > 1.5, float("-inf"))
        scores = hidden.softmax(1) / (0.0 if BAD and step == 2 else 1.0)
        assert ASSERT
        loss = scores.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
except Exception:
    sys.excepthook(*sys.exc_info())
"""


@pytest.mark.parametrize("bad", [True, False])
def test_an_assertion_ends_the_script(bad, tmp_path):
    asserted = "scores.isfinite().all()" if bad else "step < 2"
    written = ASSERTED.replace("ASSERT", asserted)
    _, news = investigated(tmp_path / "bad.py", written, BAD=bad)
    assert [one.diagnoses[0].code for one in news[:-1]] == ["NS204"] * bad


def test_what_a_script_catches_itself_is_none(tmp_path):
    drawn = REFUSED["a temperature of 0"][0]
    _, news = investigated(tmp_path / "caught.py", source(drawn, "RuntimeError"), BAD=True)
    assert all(isinstance(one, RunEnd) for one in news)


RETRIED = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 2)
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
PARAMETERS = list(net.parameters())


def factor(matrix):
    try:
        return torch.linalg.cholesky(matrix)
    except torch.linalg.LinAlgError:
        return torch.linalg.cholesky(matrix + torch.eye(len(matrix)))


for step in range(4):
    out = net(torch.randn(6, 3))
    try:
        root = factor(out @ out.mT - (step == 2) * (0.0 if not BAD else 9.0) * torch.eye(6))
    except torch.linalg.LinAlgError:
        continue
    optimizer.zero_grad()
    root.diagonal().log().mean().backward()
    optimizer.step()
"""


SEVERAL_TIMES = RETRIED.replace(
    """        return torch.linalg.cholesky(matrix + torch.eye(len(matrix)))
""",
    """        pass
    for more in (-1.0, -0.5):
        try:
            return torch.linalg.cholesky(matrix * 0 + more * torch.eye(len(matrix)))
        except torch.linalg.LinAlgError:
            pass
    return torch.linalg.cholesky(matrix + torch.eye(len(matrix)))
""",
)
OF_THE_BATCH = RETRIED.replace(
    "    try:\n        root",
    "    try:\n        torch.nn.functional.one_hot(torch.tensor([-1, 2]))\n"
    "    except RuntimeError:\n        pass\n"
    "    try:\n        root",
)


@pytest.mark.parametrize("tried", [RETRIED, SEVERAL_TIMES, OF_THE_BATCH])
def test_a_matrix_that_the_script_tries_again_is_no_failure(tried, tmp_path):
    plain = run_script(tmp_path / "plain.py", tried, BAD=False)
    healthy, news = investigated(tmp_path / "healthy.py", tried, BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)
    assert all(map(lambda a, b: bool((a == b).all()), healthy["PARAMETERS"], plain["PARAMETERS"]))


@pytest.mark.parametrize("tried", [RETRIED, SEVERAL_TIMES])
def test_a_step_that_the_script_leaves_out_for_it_is_one(tried, tmp_path):
    _, news = investigated(tmp_path / "bad.py", tried, BAD=True)
    report = news[0]
    assert (report.diagnoses[0].code, report.incident.at.step) == ("NS204", 2)


BARE = """
import torch

weight = torch.nn.Parameter(torch.tensor(1.0))
optimizer = torch.optim.SGD([weight], 0.1)
for step in range(4):
    matrix = torch.eye(3) * (weight - (step == 2) * (9.0 if BAD else 0.0))
    optimizer.zero_grad()
    torch.linalg.cholesky(matrix).diagonal().sum().backward()
    optimizer.step()
"""


def test_what_a_loop_without_a_model_is_refused_at_its_end(tmp_path):
    _, news = investigated(tmp_path / "healthy.py", BARE, BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)
    (tmp_path / "train.py").write_text("BAD = True\n" + BARE)
    ended = run(tmp_path, "train.py")
    (row,) = ended.rows
    assert (ended.code, row["step"]) == (1, 2)
    assert "error[NS204]" in ended.err
    assert "train.py:10 " in ended.err


REFUSING = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

class Coded(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.scale = nn.Linear(8, 2), nn.Linear(8, 2)
        self.back = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        scale = self.scale(x)
        code = self.mean(x) + torch.randn(len(x), 2) * torch.exp(0.5 * scale)
        return torch.sigmoid(self.back(code)), scale

torch.manual_seed(0)
net = Coded()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
PARAMETERS = list(net.parameters())
losses = []


def train():
    for step in range(5):
        x = torch.rand(8, 8)
        if step == 3 and BAD:
            x[2] = 1e5 * net.scale.weight.detach()[0].sign()
        seen, scale = net(x)
        loss = F.binary_cross_entropy(seen, x.clamp(0, 1)) + (scale.exp() - scale).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


try:
    train()
except RuntimeError:
    sys.excepthook(*sys.exc_info())
"""


def test_nothing_is_proven_by_a_part_of_the_objective(tmp_path):
    """The line that raises stands before the other half of the loss, which overflows as well."""
    assert_left_alone(tmp_path, REFUSING)
    _, news = investigated(tmp_path / "bad.py", REFUSING, on_failure="repair", BAD=True)
    report = next(one for one in news if isinstance(one, Report))
    assert (report.diagnoses[0].code, report.proof.verdict) == ("NS207", "plausible")
    assert report.audit[-1].action.kind == "continue"


TEMPERATURE = """
import torch
from torch import nn

torch.manual_seed(0)
actor, temperature = nn.Linear(3, 2), nn.Parameter(torch.zeros(1))
optimizers = [torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam([temperature], 1e-3)]
losses = []


def scored(x, bent):
    mean = actor(x)
    score = mean.square()
    score -= torch.log(1 - torch.tanh(mean * bent).square())
    return score.sum(1, keepdim=True)


def train(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


for step in range(8):
    x = torch.randn(8, 3)
    train(scored(x, 1.0).mean(), optimizers[0])
    with torch.no_grad():
        score = scored(x, 100.0 if BAD and step == 5 else 1.0)
    train(-(temperature.exp() * (score + 1)).mean(), optimizers[1])
PARAMETERS = [*actor.parameters(), temperature]
"""


def test_what_a_model_has_made_is_no_batch_when_it_was_written_to_in_place(tmp_path):
    """As the loss of a temperature reads the scores of a policy, without a graph."""
    assert_left_alone(tmp_path, TEMPERATURE)
    _, news = investigated(tmp_path / "bad.py", TEMPERATURE, BAD=True)
    report = next(one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code == "NS207"
    assert report.localization.first_bad.source.text.startswith("score -=")
