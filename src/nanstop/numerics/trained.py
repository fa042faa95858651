"""Which parameters an optimizer holds, and which of them it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, filterfalse
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nanstop.frozen import frozen

_REQUIRES_GRAD, _GRADIENT = attrgetter("requires_grad"), attrgetter("grad")
without_none: Callable[[Iterable[Any]], Iterator[Any]] = partial(filterfalse, partial(is_, None))
"""Goes through the values that are not None: asked of all parameters in each step, so without a
line of Python for each.
"""


def held_by(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, or of what has groups as one; none of None."""
    return list(chain.from_iterable(_groups(optimizer)))


def gradients_held(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that there are, in order."""
    return list(without_none(map(_GRADIENT, parameters)))


def _groups(optimizer: Any) -> list[list[Tensor]]:
    return [group["params"] for group in optimizer.param_groups] if optimizer is not None else []


@frozen
class Trained:
    """The parameters that an optimizer holds, and whether each takes a gradient.

    Compared before each update, so without a call for each parameter.
    """

    groups: tuple[tuple[Tensor, ...], ...]
    takes: tuple[tuple[bool, ...], ...]

    @classmethod
    def by(cls, optimizer: Optimizer | None) -> Trained:
        held = _groups(optimizer)
        return cls(tuple(map(tuple, held)), tuple(tuple(map(_REQUIRES_GRAD, one)) for one in held))

    def is_by(self, optimizer: Optimizer | None) -> bool:
        """Return whether an optimizer trains the same ones."""
        held = _groups(optimizer)
        if list(map(len, held)) != list(map(len, self.groups)):
            return False
        for now, then, takes in zip(held, self.groups, self.takes, strict=True):
            if not all(map(is_, now, then)) or tuple(map(_REQUIRES_GRAD, now)) != takes:
                return False
        return True

    def ids(self) -> frozenset[int]:
        """Return the ids of those that take a gradient."""
        pairs = zip(chain(*self.groups), chain(*self.takes), strict=True)
        return frozenset(id(parameter) for parameter, takes in pairs if takes)
