"""What a step is of is measured: no optimizer's name is asked."""

import sys

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanstop.measure.step_per_rate import step_per_rate
from nanstop.records import StepPerRate

MATRIX = [torch.nn.Parameter(torch.ones(2, 2))]


class Signs(torch.optim.Optimizer):
    """A step of three rates in the direction of the gradient's signs."""

    def __init__(self, params, lr, flips=False, shrink=0.0):
        super().__init__(params, {"lr": lr, "flips": flips, "shrink": shrink})

    def step(self, closure=None):
        group = self.param_groups[0]
        for p in group["params"]:
            p.data *= 1 - group["lr"] * group["shrink"]
            p.data -= 3 * group["lr"] * p.grad.sign()
            if group["flips"]:
                raise RuntimeError("never with a matrix of its own")


class Adamant(torch.optim.SGD):
    """Moves by the gradient."""


class Own(torch.optim.Adamax):
    """Moves by the rate."""


def measured(optimizer):
    return step_per_rate(type(optimizer), optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("kind", "options", "length"),
    [
        (torch.optim.Adam, {}, 1.0),
        (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}, 1.0),
        (torch.optim.NAdam, {}, None),
        (Own, {}, 1.0),
        (Signs, {"lr": 7.0}, 3.0),
        (Signs, {"lr": 7.0, "shrink": 0.5}, 3.0),
    ],
)
def test_steps_that_are_a_rate_whatever_the_gradient(kind, options, length):
    found = measured(kind(MATRIX, **{"lr": 0.1, **options}))
    assert found is not None
    assert not found.relative
    assert length is None or found == StepPerRate(length=length)
    assert 0.1 < found.length < 5.0


def test_steps_in_sizes_of_the_weights():
    found = measured(torch.optim.Adafactor(MATRIX, lr=0.1))
    assert found == StepPerRate(length=pytest.approx(1.0, rel=0.05), relative=True)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (Adamant, {"lr": 0.1}),
        (torch.optim.LBFGS, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Rprop, {}),
        (Signs, {"lr": 0.1, "flips": True}),
    ],
)
def test_steps_that_depend_on_the_gradient_or_cannot_be_tried(kind, options):
    assert measured(kind(MATRIX, **options)) is None


def test_nothing_hears_of_the_trial():
    optimizer, heard = torch.optim.Adam(MATRIX), []
    optimizer.register_step_post_hook(lambda *_: heard.append(1))
    hook = register_optimizer_step_post_hook(lambda *_: heard.append(2))
    state = torch.get_rng_state()
    measured(optimizer)
    hook.remove()
    assert heard == []
    assert torch.equal(state, torch.get_rng_state())
    assert not optimizer.state


HELD, COUNTED = [torch.nn.Parameter(torch.ones(2, 2))], 0


class ReachesFurther(torch.optim.Optimizer):
    """Writes to more than its groups hold. ``how``: to what."""

    def __init__(self, params, how):
        super().__init__(params, {"lr": 1e-3, "how": how})

    @torch.no_grad()
    def step(self, closure=None):
        global COUNTED
        COUNTED += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())
            if group["how"] == "weights":
                torch._foreach_mul_(HELD, 0.5)
            elif group["how"] == "gradients":
                for p in HELD:
                    p.grad.data /= 2.0
            elif group["how"] == "lets go":
                for p in HELD:
                    p.grad = None


class Counting(torch.optim.AdamW):
    """Counts on its class, in a list and in a method that it comes to."""

    calls, kept = 0, []

    def count(self):
        Counting.calls += 1
        self.kept.append(Counting.calls)
        sys.stdout.write("counted")

    def step(self, closure=None):
        self.count()
        return super().step(closure)


def test_what_a_step_counts_is_what_the_run_has_asked(capsys):
    assert measured(Counting(MATRIX, lr=1e-3)) == StepPerRate(length=1.0)
    assert (Counting.calls, Counting.kept, capsys.readouterr().out) == (0, [], "")


def test_a_step_that_reads_a_generator_is_not_tried():
    class FromAStock(torch.optim.AdamW):
        rates = (rate for rate in [1e-3, 1e-4])

        def step(self, closure=None):
            self.param_groups[0]["lr"] = next(FromAStock.rates)
            return super().step(closure)

    assert measured(FromAStock(MATRIX, lr=1e-3)) is None
    assert list(FromAStock.rates) == [1e-3, 1e-4]


@pytest.mark.parametrize(
    ("how", "length"), [("", 1.0), ("weights", None), ("gradients", None), ("lets go", 1.0)]
)
def test_a_step_of_a_scripts_own_changes_nothing_of_the_run(how, length):
    (held,) = HELD
    held.grad = torch.full((2, 2), 3.0)
    found = measured(ReachesFurther(HELD, how))
    assert found == (length and StepPerRate(length=length))
    assert held.equal(torch.ones(2, 2))
    assert held.grad is not None
    assert held.grad.equal(torch.full((2, 2), 3.0))
    assert (held._version, held.grad._version, COUNTED) == (0, 0, 0)
