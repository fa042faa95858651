"""Exponentials and probabilities of one line in log space: the same function, where the old one
was finite, and finite where it was not.
"""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from nanstop.records import Atom
from nanstop.remedies.apply import applied
from remedies.views import View


def under_form(compute, *inputs, value="log_space", remedy="stable_form"):
    """What a function of one line returns in the form, and the gradients of its sum."""
    code = compute.__code__
    atom = Atom(remedy=remedy, target=f"{code.co_filename}:{code.co_firstlineno}", value=value)
    with applied(View(torch.nn.Identity()), (atom,)):
        return graded(compute, *inputs)


def graded(compute, *inputs):
    fresh = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    result = compute(*fresh)
    result.sum().backward()
    return result.detach(), [x.grad for x in fresh]


GROUPS = torch.tensor([[0, 1, 0], [0, 0, 1]])


def by_group(into, numbers):
    return into.scatter_reduce(1, GROUPS, numbers, "sum").gather(1, GROUPS)


def sized(x):
    return x.abs().cumsum(1)


# Each on one line: the form is that of a line.
SAME = {
    "log softmax": lambda x: torch.log(torch.softmax(x, -1)),
    "chosen": lambda x: F.softmax(x, dim=-1).gather(1, torch.tensor([[0], [2]])).squeeze(1).log(),
    "indexed": lambda x: x.softmax(dim=1)[:, 1].log2(),
    "log10": lambda x: x.softmax(1).transpose(0, 1).log10(),
    "entropy": lambda x: -(x.softmax(-1) * x.softmax(-1).log()).sum(-1),
    "log sigmoid": lambda x: torch.sigmoid(x).log(),
    "log of the rest": lambda x: torch.log(1 - torch.sigmoid(x)),
    "rest of a softmax": lambda x: torch.log(1.0 - F.softmax(x, -1)),
    "bce": lambda x: F.binary_cross_entropy(torch.sigmoid(x), torch.full_like(x, 0.25)),
    "bce sum": lambda x: torch.nn.BCELoss(reduction="sum")(x.sigmoid(), (x > 0).to(x.dtype)),
    "log sum exp": lambda x: x.exp().sum(-1).log(),
    "log mean exp": lambda x: torch.log(torch.exp(x).mean(dim=1, keepdim=True)),
    "softplus": lambda x: torch.log(1 + torch.exp(x)),
    "log1p exp": lambda x: torch.log1p(x.exp()),
    "softmax by hand": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "quotient": lambda x: torch.exp(x) / torch.exp(x - 3.0),
    "by names": lambda x: torch.div(other=torch.exp(input=x - 3.0), input=torch.exp(input=x)),
    "product": lambda x: x.softmax(-1)[:, :2].prod(-1).log(),
    "log of a quotient": lambda x: (x.softmax(-1) / x.flip(1).softmax(-1)).log(),
    "clamped": lambda x: x.softmax(-1).clamp(min=1e-3).log(),
    "plus eps": lambda x: torch.log(x.softmax(-1) + 1e-4),
    "cast": lambda x: x.float().softmax(-1).to(x.dtype).log(),
    "power": lambda x: x.softmax(-1).sqrt().log(),
    "hyperbolic": lambda x: torch.log(torch.cosh(x)),
    "hyperbolic, from below": lambda x: (-4.0 * x).cosh().log(),
    "softplus, undone": lambda x: torch.log(torch.expm1(x.abs() + 0.1)),
    "squashed": lambda x: torch.log(1 - torch.tanh(x) ** 2),
    "squashed, spelled": lambda x: (1 - x.tanh().square() + 1e-4).log(),
    "focal": lambda x: torch.log(torch.where(x > 0, x.sigmoid(), 1 - x.sigmoid())),
    "sigmoid by hand": lambda x: 1 / (1 + torch.exp(-x)),
    "inverse": lambda x: (1 + x.exp()).reciprocal(),
    "weighted": lambda x: (x.softmax(-1) * (1 + x.detach().square())).sum(-1).log(),
    "product of matrices": lambda x: (x.exp() @ x.flip(1).exp().T).log(),
    "vector by matrix": lambda x: torch.log(x.exp()[0] @ x.exp().t()),
    "batched": lambda x: torch.bmm(x.exp()[:, None], x.exp()[:, :, None]).log(),
    "scaling": lambda x: 1.0 / (x.exp() @ torch.full((3,), 0.5, dtype=x.dtype)),
    "share of a scaling": lambda x: torch.ones(2, dtype=x.dtype) / torch.mv(x.exp(), x.new_ones(3)),
    "diagonal of a matrix": lambda x: (x[:, :2].exp().diag() / x.exp().sum(-1)).log(),
    "running sum": lambda x: torch.log(torch.cumsum(torch.exp(x), dim=1)),
    "sum by index": lambda x: x.new_zeros(2, 2).index_add(1, GROUPS[0], x.exp()).log()[:, :1],
    "sum by index, in place": lambda x: x.new_ones(2, 2).scatter_add_(1, GROUPS, x.exp()).log(),
    "share of its group": lambda x: x.exp() / by_group(x.new_zeros(2, 2), x.exp()),
    "tail": lambda x: torch.log(0.5 * (1 + torch.erf(0.2 * x))),
    "other tail": lambda x: (1 - (0.2 * x).erf()).log() + (0.2 * x).erfc().log(),
    "normal": lambda x: (1 - torch.special.ndtr(0.2 * x)).log() + torch.special.ndtr(0.2 * x).log(),
    "squashed, halves": lambda x: torch.log(0.5 * (1 + x.tanh())) + (1 - x.tanh()).log(),
    "log of softplus": lambda x: F.softplus(x).log() + (F.softplus(-x) + 1e-6).log(),
    "Bessel": lambda x: torch.log(torch.special.i0(x)) + torch.i0(-x).log(),
    "entropy, by a function": lambda x: torch.special.entr(x.softmax(-1)).sum(-1),
    "times a logarithm": lambda x: torch.xlogy(x.detach().cos(), x.softmax(-1)),
    "weighted mean": lambda x: (x.exp() * x.sin()).sum(-1) / x.exp().sum(-1),
    "weighted mean, kept": lambda x: (x.cos() * x.exp()).sum(1, True) / x.exp().sum(1, True),
    "attention": lambda x: (x.exp() @ x.cos().T) / x.exp().sum(-1, keepdim=True),
    "derivative of softplus": lambda x: x.sin() * x.exp() / (1 + x.exp()),
    "scan": lambda x: (-sized(x)).exp() * (x.cos() * sized(x).exp()).cumsum(1),
    "causal mean": lambda x: (x.sin() * x.exp()).cumsum(-1) / x.exp().cumsum(-1),
    "times a number": lambda x: (x.cos() * x.exp() * x.sin()).sum(-1) / x.exp().sum(-1),
    "of all": lambda x: (x.exp() * x.sin()).sum() / x.exp().sum(),
    "masked": lambda x: (x.exp() * (x.detach() <= x.detach().mean())).sum().log(),
}


@pytest.mark.parametrize("name", SAME)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), size=st.floats(0.1, 4.0))
def test_it_is_the_same_function(name, seed, size):
    generator = torch.Generator().manual_seed(seed)
    inputs = size * torch.randn(2, 3, generator=generator, dtype=torch.float64)
    plain, (plain_gradient,) = graded(SAME[name], inputs)
    formed, (gradient,) = under_form(SAME[name], inputs)
    known = plain.isfinite()
    torch.testing.assert_close(formed[known], plain[known], rtol=1e-6, atol=1e-6)
    if known.all() and plain_gradient.isfinite().all():
        torch.testing.assert_close(gradient, plain_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", sorted(set(SAME) - {"clamped", "plus eps", "bce", "bce sum", "squashed, spelled"})
)
def test_it_is_finite_where_the_old_form_is_not(name):
    inputs = torch.tensor([[200.0, -50.0, -200.0], [-300.0, 0.5, 150.0]])
    formed, (gradient,) = under_form(SAME[name], inputs)
    exact, (exact_gradient,) = graded(SAME[name], inputs.double())
    assert formed.isfinite().all()
    assert gradient.isfinite().all()
    known = exact.isfinite()
    torch.testing.assert_close(formed[known], exact[known].float(), rtol=1e-5, atol=1e-5)
    if known.all() and exact_gradient.isfinite().all():
        torch.testing.assert_close(gradient, exact_gradient.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", ["bce", "bce sum"])
def test_a_cross_entropy_of_a_probability_has_a_gradient_in_half(loss):
    inputs = torch.tensor([[-12.0, 15.0]])
    _, (plain,) = graded(SAME[loss], inputs.half())
    _, (gradient,) = under_form(SAME[loss], inputs.half())
    _, (exact,) = graded(SAME[loss], inputs.double())
    assert not plain.isfinite().all()
    torch.testing.assert_close(gradient, exact.half())


def scalings(cost, rounds=20):
    """A plan of entropic transport, by scalings of its kernel. The form is that of the marked
    line.
    """
    kernel = torch.exp(-cost / 0.02)
    share = torch.full((cost.shape[0],), 1 / cost.shape[0], dtype=cost.dtype)
    column = torch.ones_like(share)
    for _ in range(rounds):
        row = share / (kernel @ column)  # of the form
        column = share / (kernel.T @ row)
    return row[:, None] * kernel * column


def between_diagonals(cost, rounds=20):
    """The same, until it changes no more, and its plan as a product of matrices."""
    kernel, column = torch.exp(-cost / 0.02), torch.ones(cost.shape[0], dtype=cost.dtype)
    for _ in range(rounds):
        last = column
        row = (1 / cost.shape[0]) / torch.mv(kernel, column)  # of the form
        column = (1 / cost.shape[0]) / torch.mv(kernel.t(), row)
        if (column - last).abs().max() == 0.0:
            break
    return torch.diag(row) @ kernel @ torch.diag(column)


def in_logarithms(cost, rounds=20):
    kernel, share = -cost / 0.02, -math.log(cost.shape[0])
    column = torch.zeros(cost.shape[0], dtype=cost.dtype)
    for _ in range(rounds):
        row = share - torch.logsumexp(kernel + column, dim=1)
        column = share - torch.logsumexp(kernel + row[:, None], dim=0)
    return (row[:, None] + kernel + column).exp()


@pytest.mark.parametrize(
    ("scalings", "rounds"), [(scalings, 20), (scalings, 400), (between_diagonals, 20)]
)
def test_scalings_of_a_kernel_that_rounds_to_0_are_kept_as_logarithms(scalings, rounds):
    lines, first = inspect.getsourcelines(scalings)
    line = first + next(n for n, text in enumerate(lines) if "# of the form" in text)
    cost = 3.0 + torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    place = f"{scalings.__code__.co_filename}:{line}"
    atom = Atom(remedy="stable_form", target=place, value="log_space")
    assert not scalings(cost).isfinite().all()
    with applied(View(torch.nn.Identity()), (atom,)):
        found, (gradient,) = graded(lambda c: scalings(c, rounds) * c, cost)
    exact, (true_gradient,) = graded(lambda c: in_logarithms(c, rounds) * c, cost.double())
    torch.testing.assert_close(found, exact.float(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(gradient, true_gradient.float(), rtol=1e-2, atol=1e-3)


def test_a_product_with_what_is_trained_is_left_alone():
    """Its sign is not known, and asking the device in every layer would be dear."""
    weight = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    inputs = torch.tensor([[0.2, 0.7]])

    def compute(x, w):
        return (x.softmax(-1) @ w).exp()

    for one, other in zip(
        under_form(compute, inputs, weight), graded(compute, inputs, weight), strict=True
    ):
        torch.testing.assert_close(one, other)
