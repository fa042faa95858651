"""A run in another format draws and chooses what the recorded one did."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nanstop.replay.path import Path


def run_twice(loss, *, first=torch.float16, second=torch.float32, seeds=(0, 1), choices=True):
    """What ``loss(dtype)`` returns in one format, and in another on the path of the first."""
    path = Path()
    torch.manual_seed(seeds[0])
    with path.recorded():
        own = loss(first)
    torch.manual_seed(seeds[1])
    with path.played(choices=choices):
        other = loss(second)
    return path, own, other


DRAWS = {
    "dropout": lambda dtype: F.dropout(torch.ones(1000, dtype=dtype), 0.3),
    "in place": lambda dtype: F.dropout(torch.ones(1000, dtype=dtype), 0.3, inplace=True),
    "whole features": lambda dtype: F.dropout1d(torch.ones(4, 50, 5, dtype=dtype), 0.5),
    "noise": lambda dtype: torch.randn(50, dtype=dtype),
    "like": lambda dtype: torch.rand_like(torch.full((50,), torch.nan, dtype=dtype)),
    "filled": lambda dtype: torch.empty(50, dtype=dtype).normal_(),
    "order": lambda dtype: torch.randperm(50),
    "tokens": lambda dtype: torch.multinomial(torch.full((4, 9), 1 / 9, dtype=dtype), 3),
    "truths": lambda dtype: torch.bernoulli(torch.full((50,), 0.5, dtype=dtype)),
    "native": lambda dtype: torch.native_dropout(torch.ones(1000, dtype=dtype), 0.3, True)[0],
    "gumbel": lambda dtype: F.gumbel_softmax(torch.zeros(4, 9, dtype=dtype), hard=True),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_in_one_format_is_played_in_another(draw):
    path, own, other = run_twice(DRAWS[draw])
    assert path.num_draws == 1
    assert not path.strayed
    torch.testing.assert_close(own.float(), other.float(), rtol=2e-3, atol=2e-3)


def test_what_is_recomputed_in_backward_is_played_there_too():
    layer = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5))

    def gradient(dtype):
        layer.to(dtype).zero_grad()
        x = torch.ones(2, 50, dtype=dtype, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        return layer[0].bias.grad.clone()

    path, own, other = run_twice(gradient, second=torch.float64)
    assert (path.num_draws, path.strayed) == (2, "")
    assert torch.equal(own.double(), other)


def test_a_run_that_draws_something_else_is_known_to_have_strayed():
    path, _, _ = run_twice(lambda dtype: torch.rand(3 if dtype == torch.float16 else 4))
    assert path.strayed == "aten::rand"


def test_what_a_kernel_draws_inside_cannot_be_played():
    x = torch.randn(10)
    path, _, _ = run_twice(lambda dtype: torch.rrelu(x, training=True))
    assert (path.num_draws, path.strayed) == (1, "aten::rrelu_with_noise")


def test_attention_without_dropout_draws_nothing():
    q = torch.randn(1, 2, 8, 4)
    path, _, _ = run_twice(lambda dtype: F.scaled_dot_product_attention(q, q, q))
    assert path.num_draws == 0


SCORES = torch.tensor([[1.0, 1.0001, 0.0], [5.0, 5.001, 1.0]])
"""Which is the largest is lost in float16."""

CHOICES = {
    "topk": lambda s: s.topk(1, dim=-1).indices,
    "argmax": lambda s: s.argmax(-1),
    "argmax of all": lambda s: s.argmax(),
    "sort": lambda s: s.sort(dim=-1, descending=True).indices,
    "argsort": lambda s: s.argsort(-1, descending=True),
    "max": lambda s: s.max(-1).indices,
    "comparison": lambda s: s > s[:, :1],
    "between": lambda s: torch.bucketize(s, s.new_tensor([1.00005, 5.0005])),
}


@pytest.mark.parametrize("choose", CHOICES)
def test_what_one_format_chooses_another_chooses_too(choose):
    choice = CHOICES[choose]
    path, own, other = run_twice(lambda dtype: choice(SCORES.to(dtype)))
    assert path.num_choices == 1
    assert torch.equal(own, other)
    assert not torch.equal(own, choice(SCORES))


def test_the_values_that_were_chosen_are_those_of_the_run_itself():
    _, own, other = run_twice(lambda dtype: SCORES.to(dtype).max(-1))
    assert torch.equal(other.values, SCORES.gather(-1, own.indices[:, None])[:, 0])


def test_what_was_chosen_among_values_that_are_not_finite_is_chosen_anew():
    broken = torch.tensor([[1.0, 1.0001, 0.0], [5.0, torch.nan, 1.0]])

    def choose(dtype):
        return (SCORES if dtype == torch.float32 else broken.half()).topk(1, dim=-1).indices

    path, _, other = run_twice(choose)
    assert path.num_choices == 1
    assert other.flatten().tolist() == [0, 1]


def test_draws_alone_can_be_played():
    path, _, other = run_twice(lambda dtype: SCORES.to(dtype).argmax(-1), choices=False)
    assert path.num_choices == 1
    assert other.tolist() == [1, 1]


@pytest.mark.parametrize("ask", [torch.isfinite, torch.isnan, torch.isinf, torch.isposinf])
def test_whether_a_value_is_finite_is_no_choice(ask):
    path, _, _ = run_twice(lambda dtype: ask(SCORES.to(dtype)))
    assert path.num_choices == 0
