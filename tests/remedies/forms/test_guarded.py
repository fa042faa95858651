"""Operations that have no value or derivative somewhere: a guard gives them one there, and leaves
what has one as it is.
"""

import warnings

import pytest
import torch
from torch.nn import functional as F

from nanstop.errors import NanstopError
from nanstop.records import Atom
from nanstop.remedies.apply import applied
from remedies.forms.test_log_space import graded, under_form
from remedies.views import View

ROWS = torch.tensor([[3.0, 4.0, 0.5], [0.0, 0.0, 0.0]])
SCORES = torch.tensor([[1.0, 2.0, -torch.inf], [-torch.inf] * 3])
BROKEN = {
    "count": (lambda x: x.sum(1) / torch.tensor([3.0, 0.0]), ROWS),
    "norm": (lambda x: x / x.norm(dim=-1, keepdim=True), ROWS),
    "inverse": (lambda x: x.sum(1).reciprocal(), ROWS),
    "inverse root": (lambda x: x.square().mean(1).rsqrt(), ROWS),
    "root by name": (lambda x: torch.sqrt(input=x.square().sum(1)), ROWS),
    "arc sine by name": (lambda x: torch.asin(input=x / 4.0), ROWS),
    "softmax by name": (lambda x: F.softmax(input=x, dim=-1), SCORES),
    "root": (lambda x: x.square().sum(1).sqrt(), ROWS),
    "power": (lambda x: x.square().sum(1) ** 0.5, ROWS),
    "power of what is negative": (lambda x: (x - 1.0) ** 1.5, ROWS),
    "learned power": (lambda x: (x - 1.0).pow(torch.tensor(2.9)).mean(1), ROWS),
    "log": (lambda x: x.sum(1).log(), ROWS),
    "log of what is negative": (lambda x: torch.log(1.0 - x), ROWS),
    "x log y": (lambda x: torch.xlogy(torch.tensor(2.0), x).sum(1), ROWS),
    "x log x": (lambda x: x * x.log(), ROWS),
    "entropy": (lambda x: torch.special.entr(x).sum(1), ROWS),
    "x log x by name": (lambda x: torch.xlogy(x, x).sum(1), ROWS),
    "divergence": (lambda x: F.kl_div(torch.ones_like(x), x, reduction="none").sum(1), ROWS),
    "divergence by name": (
        lambda x: F.kl_div(input=torch.ones_like(x), target=x, reduction="none").sum(1),
        ROWS,
    ),
    "layer norm": (lambda x: F.layer_norm(x, (3,), eps=0.0)[:, 0], ROWS),
    "layer norm by place": (lambda x: F.layer_norm(x, (3,), None, None, 0.0)[:, 0], ROWS),
    "arc cosine": (lambda x: torch.acos(x / 4.0), ROWS),
    "hyperbolic arc cosine": (lambda x: torch.acosh(x), ROWS),
    "arc tangent": (lambda x: (x / 4.0).atanh(), ROWS),
    "softmax": (lambda x: torch.softmax(x, -1), SCORES),
    "log softmax": (lambda x: F.log_softmax(x, -1).masked_fill(x == -torch.inf, 0.0), SCORES),
    "mean of nothing": (lambda x: x[x > 99.0].mean(), ROWS),
    "mean loss of nothing": (
        lambda x: F.mse_loss(x[x > 99.0], ROWS[ROWS > 99.0]),
        ROWS,
    ),
    "deviation of one": (lambda x: x[:, :1].std(1), ROWS),
    "deviation and mean of one": (lambda x: torch.cat(torch.std_mean(x[:, :1], 1)), ROWS),
    "covariance of one": (lambda x: torch.cov(x[:, :1]), ROWS),
    "log of more": (lambda x: torch.log1p(-x / 4.0), ROWS),
    "log of more than that": (lambda x: (-x).log1p(), ROWS),
    "a count of Python's": (lambda x: x.sum(1) / 0, ROWS),
    "a vector of zeros in half": (lambda x: F.normalize(x.half(), dim=-1).float(), ROWS),
    "labels": (lambda x: F.cross_entropy(x, torch.tensor([-100, -100])), ROWS),
    "class weights": (
        lambda x: F.cross_entropy(x, torch.tensor([0, 0]), weight=torch.tensor([0.0, 1.0, 1.0])),
        ROWS,
    ),
}


ALWAYS = {"mean of nothing", "mean loss of nothing", "deviation of one", "a count of Python's"}
ALWAYS |= {"deviation and mean of one", "covariance of one"}
"""What has no value whatever is read."""


@pytest.mark.parametrize("name", BROKEN)
def test_value_and_derivative_are_finite(name):
    compute, inputs = BROKEN[name]
    with warnings.catch_warnings():  # torch says so of a deviation of one
        warnings.simplefilter("ignore")
        plain, (plain_gradient,) = graded(compute, inputs)
    assert not (plain.isfinite().all() and plain_gradient.isfinite().all())
    guarded, (gradient,) = guard(compute, inputs)
    assert guarded.isfinite().all()
    assert gradient[inputs.isfinite()].isfinite().all()
    # A derivative of its own: that at an element without one spoils its row.
    known = plain.isfinite()
    torch.testing.assert_close(guarded[known], plain[known], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(set(BROKEN) - ALWAYS))
def test_where_all_is_well_nothing_changes(name):
    compute, _ = BROKEN[name]
    inputs = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 0.3]])
    plain, (plain_gradient,) = graded(compute, inputs)
    guarded, (gradient,) = guard(compute, inputs)
    known, known_gradient = plain.isfinite(), plain_gradient.isfinite()
    assert torch.equal(guarded[known], plain[known])
    torch.testing.assert_close(gradient[known_gradient], plain_gradient[known_gradient])


def test_a_factor_that_nobody_learns_may_switch_a_mask_off():
    mask = torch.tensor([[-1.0, -torch.inf]])
    compute = lambda x: x + torch.tensor(0.0) * mask  # noqa: E731
    found, _ = under_form(compute, torch.zeros(1, 2), value="mask_afterwards", remedy="form")
    assert found.isnan().any()


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_a_mask_stays_one_whatever_it_is_multiplied_by(slope):
    mask = torch.tensor([[-1.0, -torch.inf], [-2.0, -3.0]])
    compute = lambda s: (s * mask).softmax(-1)[:, 0]  # noqa: E731
    assert not graded(compute, torch.tensor([slope]))[1][0].isfinite().all()
    found, (gradient,) = under_form(
        compute, torch.tensor([slope]), value="mask_afterwards", remedy="form"
    )
    assert float(found[0]) == 1.0
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.cat(torch.std_mean(x, 1)),
        lambda x: torch.cat(torch.var_mean(x, dim=0, correction=0)),
        lambda x: torch.cov(x),
        lambda x: x.var(0, unbiased=False),
        lambda x: x[:1].std(0, correction=0),
    ],
)
def test_a_deviation_of_several_is_what_it_was(compute):
    x = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 0.3]])
    plain, (slope,) = graded(compute, x)
    guarded, (gradient,) = guard(compute, x)
    assert torch.equal(guarded, plain)
    assert torch.equal(gradient.nan_to_num(), slope.nan_to_num())


def test_a_whole_power_that_is_learned_has_a_slope_at_negative_numbers():
    x, p = torch.tensor([[3.0, -4.0, 0.5], [0.2, 0.0, 1.0]]), torch.tensor(3.0)
    compute = lambda x, p: x.pow(p)  # noqa: E731
    assert not graded(compute, x, p)[1][1].isfinite()
    guarded, (gradient, slope) = under_form(compute, x, p, value="guarded", remedy="form")
    assert slope.isfinite()
    assert torch.equal(guarded[x >= 0], x.pow(3.0)[x >= 0])
    assert torch.equal(gradient[x > 0], (3.0 * x.square())[x > 0])
    fixed, _ = under_form(lambda x: x.pow(torch.tensor(3.0)), x, value="guarded", remedy="form")
    assert torch.equal(fixed, x.pow(3.0))


@pytest.mark.parametrize(
    ("compute", "slope"),
    [
        (lambda x: torch.where(x < 9.0, torch.exp(x) - 1.0, x), 1.0),
        (lambda x: 1.0 / (1.0 + x.exp()), 0.0),
        (lambda x: torch.exp(x).clamp(max=20.0), 0.0),
    ],
    ids=["chosen", "sigmoid", "bounded"],
)
def test_an_exponential_that_is_passed_by_has_no_infinite_slope(compute, slope):
    x = torch.tensor([[0.5, 200.0, -3.0]])
    plain, (before,) = graded(compute, x)
    guarded, (gradient,) = guard(compute, x)
    assert torch.equal(guarded, plain)
    assert torch.equal(gradient[0, [0, 2]], before[0, [0, 2]])
    assert before[0, 1].isnan() or before[0, 1] == slope
    assert gradient[0, 1] == slope


def test_an_exponential_that_is_read_stays_infinite():
    x = torch.tensor([[0.5, 200.0, -3.0]])
    guarded, _ = guard(lambda x: torch.exp(x) * 1e-30, x)
    assert guarded[0, 1].isinf()


def test_only_from_the_edge_on_is_an_arc_flat():
    near = torch.tensor([[1 - 2**-24, 1.0, -1.0, 0.5]])
    plain, (slope,) = graded(torch.acos, near)
    guarded, (gradient,) = guard(lambda x: torch.acos(x), near)
    assert torch.equal(guarded, plain)
    assert torch.equal(gradient[0, [0, 3]], slope[0, [0, 3]])
    assert not gradient[0, 1:3].any()


@pytest.mark.parametrize(
    "angle",
    [
        lambda x, y: torch.atan2(x, y),
        lambda x, y: torch.arctan2(input=x, other=y),
        lambda x, y: x.atan2(y),
    ],
)
def test_an_angle_of_nothing_has_derivatives_of_its_derivatives(angle):
    def slopes(made, x):
        (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return slope.square().sum(1)

    compute = lambda x: slopes(angle(x[:, 0], x[:, 1]), x)  # noqa: E731
    some = torch.where(ROWS == 0, torch.full_like(ROWS, 0.5), ROWS)
    assert not graded(compute, ROWS)[1][0].isfinite().all()
    place = f"{angle.__code__.co_filename}:{angle.__code__.co_firstlineno}"
    atom = Atom(remedy="form", target=place, value="guarded")
    with applied(View(torch.nn.Identity()), (atom,)):
        guarded, (gradient,) = graded(compute, ROWS)
        healthy = graded(compute, some)
    assert guarded.isfinite().all()
    assert gradient.isfinite().all()
    for one, other in zip(graded(compute, some), healthy, strict=True):
        torch.testing.assert_close(one, other)


def test_attention_of_a_hidden_row_is_0():
    query = torch.randn(1, 1, 2, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, False], [False, False]])
    compute = lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=mask)  # noqa: E731
    guarded, (gradient,) = guard(compute, query)
    plain, _ = graded(compute, query)
    assert torch.equal(guarded[..., 0, :], plain[..., 0, :])
    assert not guarded[..., 1, :].any()
    assert gradient.isfinite().all()


def test_ctc_of_a_text_that_does_not_fit_is_0():
    scores = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0))
    texts, lengths = torch.tensor([[1, 2, 3, 4], [1, 1, 1, 1]]), torch.tensor([4, 4])
    compute = lambda x: F.ctc_loss(x.log_softmax(-1), texts, lengths, lengths, reduction="none")  # noqa: E731
    plain, _ = graded(compute, scores)
    guarded, (gradient,) = guard(compute, scores)
    assert plain[1] == torch.inf
    assert torch.equal(guarded, torch.tensor([float(plain[0]), 0.0]))
    assert gradient.isfinite().all()


def test_masks_that_are_added_stay_in_the_format():
    least = torch.full((2,), torch.finfo(torch.float16).min, dtype=torch.float16)
    guarded, _ = guard(lambda x: x + x, least)
    assert torch.equal(guarded, least)


def test_an_eps_that_the_format_cannot_hold():
    guarded, (gradient,) = guard(lambda x: F.normalize(x, dim=-1), ROWS.half())
    assert guarded.isfinite().all()
    assert gradient.isfinite().all()
    assert torch.equal(guarded[0], F.normalize(ROWS[0].half(), dim=0))


def test_another_line_is_computed_as_it_stands():
    atom = Atom(remedy="form", target=f"{__file__}:1", value="guarded")
    with applied(View(torch.nn.Identity()), (atom,)):
        assert torch.zeros(1).log() == -torch.inf


@pytest.mark.parametrize(
    ("target", "value", "match"),
    [("train.py:3", "faster", "unknown form"), ("train.py", "guarded", "not a line")],
)
def test_a_form_that_there_is_not(target, value, match):
    atom = Atom(remedy="form", target=target, value=value)
    with pytest.raises(NanstopError, match=match), applied(View(torch.nn.Identity()), (atom,)):
        pass


def guard(compute, inputs):
    return under_form(compute, inputs, value="guarded", remedy="form")


def noise(u):
    return -torch.log(-torch.log(u))


def test_a_function_that_the_line_calls_has_lines_of_its_own():
    u = torch.tensor([0.5, 1.0])
    plain = noise(u)
    guarded, _ = guard(lambda x: noise(x) * 1.0, u)
    assert torch.equal(guarded, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_sum_that_leaves_its_format_is_bounded_in_every_format(dtype):
    far = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
    total, _ = guard(lambda x: x + x, far)
    assert torch.equal(total, far)
