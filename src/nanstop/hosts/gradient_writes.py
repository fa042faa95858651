"""Which lines of a script write to gradients, or to weights between an update and the next forward:
watched where an account does not balance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from nanstop.hosts.lost_squares import LostSquares
from nanstop.measure.accounts.gradient_accounts import GradientAccounts
from nanstop.numerics.tensors import (
    HOLD_NOTHING,
    by_torch_alone,
    is_in_place,
    nonfinite,
    tensors,
    version,
)
from nanstop.replay.function_modes import OwnMode, is_crowded, put_on, take_off
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import user_line

__tracebackhide__ = passes_through

_GRAD: Any = cast("Any", Tensor).grad
_ALIASES = frozenset((cast("Any", Tensor).data.__get__, Tensor.detach))
"""What gives the same values as another tensor, whose writes no version of the first one counts."""
_ADDS = {"add_": 1.0, "sub_": -1.0, "__iadd__": 1.0, "__isub__": -1.0, "_foreach_add_": 1.0}
_SUMS = frozenset({"add", "sub", "rsub", "__add__", "__sub__", "__radd__", "__rsub__"})
_SINGLE = frozenset({Tensor, nn.Parameter, *HOLD_NOTHING})
"""What holds no other tensor."""
MOST_MADE = 64
"""Tensors made of gradients that are known at a time."""


class GradientWrites(OwnMode):
    """Tells the accounts each line that writes to a gradient which they look at while it is on,
    when one computes with such a gradient, and each line that writes to such weights.

    ``is_shown``: which files' lines are told.
    """

    def __init__(
        self,
        accounts: GradientAccounts,
        *,
        is_shown: Callable[[str], bool] = lambda _: True,
    ) -> None:
        super().__init__()
        self._accounts = accounts
        self._is_shown = is_shown
        self._only_weights = False
        self.num_stacks = 0
        """Threads that it was put on the stack of, and not taken off again."""
        self._parameters: dict[int, Tensor] = {}
        self._gradients: Any = WeakIdKeyDictionary()
        """Held weakly: the next tensor may have the id of one that is gone."""
        self._alias: Tensor | None = None
        self._of_weight: tuple[Tensor, Tensor] | None = None
        self._made: deque[Tensor] = deque(maxlen=MOST_MADE)
        self._squares = LostSquares()
        self._copies: list[Tensor] = []
        """Of weights, as the first update of the script's own found them."""

    def start(self, *, or_weights: bool = False) -> None:
        """Watch from here on what the accounts ask for, ``or_weights`` alone where they ask for
        those; nothing where the script has a function mode of its own.
        """
        only_weights = not self._accounts.wants_lines
        if only_weights and not (or_weights and self._accounts.wants_weight_lines):
            return
        with by_torch_alone():
            if not is_crowded():
                # A closure was evaluated inside the update: it is on.
                self.num_stacks += not take_off(self)
                put_on(self)
                self._only_weights = only_weights
                parameters = self._accounts.watched(only_weights=only_weights)
                self._parameters = {id(p): p for p in parameters}
                self._gradients.clear()
                for parameter in () if only_weights else parameters:
                    self._follow(parameter.grad, parameter)

    def stop(self) -> bool:
        """Watch no longer; return whether it was on."""
        if not self.num_stacks:
            return False
        self._alias = self._of_weight = None
        self._parameters = {}
        self._gradients.clear()
        self._made.clear()
        was_on = take_off(self)
        self.num_stacks -= was_on
        return was_on

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._only_weights:
            return self._with_weights(func, args, kwargs)
        with by_torch_alone():
            given = tensors((args, kwargs))
            held = [(t, version(t)) for t in given if self._is_known(t)]
            weights = [(t, version(t)) for t in given if self._weight(t) is not None]
            name = getattr(func, "__name__", "")
            if weights or held:
                self._before(name, given, kwargs)
            is_copy = self._is_copy_of_weight(name, given)
        result = func(*args, **kwargs)
        with by_torch_alone():
            if func == _GRAD.__set__ and id(args[0]) in self._parameters:
                self._follow(args[1], args[0])
                self._changed()
            elif func == _GRAD.__get__ and id(args[0]) in self._parameters:
                self._follow(result, args[0])
            elif func in _ALIASES and held:
                self._alias = result
            elif self._follow_weights(func, weights, result):
                self._told(self._accounts.moved_by)
            elif any(version(tensor) != before for tensor, before in held):
                self._changed()
            elif held and name != "__get__":
                self._accounts.read()
            is_of_gradient = self._after(name, given, result, is_copy=is_copy)
            if self._accounts.is_own:
                self._follow_kept(name, given, held)
                self._follow_squares(name, args, result, is_of_gradient=is_of_gradient)
        return result

    def _with_weights(self, func: Any, args: Any, kwargs: Any) -> Any:
        # An evaluation makes thousands of calls, of which few are given a weight.
        for one in (*args, *kwargs.values()) if self._of_weight is None else (args,):
            if id(one) in self._parameters or type(one) not in _SINGLE:
                break
        else:
            return func(*args, **kwargs)
        with by_torch_alone():
            given = tensors((args, kwargs))
            weights = [(t, version(t)) for t in given if self._weight(t) is not None]
        result = func(*args, **kwargs)
        if weights:
            with by_torch_alone():
                self._follow_weights(func, weights, result)
        return result

    def _follow_weights(self, func: Any, weights: list[tuple[Tensor, int]], result: Any) -> bool:
        """Follow what was done with weights, of these versions before it; return whether any was
        written to, whose line is told then.
        """
        if func in _ALIASES and weights:
            weight = self._weight(weights[0][0])
            self._of_weight = (result, weight) if weight is not None else None
            return False
        written = [t for t, before in weights if version(t) != before]
        found = [weight for t in written if (weight := self._weight(t)) is not None]
        if found:
            self._told(partial(self._accounts.rewrote, found))
        return bool(found)

    def _before(self, name: str, given: list[Tensor], kwargs: Any) -> None:
        """Tell what is about to be added to a weight."""
        weight = self._weight(given[0])
        if weight is None or not is_in_place(name):
            return
        factor = _ADDS.get(name)
        if factor is not None:
            factor *= float(kwargs.get("alpha", 1.0))
        self._accounts.guarded(self._accounts.moving, weight, given[1:], factor)

    def _follow_kept(self, name: str, given: list[Tensor], held: list[tuple[Tensor, int]]) -> None:
        """Tell of a tensor that takes up the gradient of a parameter: no weight and no gradient."""
        into = given[0] if is_in_place(name) and held else None
        if into is None or self._weight(into) is not None or self._is_known(into):
            return
        of = {self._gradients.get(gradient) for gradient, _ in held}
        line = user_line()
        if len(of) == 1 and line is not None and self._is_shown(line[0].co_filename):
            self._accounts.guarded(self._accounts.kept, into, of.pop(), line)

    def _follow_squares(self, name: str, args: Any, result: Any, *, is_of_gradient: bool) -> None:
        look = partial(self._squares.after, is_of_gradient=is_of_gradient)
        found = self._accounts.guarded(look, name, args, result)
        if found is not None:
            self._accounts.divided_by_nothing(*found)

    def _after(self, name: str, given: list[Tensor], result: Any, *, is_copy: bool) -> bool:
        """Follow what is made of gradients, and tell a line that makes another tensor of it and a
        weight; return whether it is of one.
        """
        is_of_gradient = any(self._is_known(t) or self._is_made(t) for t in given)
        if not is_of_gradient or name == "__get__":
            return is_of_gradient
        if self._accounts.wants_values and self._accounts.guarded(_overflows, given, result):
            self._told(self._accounts.overflowed)
        if not isinstance(result, Tensor):
            self._made += tensors(result)
            return True
        has_weight = any(
            self._weight(t) is not None and t.shape == result.shape and t is not result
            for t in given
        )
        if is_copy or (has_weight and name in _SUMS):
            self._told(partial(self._accounts.moved_by, is_elsewhere=True))
        self._made.append(result)
        return True

    def _is_copy_of_weight(self, name: str, given: list[Tensor]) -> bool:
        """Return whether what is about to be written to is no weight and equal to one: asked in
        the first window alone. Synchronises the device.
        """
        if not is_in_place(name) or len(given) < 2:
            return False
        into = given[0]
        if any(into is copy for copy in self._copies):
            return True
        if (
            not self._accounts.is_first_own
            or self._weight(into) is not None
            or self._is_known(into)
            or self._is_made(into)
        ):
            return False
        alike = (p for p in self._parameters.values() if p.shape == into.shape)
        is_copy = any(torch.equal(p.detach(), into.detach()) for p in alike)
        self._copies += [into] * is_copy
        return is_copy

    def _changed(self) -> None:
        self._accounts.guarded(self._accounts.changed)
        self._told(self._accounts.wrote)

    def _follow(self, gradient: Tensor | None, parameter: Tensor) -> None:
        if gradient is not None:
            self._gradients[gradient] = id(parameter)

    def _told(self, tell: Callable[[Any], None]) -> None:
        line = user_line()
        if line is not None and self._is_shown(line[0].co_filename):
            tell(line)

    def _weight(self, tensor: Tensor) -> Tensor | None:
        """Return the weight that a tensor is, or is an alias of."""
        if self._of_weight is not None and tensor is self._of_weight[0]:
            return self._of_weight[1]
        return self._parameters.get(id(tensor))

    def _is_made(self, tensor: Tensor) -> bool:
        return any(tensor is one for one in self._made)

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor is self._alias or tensor in self._gradients


def _overflows(given: list[Tensor], result: Any) -> bool:
    """Return whether numbers that are not finite were made of such that are. Synchronises the
    device.
    """
    made = [t for t in tensors(result) if not any(t is one for one in given)]
    return _are_bad(made) and not _are_bad(given)


def _are_bad(found: list[Tensor]) -> bool:
    return bool(nonfinite({str(place): one for place, one in enumerate(found) if one.numel()}))
