"""A loss whose gradients a script takes with ``torch.func``: run again, it is differentiated by a
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from nanstop.frozen import frozen
from nanstop.hosts.loop.asked_gradients import Given
from nanstop.hosts.loop.function_micro import FunctionMicro
from nanstop.numerics.tensors import by_torch_alone, tensors
from nanstop.replay.rng import RngState
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

_GRADIENTS = ("grad", "grad_and_value")
"""What a script without an optimizer makes its updates of."""


@frozen
class Functional:
    """What ``torch.func.grad`` was given. ``has_value``: of ``grad_and_value``."""

    function: Callable[..., Any]
    argnums: int | tuple[int, ...]
    has_aux: bool
    has_value: bool

    @classmethod
    def of(cls, name: str, func: Any, argnums: Any = 0, has_aux: bool = False) -> Functional:
        """Return what ``torch.func.grad`` or ``grad_and_value`` was given."""
        return cls(func, argnums, has_aux, name == "grad_and_value")

    def micro(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, rng: RngState
    ) -> tuple[FunctionMicro, Given]:
        """Return the call that had a ``result`` as a micro-batch, and the gradients that it gave,
        each with a leaf of the same values. ``rng``: before it.
        """
        places = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        places = tuple(place % len(args) for place in places)
        with by_torch_alone():
            moved = dict(zip(places, map(_leaves, (args[place] for place in places)), strict=True))
        gradients, value = result if self.has_value or self.has_aux else (result, None)
        known: Any = value

        def loss(given: Mapping[str, Any]) -> Tensor:
            inputs = [moved.get(at, given.get(f"arg{at}")) for at in range(len(args))]
            found = self.function(*inputs, **{name: given[name] for name in kwargs})
            return found[0] if self.has_aux else found

        batch = {f"arg{at}": one for at, one in enumerate(args) if at not in moved} | {**kwargs}
        micro = FunctionMicro(loss, batch, backward=_backward, rng=rng, reduced=False)
        if self.has_value:
            micro.loss = (known[0] if self.has_aux else known).detach()
        leaves = [leaf for place in places for leaf in tensors(moved[place])]
        return micro, list(zip(leaves, tensors(gradients), strict=True))


def watched(
    name: str,
    made: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loops: Callable[[], Any],
) -> Callable[..., Any]:
    """Return what stands for the function that ``torch.func.NAME`` has made of its arguments:
    ``loops`` gives what is to see its calls, or None.
    """
    form = Functional.of(name, *args, **kwargs) if name in _GRADIENTS else None

    @wraps(made)
    def called(*args: Any, **kwargs: Any) -> Any:
        watching = loops()
        if watching is None:
            return made(*args, **kwargs)
        return watching.functional(made, form, args, kwargs)

    return called


def _leaves(given: Any) -> Any:
    return _pytree.tree_map_only(Tensor, lambda one: one.detach().requires_grad_(), given)


def _backward(loss: Tensor) -> Tensor:
    torch.autograd.backward(loss)
    return loss.detach()
