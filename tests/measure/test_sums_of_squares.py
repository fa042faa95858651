"""Which entries of a state cannot fall below zero is asked of the optimizer, not of their names."""

import pytest
import torch

from nanstop.measure.step_per_rate import sums_of_squares

KINDS = {
    torch.optim.AdamW: {"exp_avg_sq"},
    torch.optim.Adamax: {"exp_inf"},
    torch.optim.RMSprop: {"square_avg"},
    torch.optim.Adagrad: {"sum"},
    torch.optim.Adadelta: {"square_avg", "acc_delta"},
    torch.optim.Adafactor: {"row_var", "col_var"},
    torch.optim.SGD: set(),
    torch.optim.ASGD: set(),
}


class Own(torch.optim.Optimizer):
    """Keeps a sum of squares as ``nu``, where it began, and a signed average under the name that
    Adam has for its squares.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["began"] = parameter.clone()
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["nu"] = torch.zeros_like(parameter)
            state["exp_avg_sq"].lerp_(parameter.grad, 0.1)
            state["nu"].lerp_(parameter.grad.square(), 0.1)
            parameter.sub_(state["exp_avg_sq"] / state["nu"].sqrt(), alpha=1e-3)


def group_of(kind, **options):
    return kind([torch.nn.Parameter(torch.ones(4, 4))], **options).param_groups[0]


@pytest.mark.parametrize("kind", KINDS)
def test_moments_that_cannot_be_negative_are_found_by_what_they_do(kind):
    if kind is torch.optim.Adagrad and torch.__version__ < "2.7":
        pytest.skip("its state is made by its constructor, which is not run")
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    assert sums_of_squares(kind, group_of(kind, **options)) == KINDS[kind]


def test_an_optimizer_of_the_scripts_own_is_asked_too():
    parameters = [torch.nn.Parameter(torch.ones(4, 4))]
    group = Own(parameters, {"lr": 1e-3}).param_groups[0]
    assert sums_of_squares(Own, group) == {"nu"}


def test_what_cannot_be_tried_has_none():
    assert sums_of_squares(torch.optim.LBFGS, group_of(torch.optim.LBFGS)) == frozenset()
