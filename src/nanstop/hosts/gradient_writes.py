"""Which lines of a script write to gradients, or to weights between an update and the next forward:
watched where an account does not balance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from nanstop.measure.gradient_accounts import GradientAccounts
from nanstop.numerics.tensors import by_torch_alone, tensors, version
from nanstop.replay.function_modes import OwnMode, is_crowded, put_on, take_off
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import user_line

__tracebackhide__ = passes_through

_GRAD: Any = cast("Any", Tensor).grad
_ALIASES = frozenset((cast("Any", Tensor).data.__get__, Tensor.detach))
"""What gives the same values as another tensor, whose writes no version of the first one counts."""


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
        self._parameters: set[int] = set()
        self._gradients: set[int] = set()
        self._alias: Tensor | None = None
        self._of_weight: Tensor | None = None

    def start(self) -> None:
        """Watch from here on; nothing where the script has a function mode of its own."""
        with by_torch_alone():
            if not is_crowded():
                put_on(self)
                parameters = self._accounts.watched()
                self._parameters = {id(p) for p in parameters}
                self._gradients = {id(p.grad) for p in parameters if p.grad is not None}

    def stop(self) -> bool:
        """Watch no longer; return whether it was on."""
        self._alias = self._of_weight = None
        self._gradients.clear()
        return take_off(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with by_torch_alone():
            given = list(tensors((args, kwargs)))
            held = [(t, version(t)) for t in given if self._is_known(t)]
            weights = [(t, version(t)) for t in given if self._is_weight(t)]
        result = func(*args, **kwargs)
        with by_torch_alone():
            if func == _GRAD.__set__ and id(args[0]) in self._parameters:
                self._gradients.add(id(args[1]))
                self._changed()
            elif func == _GRAD.__get__ and id(args[0]) in self._parameters:
                self._gradients.add(id(result))
            elif func in _ALIASES and held:
                self._alias = result
            elif func in _ALIASES and weights:
                self._of_weight = result
            elif any(version(tensor) != before for tensor, before in weights):
                self._told(self._accounts.rewrote)
            elif any(version(tensor) != before for tensor, before in held):
                self._changed()
            elif held and getattr(func, "__name__", "") != "__get__":
                self._accounts.read()
        return result

    def _changed(self) -> None:
        self._accounts.guarded(self._accounts.changed)
        self._told(self._accounts.wrote)

    def _told(self, tell: Callable[[Any], None]) -> None:
        line = user_line()
        if line is not None and self._is_shown(line[0].co_filename):
            tell(line)

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor is self._of_weight or id(tensor) in self._parameters

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor is self._alias or id(tensor) in self._gradients
