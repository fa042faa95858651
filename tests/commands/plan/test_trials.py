"""Trials of plans: what is known of another loss scale without a run."""

from dataclasses import replace

import pytest
import torch

import plan_models as models
from nanstop.commands.plan.calibration import calibration_step
from nanstop.commands.plan.trials import PlanTrials
from nanstop.records import PrecisionPlan, Region

NORM = "model.layers.1.post_feedforward_layernorm"
PLAIN = PrecisionPlan(dtype="float16", logits="float16", trainables="float32")
CURED = replace(PLAIN, regions=(Region(modules=(NORM,)),))


@pytest.fixture
def trials():
    model = models.massive((NORM,))
    batches = [{"input_ids": ids, "labels": ids} for ids in models.batches()]
    step = calibration_step(model, batches, loss=None, optimizer=None, lr=1e-5)
    found = PlanTrials(step, dtype=torch.float16, updates=1)
    found.runs = []
    run = found._run
    found._run = lambda plan, micro: found.runs.append((plan, micro)) or run(plan, micro)
    return found


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**16])
def test_a_forward_that_fails_fails_at_any_loss_scale(trials, scale):
    trials.scale = 2.0
    first = trials._trial(PLAIN, 0)
    assert "the loss is not finite" in first.why
    trials.scale = scale
    known = trials._trial(PLAIN, 0)
    assert len(trials.runs) == 1
    assert known == trials._run(PLAIN, 0)


def test_a_plan_that_passes_is_run_at_each_loss_scale(trials):
    for scale in (2.0, 4.0):
        trials.scale = scale
        assert trials._trial(CURED, 0).passes
    assert len(trials.runs) == 2


def test_to_settle_takes_no_run_at_a_scale_that_is_left(trials):
    trials.scale = 2.0
    for micro in trials.batches:
        trials._trial(CURED, micro)
    trials.scale = 4.0
    assert trials.settle(CURED).passes
    assert trials.scale not in (2.0, 4.0)
    assert len(trials.runs) == 2 * len(trials.batches)
