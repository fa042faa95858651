"""State that no update can have made, told from all that real optimizers make."""

import math

import pytest
import torch
from torch import nn

from nanstop.hosts import compat
from nanstop.numerics.optimizer_state import innermost, state_faults


def trained(kind, **settings):
    """Return an optimizer of ``kind`` after three steps, and its named parameters."""
    torch.manual_seed(0)
    named = [
        ("w", torch.nn.Parameter(torch.randn(4, 6))),
        ("b", torch.nn.Parameter(torch.randn(6))),
    ]
    optimizer = kind([parameter for _, parameter in named], lr=1e-2, **settings)
    for _ in range(3):
        for _, parameter in named:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer, named


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.Adafactor,
    ],
)
def test_what_optimizers_make_is_possible(kind):
    assert state_faults(*trained(kind)) == ()


def test_options_that_keep_more_state_are_possible():
    assert state_faults(*trained(torch.optim.SGD, momentum=0.9)) == ()
    assert state_faults(*trained(torch.optim.AdamW, amsgrad=True)) == ()
    assert state_faults(*trained(torch.optim.RMSprop, momentum=0.9, centered=True)) == ()


def test_faults_are_named_with_what_is_wrong():
    optimizer, named = trained(torch.optim.AdamW)
    first, second = (optimizer.state[parameter] for _, parameter in named)
    first["exp_avg_sq"][0, :2] = -1.0
    first["exp_avg"][1, 1] = math.nan
    second["exp_avg"] = torch.zeros(5)
    found = [
        (f.name, f.kind, f.num_bad, f.detail)
        for f in state_faults(optimizer, named, {"exp_avg_sq"})
    ]
    assert found == [
        ("w:exp_avg", "nonfinite", 1, ""),
        ("w:exp_avg_sq", "negative", 2, ""),
        ("b:exp_avg", "shape", 0, "[5] for a parameter of [6]"),
    ]


def test_second_moments_that_were_kept_in_a_narrow_format_have_vanished():
    optimizer, named = trained(torch.optim.AdamW)
    state = optimizer.state[named[0][1]]
    assert bool((state["exp_avg"] != 0).all())
    state["exp_avg_sq"][0] = 0.0
    (fault,) = state_faults(optimizer, named)
    assert (fault.name, fault.kind, fault.num_bad) == (
        "w:exp_avg_sq",
        "vanished",
        state["exp_avg"][0].numel(),
    )
    state["exp_avg"][0] = 0.0
    assert state_faults(optimizer, named) == ()


def test_no_optimizer_and_no_state_have_no_faults():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert state_faults(None, [("w", parameter)]) == ()
    assert state_faults(torch.optim.AdamW([parameter]), [("w", parameter)]) == ()


class Wrapping(torch.optim.Optimizer):
    """What a script wraps around another optimizer, with state of its own (Lookahead)."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


class Named(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.optimizer = "sgd"


def test_which_optimizer_holds_the_moments_and_which_one_the_script_made():
    accelerate = pytest.importorskip("accelerate")
    for made in (Named, torch.optim.AdamW, lambda given: Wrapping(torch.optim.AdamW(given))):
        optimizer = made(nn.Linear(2, 2).parameters())
        holds = optimizer.optimizer if isinstance(optimizer, Wrapping) else optimizer
        wrapped = accelerate.Accelerator(cpu=True).prepare(optimizer)
        derived = type("Derived", (type(wrapped),), {})(optimizer)
        for one in (optimizer, wrapped, derived):
            assert innermost(one) is holds
            assert compat.unwrapped_optimizer(one) is optimizer
    assert compat.unwrapped_optimizer(None) is None
