"""Methods of a class are replaced whatever they are written in, and put back as they were."""

import pytest
import torch

from nanstop.hosts.patch_table import Table


class Owner(dict):
    @classmethod
    def written(cls, *values):
        return cls, values

    fromkeys = vars(dict)["fromkeys"]  # in C, as `Function.apply` is since torch 2.15


class Heir(Owner):
    pass


@pytest.mark.parametrize("name", ["written", "fromkeys"])
@pytest.mark.parametrize("kind", [Owner, Heir])
def test_a_method_of_a_class_gets_the_class_that_it_is_called_on(name, kind):
    seen, table, before = [], Table(), vars(Owner)[name]

    def stand_in(original, called, *args):
        seen.append((called, args))
        return original(called, *args)

    alone = getattr(kind, name)((1, 2), 3)
    table.replace(Owner, name, stand_in)
    assert getattr(kind, name)((1, 2), 3) == alone
    assert type(getattr(kind, name)((1, 2), 3)) is type(alone)
    assert seen == [(kind, ((1, 2), 3))] * 2
    table.undo()
    assert vars(Owner)[name] is before


def test_functions_of_a_script_are_called_as_ever():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    kinds, table = [], Table()
    table.replace(
        torch.autograd.Function,
        "apply",
        lambda original, *args: kinds.append(args[0]) or original(*args),
    )
    x = torch.ones(2, requires_grad=True)
    try:
        Twice.apply(x).sum().backward()
    finally:
        table.undo()
    assert (kinds, x.grad.tolist()) == ([Twice], [2.0, 2.0])


@pytest.mark.parametrize(
    ("owner", "name", "given"),
    [
        (torch.nn.Module, "load_state_dict", {"state_dict": {}}),
        (torch.Tensor, "register_hook", {"hook": print}),
        (torch.amp.GradScaler, "unscale_", {"optimizer": 3}),
    ],
)
def test_what_is_given_by_name_comes_to_its_place(owner, name, given):
    seen, table = [], Table()
    table.replace(owner, name, lambda _, own, given, **rest: seen.append((own, given, rest)))
    try:
        getattr(owner, name)(1, **given)
        getattr(owner, name)(2, *given.values(), other=4)
    finally:
        table.undo()
    (value,) = given.values()
    assert seen == [(1, value, {}), (2, value, {"other": 4})]


def test_a_backward_whose_loss_is_given_by_name():
    weight, seen, table = torch.ones(2, requires_grad=True), [], Table()

    def stand_in(original, loss, *args, **kwargs):
        seen.append(loss)
        return original(loss, *args, **kwargs)

    table.replace(torch.autograd, "backward", stand_in)
    loss = weight.sum()
    try:
        torch.autograd.backward(grad_tensors=None, tensors=loss)
    finally:
        table.undo()
    assert seen[0] is loss
    assert weight.grad.tolist() == [1.0, 1.0]
