"""Models whose class has a ``__call__`` of its own around that of ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class InnerCall:
    """Calls a module as ``call``, that of ``nn.Module``, does: what a ``__call__`` of its class
    does before that was done once, and is not to be done again.

    ``forward``: the module's, which names the arguments.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module) -> None:
        self._call, self._module = call, module
        self.forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._module, *args, **kwargs)


def calls_itself(kind: type) -> bool:
    """Return whether instances of a class are called by a ``__call__`` before ``nn.Module``'s."""
    found = next((one for one in kind.__mro__ if "__call__" in vars(one)), nn.Module)
    return found is not nn.Module
