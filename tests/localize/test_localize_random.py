"""Random programs with one fault planted at a random place: localized to exactly that op."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from planted import located, op_of

ROWS, TOKENS, HIDDEN = 2, 5, 4
WEIGHT = torch.linspace(0.3, 1.1, HIDDEN * HIDDEN).view(HIDDEN, HIDDEN)


def residual(x):
    return x + 0.5 * x.flip(0)


def product(x):
    return x @ WEIGHT


def linear_over_tokens(x):
    return F.linear(x.transpose(1, 2), torch.ones(TOKENS, TOKENS) * 0.2 + 0.1).transpose(1, 2)


def normalised(x):
    return F.layer_norm(x, (HIDDEN,)) + 1.0


def attended(x):
    return F.softmax(x @ x.transpose(1, 2), -1) @ x


def written_in_place(x):
    y = x.clone()
    y.add_(1).mul_(0.5)
    return y


def written_through_a_view(x):
    y = x.clone(memory_format=torch.contiguous_format)
    y.view(ROWS, -1)[:, ::2].mul_(1.5)
    y[:, 1:3] += 1
    return y


def taken_apart(x):
    head, tail = x.split((2, TOKENS - 2), 1)
    return torch.cat([tail, head], 1)


def stacked(x):
    return torch.stack(x.unbind(0)[::-1])


def gathered(x):
    return x[:, torch.tensor([3, 1, 4, 0, 2])]


def copied_into_new_memory(x):
    room = torch.empty(ROWS, TOKENS + 1, HIDDEN)
    room[:, :1] = 0
    room[:, 1:] = x
    return room[:, 1:] * 1.0


def decoy_beside(x):
    return torch.where(x.new_ones(x.shape) > 0, x, x.new_full((), float("nan")))


def masked_scores(x):
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
    return x + F.softmax(x.detach().nan_to_num(0, 0, 0) @ x.new_ones(HIDDEN, TOKENS) + mask, -1) @ x


STEPS = [
    residual,
    product,
    linear_over_tokens,
    normalised,
    attended,
    written_in_place,
    written_through_a_view,
    taken_apart,
    stacked,
    gathered,
    copied_into_new_memory,
    decoy_beside,
    masked_scores,
]


def spike(place):
    one = torch.zeros(ROWS * TOKENS * HIDDEN)
    one[place] = 1.0
    return one.view(ROWS, TOKENS, HIDDEN)


def root(place):
    return lambda x: torch.sqrt((x.square() + 1.0) * (1 - 2 * spike(place)))


def quotient(place):
    return lambda x: (x + 10.0) / (1 - spike(place))


def in_place_logarithm(place):
    def body(x):
        y = (x.square() + 1.0) * (1 - 2 * spike(place))
        y.log_()
        return y

    return body


FAULTS = {"sqrt": root, "div": quotient, "log_": in_place_logarithm}


class Step(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Program(nn.Module):
    def __init__(self, functions) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.linspace(-1, 1, ROWS * TOKENS * HIDDEN))
        self.steps = nn.Sequential(*map(Step, functions))

    def forward(self, x):
        return self.steps(self.start.view(ROWS, TOKENS, HIDDEN) * x).sum()


def batch():
    return {"x": torch.ones(ROWS, TOKENS, HIDDEN)}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    before=st.lists(st.sampled_from(STEPS), max_size=5),
    after=st.lists(st.sampled_from(STEPS), max_size=5),
    fault=st.sampled_from(sorted(FAULTS)),
    place=st.integers(0, ROWS * TOKENS * HIDDEN - 1),
)
def test_planted_fault_is_found_exactly(before, after, fault, place):
    program = Program([*before, FAULTS[fault](place), *after])
    found = located(program, lambda m, b: m(b["x"]), batch())
    assert (op_of(found), found.key.module) == (fault, f"steps.{len(before)}")
    assert (found.key.phase, found.origin) == ("forward", "born_here")
    assert found.first_bad.outputs[0].num_bad == 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(functions=st.lists(st.sampled_from(STEPS), min_size=1, max_size=8))
def test_healthy_programs_are_silent(functions):
    assert located(Program(functions), lambda m, b: m(b["x"]), batch()) is None


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, place):
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 - spike(ctx.place)), None


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    before=st.lists(st.sampled_from(STEPS), max_size=4),
    after=st.lists(st.sampled_from(STEPS), max_size=4),
    place=st.integers(0, ROWS * TOKENS * HIDDEN - 1),
)
def test_planted_backward_fault_is_found_exactly(before, after, place):
    functions = [*before, lambda x: Faulty.apply(x, place), *after]
    found = located(Program(functions), lambda m, b: m(b["x"]).sin(), batch())
    if (
        found is None
    ):  # the gradient that arrives there is exactly 0 only where a step ends the dependence
        raise AssertionError("the fault was not seen")
    assert (op_of(found), found.key.module) == ("div", f"steps.{len(before)}")
    assert (found.key.phase, found.first_bad.source.function) == ("backward", "backward")
