"""A line computed in float32: what it reads in half precision, or autocast would round to that, is
wide, and stays so.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from nanstop.numerics.tensors import HALF
from nanstop.remedies.forms.calls import Call
from nanstop.rewrite.operations import CASTS

_NO_VALUES = frozenset({"", "get", "set", "setitem"})
"""Calls that compute nothing: attributes and writes."""
_CASTS = CASTS | {"type_as"}
"""The script's own."""


def answer(call: Call, at_line: Callable[[], bool]) -> Any:
    """Return what a call returns; what it makes of tensors in half precision, or under autocast, in
    float32 where the line is meant.
    """
    return call.run() if call.name in _CASTS else uncast(call, at_line)


def uncast(call: Call, at_line: Callable[[], bool]) -> Any:
    """Return what ``answer`` does, and what a cast to half precision is of in float32."""
    given = (call.args, dict(call.kwargs))
    leaves = tree_leaves(given)
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    if not tensors or call.name in _NO_VALUES:
        return call.run()
    is_half = call.name in ("half", "bfloat16")
    may_round = is_half or any(map(_is_narrow, leaves)) or _rounds(tensors[0].device.type)
    if not may_round or not at_line():
        return call.run()
    if is_half:
        return tensors[0].float()
    args, kwargs = tree_map(_wide, given)
    with out_of_autocast(tensors[0].device.type):
        return replace(call, args=args, kwargs=kwargs).run()


class AndBack:
    """Answers as ``answer`` does; what the line gives is as narrow as what it has read wherever
    another line reads it.
    """

    def __init__(self) -> None:
        self._formats: MutableMapping[Tensor, torch.dtype] = WeakIdKeyDictionary()

    def answer(self, call: Call, at_line: Callable[[], bool]) -> Any:
        given = (call.args, dict(call.kwargs))
        tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        narrow = [one.dtype for one in tensors if one.dtype in HALF]
        kept = [self._formats[one] for one in tensors if one in self._formats]
        if not (narrow or kept) or call.name in _NO_VALUES:
            return call.run()
        if at_line():
            result = answer(call, lambda: True)
            for one in tree_leaves(result):
                if isinstance(one, Tensor) and one.dtype is torch.float32:
                    self._formats[one] = (*kept, *narrow)[0]
            return result
        args, kwargs = tree_map(self._narrowed, given)
        return replace(call, args=args, kwargs=kwargs).run()

    def _narrowed(self, value: Any) -> Any:
        is_kept = isinstance(value, Tensor) and value in self._formats
        return value.to(self._formats[value]) if is_kept else value


def out_of_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context without autocast on a kind of device; some have none."""
    return torch.autocast(device, enabled=False) if _rounds(device) else nullcontext()


def _rounds(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _is_narrow(value: Any) -> bool:
    """Return whether a value is a tensor in half precision, or asks for one."""
    kind = value.dtype if isinstance(value, Tensor) else value
    return isinstance(kind, torch.dtype) and kind in HALF


def _wide(value: Any) -> Any:
    if not _is_narrow(value):
        return value
    return value.float() if isinstance(value, Tensor) else torch.float32
