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
