"""A model called with weights that are not its own, as ``torch.func.functional_call`` does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

WEIGHTS = "parameters_and_buffers"
"""The keyword under which a recorded call has them:
arguments like any other, but no part of the batch.
"""


class GivenWeights:
    """Calls a module with weights that are an argument.

    ``forward``: the module's, which names the other ones.

    ``call`` takes the module, the weights, a tuple of arguments and a dict of further ones.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module) -> None:
        self._call = call
        self._module = module
        self.forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop(WEIGHTS)
        return self._call(self._module, given, args, kwargs)

    def of(self, module: nn.Module) -> GivenWeights:
        """Return the same for another module."""
        return GivenWeights(self._call, module)


def given_weights(
    original: Callable[..., Any],
    module: nn.Module,
    given: Any,
    args: Any = None,
    kwargs: Any = None,
    **options: Any,
) -> tuple[GivenWeights, tuple[Any, ...], dict[str, Any]]:
    """Return a call of ``original``, torch's ``_functional_call``, and the arguments that it has
    as a model call.
    """
    inputs = () if args is None else args if isinstance(args, tuple) else (args,)
    return (
        GivenWeights(partial(original, **options), module),
        inputs,
        {**(kwargs or {}), WEIGHTS: given},
    )
