"""The loss of a micro-batch that is run again for its loss alone takes no backward, where it is
the same without.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fnstep import FnStep
from nanstop.detect.early_steps import at_once
from nanstop.tracing.op_patches import OtherResult, SecondRun
from nanstop.tracing.record_step import first_loss, first_ops


class Told(torch.autograd.Function):
    """Counts how often a backward comes through it."""

    num = 0

    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        Told.num += 1
        return gradient


def plain(m, b):
    return Told.apply(m(b["x"])).square().mean()


def scaled(m, b):
    return plain(m, b) * 8.0


def checkpointed(m, b):
    return Told.apply(checkpoint(m, b["x"], use_reentrant=False)).square().mean()


def penalty(m, b):
    given = b["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(m(given).sum(), given, create_graph=True)
    return plain(m, b) + slope.square().mean()


def adversarial(m, b):
    """The loss is that of an input moved along a gradient, which a backward of its own leaves."""
    given = b["x"].clone().requires_grad_()
    m(given).square().mean().backward()
    return plain(m, {"x": (given + given.grad.sign()).detach()})


def forgiving(m, b):
    """The same of somebody who expects no gradient."""
    given = b["x"].clone().requires_grad_()
    m(given).square().mean().backward()
    moved = given if given.grad is None else given + given.grad.sign()
    return plain(m, {"x": moved.detach()})


def step_of(loss):
    torch.manual_seed(0)
    return FnStep(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), loss, [batch()])


def batch():
    return {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(0))}


def loss_and_backwards(step, mode):
    Told.num = 0
    return first_loss(step, mode), Told.num


@pytest.mark.parametrize(
    ("loss", "num"),
    [(plain, 0), (scaled, 0), (checkpointed, 0), (penalty, 0), (adversarial, 1), (forgiving, 1)],
)
def test_it_is_that_of_the_whole_run(loss, num):
    step = step_of(loss)
    with step.isolated():
        whole = float(step.run(0))
    assert loss_and_backwards(step, SecondRun()) == (whole, num)
    assert all(p.grad is None for p in step.view.root.parameters())
    with step.isolated():  # backwards are back
        assert float(step.run(0)) == whole
        assert all(p.grad is not None for p in step.view.root.parameters())


@pytest.mark.parametrize("loss", [plain, checkpointed, penalty, adversarial, forgiving])
def test_operations_keep_their_numbers(loss):
    step = step_of(loss)
    last = max(op.index for op in first_ops(step) if op.name.startswith("aten.clone"))
    doubled = OtherResult(last, lambda made: 2.0 * made)
    assert first_loss(step, doubled) != first_loss(step, SecondRun())


def test_what_reads_gradients_is_run_as_it_is():
    """A line behind the backward that fails where there are none."""
    step = step_of(plain)
    run = step.run

    def then_reads(micro, batch=None):
        loss = run(micro, batch)
        return loss + 0.0 * step.view.root[0].weight.grad.norm()

    step.run = then_reads
    expected = plain(step.view.root, batch()).item()
    assert loss_and_backwards(step, SecondRun()) == (expected, 1)


def test_what_a_run_raises_is_raised():
    def refuses(m, b):
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        first_loss(step_of(refuses), SecondRun())


def test_looks_at_a_padded_batch_take_the_backward_of_the_first_run():
    """What a loss is made of is asked without."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 2)

        def forward(self, ids):
            return self.head(self.table(ids).mean(1))

    def classified(m, b):
        return nn.functional.cross_entropy(Told.apply(m(b["ids"])), b["y"])

    ids = torch.randint(3, 30, (4, 9), generator=torch.Generator().manual_seed(0))
    ids[:3, 5:] = 0
    step = FnStep(Mean(), classified, [{"ids": ids, "y": torch.arange(4) % 2}])
    run, after = step.run, []

    def counted(*given):
        loss = run(*given)
        after.append(Told.num)
        return loss

    step.run, Told.num = counted, 0
    at_once(step)
    assert len(after) > 2
    assert 0 < after[0] == after[-1]
