"""A line computed in float32: what it reads in half precision is widened, and stays wide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from nanstop.numerics.tensors import HALF
from nanstop.remedies.forms.calls import Call

_NO_VALUES = frozenset({"", "get", "set", "setitem", "half", "bfloat16", "to", "type", "type_as"})
"""Calls that compute nothing: attributes, writes and the script's own casts."""


def answer(call: Call, at_line: Callable[[], bool]) -> Any:
    """Return what a call returns; what it makes of tensors in half precision, in float32 where the
    line is meant.
    """
    given = (call.args, dict(call.kwargs))
    leaves = tree_leaves(given)
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    is_wide = not any(map(_is_narrow, leaves))
    if not tensors or is_wide or call.name in _NO_VALUES or not at_line():
        return call.run()
    args, kwargs = tree_map(_wide, given)
    with torch.autocast(tensors[0].device.type, enabled=False):
        return replace(call, args=args, kwargs=kwargs).run()


def _is_narrow(value: Any) -> bool:
    """Return whether a value is a tensor in half precision, or asks for one."""
    kind = value.dtype if isinstance(value, Tensor) else value
    return isinstance(kind, torch.dtype) and kind in HALF


def _wide(value: Any) -> Any:
    if not _is_narrow(value):
        return value
    return value.float() if isinstance(value, Tensor) else torch.float32
