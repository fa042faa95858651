"""Calibration batches as a step: what scales the loss, what is taken of the data."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nanstop.commands.plan.calibration import WindowCalibration, padded_copy
from nanstop.hosts.model.view import PlainView
from nanstop.records import RunFacts, StepId

SEEN_BEFORE = torch.Tensor.backward, torch.autograd.backward
"""What a recorded loop holds on to and calls again."""


class Window:
    """One micro-batch of a loop that calls a ``backward`` of its own."""

    id, facts, batches, losses = StepId(run="r", step=0), RunFacts(host="loop"), ({},), (None,)
    rates = (1.0,)

    def __init__(self, backward, *, reentrant=None):
        self.layer = torch.nn.Linear(3, 1, bias=False)
        self.backward, self.reentrant = backward, reentrant
        self.view = PlainView(self.layer, torch.optim.SGD(self.layer.parameters(), lr=1.0))

    def run(self, _micro, _batch=None):
        given = torch.ones(2, 3, requires_grad=True)
        if self.reentrant is None:
            out = self.layer(given)
        else:
            out = checkpoint(self.layer, given, use_reentrant=self.reentrant)
        loss = out.mean()
        self.backward(loss)
        return loss.detach()

    def isolated(self, *, with_update=False):
        return nullcontext()


@pytest.mark.parametrize("backward", SEEN_BEFORE, ids=["of a tensor", "of autograd"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_loss_of_any_window_is_scaled_once(backward, reentrant):
    window = Window(backward, reentrant=reentrant)
    step = WindowCalibration(window)
    step.scale = 8.0
    step.run(0)
    assert window.layer.weight.grad.tolist() == [[8.0, 8.0, 8.0]]
    window.layer.weight.grad = None
    step.scale = 1.0
    step.run(0)
    assert window.layer.weight.grad.tolist() == [[1.0, 1.0, 1.0]]


def batch(**more):
    ids = torch.arange(12).reshape(2, 6)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()} | more


def test_a_padded_copy_asks_for_nothing_of_padding():
    copy = padded_copy([batch()], torch.nn.Identity())
    assert copy["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert copy["labels"].tolist() == [[0, 1, 2, 3, -100, -100], [-100, -100, -100, 9, 10, 11]]
    assert copy["input_ids"] is not batch()["input_ids"]


@pytest.mark.parametrize(
    "given",
    [
        {"input_ids": torch.ones(2, 6)},
        batch(attention_mask=torch.eye(2, 6)),
        batch(attention_mask=torch.ones(2, 1, 6, 6)),
        batch(position_ids=torch.arange(6)),
        batch(attention_mask=torch.ones(2, 5)),
        torch.ones(2, 6),
    ],
)
def test_where_nothing_says_what_is_padding_there_is_no_padded_copy(given):
    assert padded_copy([given], torch.nn.Identity()) is None
