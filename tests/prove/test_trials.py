"""What a trial says of a remedy where float32 cannot judge it."""

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.trials import Trials
from nanstop.records import Atom, FailureKey


class Attending(nn.Module):
    """A layer whose ``eager`` kernel has no safe softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": "eager"})()
        self.inner = nn.Linear(4, 4)
        self.bend = 0.0

    def set_attn_implementation(self, kernel):
        self.config._attn_implementation = kernel

    def forward(self, x):
        scores = self.inner(x)
        if self.config._attn_implementation == "eager":
            return scores.exp() / scores.exp().sum(-1, keepdim=True)
        return torch.softmax(scores, -1) * (1.0 + self.bend * torch.arange(4))


def trial(bend, batches):
    torch.manual_seed(0)
    model = Attending()
    model.bend = bend
    failing = tuple(n for n, batch in enumerate(batches) if batch["x"].abs().max() > 1e3)
    step = FnStep(model, lambda net, batch: net(batch["x"]).square().sum(), batches)
    case = FailingStep(step=step, micro=failing[0], failing=failing)
    key = FailureKey(kind="nan", phase="forward", op="aten.div.Tensor", module="")
    return Trials(case, key).trial((Atom(remedy="attention", value="sdpa"),))


SMALL, HUGE = {"x": torch.randn(3, 4)}, {"x": torch.full((3, 4), 1e4)}


@pytest.mark.parametrize(("bend", "unchanged"), [(0.0, True), (0.1, False)])
def test_where_every_sample_fails_a_healthy_micro_batch_of_the_window_judges(bend, unchanged):
    found = trial(bend, [SMALL, HUGE])
    assert found.outcome == "pass"
    assert found.rows_unchanged is unchanged


def test_nothing_judges_a_window_in_which_every_sample_fails():
    assert trial(0.0, [HUGE, HUGE]).rows_unchanged is None
