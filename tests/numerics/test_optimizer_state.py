"""State that no update can have made, told from all that real optimizers make."""

import math

import pytest
import torch

from nanstop.numerics.optimizer_state import state_faults


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
