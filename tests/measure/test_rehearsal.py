"""An update is judged by its length in float32, whoever made it; and no healthy one is accused."""

import random

import pytest
import torch
from torch import nn

from nanstop.measure.own_memory import WritesElsewhereError
from nanstop.measure.rehearsal import CannotRehearseError, Rehearsal

torch.set_num_threads(1)
KERNELS = [{"fused": True}, {"foreach": True}, {"foreach": False}]


def layer(dtype, size=32):
    torch.manual_seed(0)
    return nn.Linear(size, size, bias=False).to(dtype)


def followed(model, optimizer, *, size=1e-4, num_updates=4, apply=True, redirect=None):
    """Rehearse updates from small gradients of both signs, and return the greatest ratio that
    each has shown.
    """
    generator, rehearsal, ratios = torch.Generator().manual_seed(1), None, []
    for index in range(num_updates):
        for parameter in model.parameters():
            gradient = size * torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
        if redirect is not None:
            redirect(model, index)
        rehearsal = rehearsal or Rehearsal(optimizer, model)
        moved = rehearsal.rehearse()
        ratios.append(max(m.length / m.in_float32 if m.in_float32 else 0.0 for m in moved))
        if apply:
            optimizer.step()
    return ratios, moved


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adam_in_float16_is_ruinous_with_every_kernel(kernel, kind):
    model = layer(torch.float16)
    ratios, moved = followed(model, kind(model.parameters(), lr=1e-4, **kernel), num_updates=3)
    assert all(m.is_ruinous for m in moved)
    # The fused kernel computes in float32:
    # only the second moment that it stores is lost, which the next update misses.
    assert (ratios[0] < 2.0) == bool(kernel.get("fused"))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.RMSprop, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.AdamW, {"eps": 1e-4, "foreach": True}),
    ],
)
def test_others_whose_state_vanishes_are_ruinous_too(kind, options):
    model = layer(torch.float16)
    _, moved = followed(model, kind(model.parameters(), lr=1e-3, **options), size=3e-3)
    assert all(m.is_ruinous for m in moved)


class SignOfMomentum(torch.optim.Optimizer):
    """Lion, as it is written by hand."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_((0.9 * m + 0.1 * p.grad).sign(), alpha=-group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


class InverseOfSquares(SignOfMomentum):
    """An optimizer of one's own whose arithmetic float16 does not hold, with no state at all."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / ((p.grad * p.grad).sqrt() + 1e-7))


class Compensated(torch.optim.Optimizer):
    """SGD that keeps what rounding took (Kahan):
    many updates of nothing, then one of all that was kept.
    """

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                rest = self.state[p].setdefault("rest", torch.zeros_like(p))
                rest.sub_(p.grad, alpha=group["lr"])
                before = p.clone()
                p.add_(rest)
                rest.add_(before - p)


def test_an_optimizer_of_ones_own():
    model = layer(torch.float16)
    _, moved = followed(model, InverseOfSquares(model.parameters(), 1.0), num_updates=1, size=1e-5)
    assert all(m.is_ruinous for m in moved)


HEALTHY = [
    (torch.bfloat16, torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
    (torch.bfloat16, torch.optim.AdamW, {"lr": 1e-4, "foreach": True}),
    (torch.bfloat16, torch.optim.AdamW, {"lr": 1e-7}),
    (torch.bfloat16, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.5}),
    (torch.bfloat16, torch.optim.RMSprop, {"lr": 1e-4}),
    (torch.bfloat16, torch.optim.Adafactor, {"lr": 1e-3}),
    (torch.float16, torch.optim.SGD, {"lr": 1.0}),
    (torch.float16, torch.optim.SGD, {"lr": 1.0, "momentum": 0.9, "nesterov": True}),
    (torch.float16, SignOfMomentum, {"lr": 1e-4}),
    (torch.float16, torch.optim.AdamW, {"lr": 1e-4, "eps": 1e-3, "fused": True}),
    (torch.bfloat16, Compensated, {"lr": 0.1}),
    (torch.float16, Compensated, {"lr": 0.1}),
]


@pytest.mark.parametrize(("dtype", "kind", "options"), HEALTHY)
@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_healthy_updates_are_not_accused(dtype, kind, options, size):
    model = layer(dtype)
    ratios, _ = followed(model, kind(model.parameters(), **options), num_updates=10, size=size)
    assert max(ratios) < 4.0


@pytest.mark.parametrize("value", [0.0, 1e-6])
def test_weights_of_zero_and_gradients_of_zero(value):
    model = layer(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(value)

    def nothing_comes(net, index):
        if index:
            net.weight.grad.zero_()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ratios, moved = followed(model, optimizer, num_updates=6, redirect=nothing_comes)
    assert max(ratios) < 2.0
    assert not any(m.is_ruinous for m in moved)


def test_restored_moments_are_gone_on_from():
    model = layer(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    followed(model, optimizer, num_updates=5)
    ratios, _ = followed(model, optimizer, num_updates=2, size=1e-3)
    assert max(ratios) < 2.0


def test_a_rehearsal_leaves_no_trace():
    model = layer(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    told = []
    optimizer.register_step_pre_hook(lambda *_: told.append("step"))
    twin = layer(torch.float16)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-4, fused=True)
    state = torch.get_rng_state(), random.getstate()
    followed(model, optimizer, num_updates=3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        twin.weight.grad = (1e-4 * torch.randn(32, 32, generator=generator)).half()
        plain.step()
    assert told == ["step"] * 3
    assert torch.equal(model.weight, twin.weight)
    assert optimizer._opt_called
    assert scheduler.last_epoch == 0
    for key, value in plain.state[twin.weight].items():
        assert torch.equal(optimizer.state[model.weight][key], value)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


def test_what_was_left_out_is_rehearsed_as_if_it_had_not_been():
    model = layer(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rehearsal = None
    for scale in (1.0, 7.0, 1.0):
        model.weight.grad = torch.full_like(model.weight, scale)
        rehearsal = rehearsal or Rehearsal(optimizer, model)
        (moved,) = rehearsal.rehearse()
        rehearsal.take_back()
    assert moved.in_float32 == pytest.approx(1e-3 * 32, rel=0.01)


class Global(SignOfMomentum):
    """It has hold of more than its own tensors."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.seen = {}


class Stochastic(SignOfMomentum):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.rand_like(p) - 0.5, alpha=group["lr"])


@pytest.mark.parametrize("kind", [Global, Stochastic])
def test_optimizers_that_are_more_than_arithmetic_are_not_judged(kind):
    model = layer(torch.float16)
    optimizer, state = kind(model.parameters(), 1e-3), torch.get_rng_state()
    with pytest.raises(CannotRehearseError, match=r"holds a dict|draws random numbers"):
        followed(model, optimizer)
    assert torch.equal(torch.get_rng_state(), state)


class Remembering(torch.optim.AdamW):
    """Its rate depends on how often it was called."""

    calls, rates = 0, []

    @torch.no_grad()
    def step(self, closure=None):
        Remembering.calls += 1
        self.rates.append(1e-3 / Remembering.calls)
        for group in self.param_groups:
            group["lr"] = self.rates[-1]
        return super().step(closure)


STOCK = map(int, range(3))


class FromAStock(SignOfMomentum):
    def step(self, closure=None):
        next(STOCK)
        return super().step(closure)


class Beside(SignOfMomentum):
    """Writes to more than its own tensors."""

    far = torch.ones(2)

    def step(self, closure=None):
        Beside.far.mul_(0.5)
        return super().step(closure)


def test_what_a_step_remembers_is_what_the_run_has_asked():
    model = layer(torch.float16)
    followed(model, Remembering(model.parameters(), 1e-3), num_updates=3)
    assert Remembering.calls == len(Remembering.rates) == 3


@pytest.mark.parametrize("kind", [FromAStock, Beside])
def test_a_step_that_would_change_more_of_the_script_is_not_rehearsed(kind):
    model = layer(torch.float16)
    with pytest.raises(WritesElsewhereError):
        followed(model, kind(model.parameters(), 1e-3))
    assert next(STOCK) == int(kind is Beside)
    assert Beside.far.equal(torch.ones(2))


def test_the_unscaling_of_a_fused_step_is_taken_over():
    model = layer(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.01, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    model.weight.grad = torch.full_like(model.weight, 10.24)
    rehearsal = Rehearsal(optimizer, model)
    (moved,) = rehearsal.rehearse()
    # g / (g + eps) of a gradient of 0.01: half of the rate, and all of it were the scale still on.
    assert moved.in_float32 == pytest.approx(0.16, rel=0.01)
    assert moved.length == pytest.approx(0.16, rel=0.02)
    optimizer.found_inf.fill_(1.0)
    assert rehearsal.rehearse() == ()


def test_a_gradient_that_stays_away_moves_a_weight_thousands_of_learning_rates():
    """The figure of the page of NS102."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)
    moved = []
    for gradient in (1e-4, 0.0):
        before = weight.detach().clone()
        weight.grad = torch.tensor([gradient], dtype=torch.float16)
        optimizer.step()
        moved.append(float((weight.detach() - before).abs()))
    assert moved[0] == pytest.approx(1e-4, rel=0.01)
    assert moved[1] == pytest.approx(4700 * 1e-4, rel=0.02)
