"""What a module was given, so that it can be called with the same once more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nanstop.replay.function_modes import FunctionMode

_TENSOR = object()
"""Stands in the place of a tensor among leaves."""
_LASTING = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Given:
    """``tensors``: those among the arguments of a call, in order; whoever calls again may give
    others in their places.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._own: tuple[Any, Any] | None = (tuple(args), dict(kwargs))
        leaves, self._form = pytree.tree_flatten(self._own)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._as_now = [_TENSOR if isinstance(one, Tensor) else _as_now(one) for one in leaves]

    def first(self, function: Callable[..., Any]) -> tuple[Any, bool]:
        """Call a function with what was given, the very objects, and let go of those; return what
        it returns, and whether lists and the like are as they were.
        """
        assert self._own is not None
        own, self._own = self._own, None
        before, form = pytree.tree_flatten(own)
        args, kwargs = own
        result = function(*args, **kwargs)
        after, form_after = pytree.tree_flatten(own)
        is_whole = form == form_after and list(map(id, before)) == list(map(id, after))
        return result, is_whole

    def again(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Call a function with what was given, as it was then."""
        leaves = with_tensors([_as_now(leaf) for leaf in self._as_now], tensors)
        args, kwargs = pytree.tree_unflatten(leaves, self._form)
        return function(*args, **kwargs)


def without_tensors(made: Any) -> tuple[list[Any], Any, list[Tensor]]:
    """Return the leaves of a result, what they are in, and the tensors among them."""
    leaves, form = pytree.tree_flatten(made)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], form, tensors


def with_tensors(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Return leaves with tensors in their places."""
    following = iter(tensors)
    return [next(following) if leaf is _TENSOR else leaf for leaf in leaves]


def _as_now(value: Any) -> Any:
    """Return a copy of what a module is given, which may be written to meanwhile (a cache of keys
    and values); its tensors are the same ones.
    """
    lasts = value is None or value is _TENSOR or isinstance(value, (*_LASTING, nn.Module))
    if lasts or callable(value):
        return value
    with _SharedTensors():
        return copy.deepcopy(value)


class _SharedTensors(FunctionMode):
    """Has a copy of an object hold the tensors of the object."""

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **kwargs)
