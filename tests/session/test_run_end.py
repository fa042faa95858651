"""What is said of a run that remedies were in force in is true at its end."""

import math

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.decide.policy import Policy
from nanstop.records import Atom
from nanstop.session.session import Session
from nanstop.store.incidents import Store

HARMS = {
    "": lambda model, optimizer, series: None,
    "`0.weight`": lambda model, optimizer, series: model[0].weight.data.fill_(math.inf),
    "`0.bias:exp_avg`": lambda model, optimizer, series: optimizer.state[model[0].bias][
        "exp_avg"
    ].fill_(math.nan),
    "`loss`": lambda model, optimizer, series: series.add("loss_raw", 3, torch.tensor(math.nan)),
}


@pytest.mark.parametrize("broken", HARMS)
def test_a_run_is_said_to_be_kept_finite_only_where_it_is(tmp_path, broken):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    step = FnStep(model, lambda net, b: net(b["x"]).mean(), [{"x": torch.ones(2, 4)}], optimizer)
    news = []
    session = Session(
        policy=Policy(),
        store=Store(tmp_path),
        view=step.view,
        facts=step.facts,
        announce=news.append,
    )
    session.start()
    session.adopt((Atom(remedy="island", target="0", value="float32"),))
    step.run(0)
    step.update()
    session.series.add("loss_raw", 2, torch.tensor(0.5))
    HARMS[broken](model, optimizer, session.series)
    session.finish()
    said = [line for line in news if isinstance(line, str)][-1]
    assert ("was kept finite by" in said) == (not broken)
    assert broken in said
