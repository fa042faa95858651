"""How far a few updates may lead from float32's, and what of that is told from noise."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

import plan_models as models
from nanstop.commands.plan.calibration import calibration_step
from nanstop.commands.plan.updates import MAX_UPDATE_TOLERANCE, UpdateTrial, UpdateTrials
from nanstop.errors import NanstopError


def trials_at(lr, updates=3):
    model = models.qwen2()
    batches = [{"input_ids": ids, "labels": ids} for ids in models.batches()]
    step = calibration_step(model, batches, lr=lr)
    with step.isolated():
        step.run(0)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return model, UpdateTrials(step, updates, exact=nullcontext, grads={0: grads})


@contextmanager
def weights_times(model, factor):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    yield  # the along itself undoes what it changes


def test_the_same_updates_are_no_distance_away():
    _, one = trials_at(1e-3)
    assert one.along_updates(nullcontext) == UpdateTrial(0.0, 1.0, 3)


def test_the_bound_grows_with_the_learning_rate_and_has_an_end():
    bounds = []
    for lr in (1e-6, 3e-3, 1.0):
        model, one = trials_at(lr)
        found = one.along_updates(lambda model=model: weights_times(model, 1.5))
        assert found.why.startswith("the loss along the updates is")
        bounds.append(found.bound)
    assert bounds[0] == 1e-3 < bounds[1] < bounds[2] == MAX_UPDATE_TOLERANCE


def test_what_an_update_raises_in_float32_is_said():
    def broken(_):
        raise RuntimeError("no room")

    _, one = trials_at(1e-3)
    one._step.apply = broken
    with pytest.raises(NanstopError, match="an update in float32 fails: RuntimeError: no room"):
        UpdateTrials(one._step, 1, exact=nullcontext, grads={0: {}})
