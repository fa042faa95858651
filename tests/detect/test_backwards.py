"""A backward that ignores what it is given is told; one that is another gradient on purpose, or is
right all the same, is not.
"""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from fnstep import FnStep
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)
ROWS, CLASSES = 24, 7
WEIGHTS = (torch.arange(ROWS) >= ROWS // 2).float()


def gradient_of_the_mean(scores, targets):
    with torch.enable_grad():
        inputs = scores.detach().requires_grad_()
        losses = F.cross_entropy(inputs, targets, reduction="none")
        return losses.detach(), torch.autograd.grad(losses.mean(), inputs)[0]


class MadeAtOnce(Function):
    @staticmethod
    def forward(ctx, scores, targets):
        losses, ctx.made = gradient_of_the_mean(scores, targets)
        return losses

    @staticmethod
    def backward(ctx, grad):
        return ctx.made, None


class HearsTheFirst(Function):
    @staticmethod
    def forward(scores, targets):
        return gradient_of_the_mean(scores, targets)[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return gradient_of_the_mean(*ctx.saved_tensors)[1] * (grad[-1] * 0 + grad[0] + 1), None


class Hears(Function):
    @staticmethod
    def forward(ctx, scores, targets):
        losses, made = gradient_of_the_mean(scores, targets)
        ctx.made = made * len(losses)
        return losses

    @staticmethod
    def backward(ctx, grad):
        return ctx.made * grad[:, None], None


class Sum(Function):
    @staticmethod
    def forward(ctx, scores, targets):
        losses, made = gradient_of_the_mean(scores, targets)
        ctx.made = made * len(losses)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.made, None


def on_scores(forward, backward):
    class OnScores(Function):
        @staticmethod
        def forward(ctx, scores):
            ctx.save_for_backward(scores)
            return forward(scores)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, *ctx.saved_tensors)

    return lambda scores, targets: F.cross_entropy(
        OnScores.apply(scores), targets, reduction="none"
    )


class AddedLoss(Function):
    """Hands on the scores; the gradient of another loss is added."""

    @staticmethod
    def forward(ctx, losses, other):
        ctx.shape = other.shape
        return losses.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(ctx.shape)


def with_another_loss(scores, targets):
    losses = F.cross_entropy(scores, targets, reduction="none")
    return AddedLoss.apply(losses, scores.square().mean(1) * 0.01)


class Injected(Function):
    """Gradients that were made elsewhere, of results that hang on nothing."""

    @staticmethod
    def forward(ctx, scores):
        ctx.save_for_backward(scores)
        return torch.zeros(len(scores))

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * 0.01


def looked_at(losses_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    batch = {"x": torch.randn(ROWS, 5), "y": torch.randint(0, CLASSES, (ROWS,))}

    def loss(model, batch):
        losses = losses_of(model(batch["x"]), batch["y"])
        return (losses * WEIGHTS).sum() / WEIGHTS.sum()

    step = FnStep(model, loss, [batch], torch.optim.SGD(model.parameters(), lr=0.1))
    return at_once(step)["backwards"]


@pytest.mark.parametrize("kind", [MadeAtOnce, HearsTheFirst])
def test_a_backward_that_ignores_what_it_is_given(kind):
    before = dict(vars(kind))
    (row,) = looked_at(kind.apply)
    assert (row.name, row.num) == (kind.__name__, ROWS)
    assert row.apart > 0.3
    assert row.line.startswith("test_backwards.py:")
    assert "return" in row.line
    assert dict(vars(kind)) == before


def test_a_backward_that_ignores_the_one_number_that_it_is_given():
    (row,) = looked_at(lambda scores, targets: Sum.apply(scores, targets) / 4 * torch.ones(ROWS))
    assert (row.name, row.num) == ("Sum", 1)
    assert row.apart == pytest.approx(0.75, abs=0.02)


def test_a_backward_that_ignores_what_is_the_same_everywhere():
    def losses(scores, targets):
        return MadeAtOnce.apply(scores, targets).mean() * 3 * torch.ones(ROWS)

    (row,) = looked_at(losses)
    assert row.apart == pytest.approx(2 / 3, abs=0.02)


@pytest.mark.parametrize(
    "losses",
    [
        Hears.apply,
        lambda scores, targets: MadeAtOnce.apply(scores, targets).mean() * torch.ones(ROWS),
        lambda scores, targets: (
            HearsTheFirst.apply(scores, targets).mean() * torch.ones(ROWS) * (1 + 1 / ROWS)
        ),
        lambda scores, _: on_scores(torch.clone, lambda grad, _: grad.sign())(scores, _).mean(),
        lambda scores, targets: Sum.apply(scores, targets) * torch.ones(ROWS),
        on_scores(torch.round, lambda grad, _: grad),
        on_scores(torch.clone, lambda grad, _: -grad),
        on_scores(torch.clone, lambda grad, _: grad.clamp(-1e-3, 1e-3)),
        on_scores(torch.sign, lambda grad, scores: grad * (scores.abs() < 1)),
        on_scores(torch.clone, lambda grad, _: grad.sign()),
        with_another_loss,
        lambda scores, _: Injected.apply(scores),
    ],
)
def test_other_gradients_on_purpose(losses):
    assert looked_at(losses) == ()
