"""Lines in log space: proposed, proven on the failing step, in force from then on."""

import pytest
import torch
from torch import nn

import nanstop
from e2e.forms.spoiled_step import WIDTH, batch, investigated, large

# The loss of a network's scores ``v``; each on one line: a form is that of a line.
STABLE = {
    "log softmax": lambda v, b: -torch.log(torch.softmax(v * b["s"], -1)).mean(),
    "module": lambda v, b: -nn.Softmax(-1)(v * b["s"])[:, 0].log().mean(),
    "binary cross-entropy": lambda v, b: (
        -(
            b["t"] * (v * b["s"]).sigmoid().log()
            + (1 - b["t"]) * (1 - (v * b["s"]).sigmoid()).log()
        ).mean()
    ),
    "log sum exp": lambda v, b: (v * b["s"]).exp().sum(-1).log().mean(),
    "log mean exp": lambda v, b: torch.log(torch.exp(v * b["s"]).mean(-1)).mean(),
    "softplus": lambda v, b: torch.log(1 + torch.exp(v * b["s"])).mean(),
    "log1p exp": lambda v, b: torch.log1p(torch.exp(v * b["s"])).mean(),
    "quotient": lambda v, b: (torch.exp(v * b["s"]) / torch.exp(v * b["s"] - 1)).mean(),
    "entropy": lambda v, b: -((v * b["s"]).softmax(-1) * (v * b["s"]).softmax(-1).log()).sum(),
    "product": lambda v, b: -(v * b["s"]).softmax(-1).prod(-1).log().mean(),
}


@pytest.mark.parametrize("name", STABLE)
def test_a_stable_form_is_proven_and_applied(name):
    watch, _ = investigated(STABLE[name], large)
    (incident,) = watch.incidents
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.remedy) == ("proven", "stable_form")
    assert incident.audit[-1].action.kind == "redo"


def test_the_derivative_of_a_share_that_is_nearly_0_leaves_float32():
    """exp(-93) is no 0, and 1 / exp(-93) is beyond float32: the forward is finite."""

    def apart(now):
        now["s"][1] = 1.0
        now["t"][1] = torch.tensor([93.0] + [0.0] * (WIDTH - 1))

    def loss(scores, now):
        return -torch.log(torch.softmax(scores + now["t"], -1)[:, 1]).mean()

    watch, _ = investigated(loss, apart)
    (incident,) = watch.incidents
    (atom,) = incident.proof.minimal
    assert incident.diagnoses[0].code == "NS301"
    assert (incident.proof.verdict, atom.remedy) == ("proven", "stable_form")
    assert incident.audit[-1].outcome == "done"


def test_without_a_healthy_row_or_a_step_before_smaller_weights_tell_the_function():
    """Saturated throughout: `log(sigmoid(v))` has no value for any row, in float64 either."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        net[2].bias.fill_(-2000.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with nanstop.watch(net, optimizer) as watch:
        watch.step(lambda now: -torch.log(torch.sigmoid(net(now["x"]))).mean(), batch(0))
        watch.update()
    (incident,) = watch.incidents
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.remedy) == ("proven", "stable_form")
    assert incident.audit[-1].outcome == "done"
