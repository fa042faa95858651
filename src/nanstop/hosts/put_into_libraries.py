"""Functions of a script's own in the place of a library's: a method of ``Tensor`` that counts its
calls, a ``forward`` of ``nn.Linear`` that keeps what it has seen, an attention of another model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import nn

from nanstop.own_code import is_class_of_library, is_library

_MOST_WRAPPED = 16
"""Functions within one another: what stands in for a function may come to itself."""


def put_into_libraries(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """Yield them as they stand in torch, in the classes of ``modules`` that a library has, and in
    the files of these. No device work.
    """
    bases = {base for kind in set(map(type, modules)) for base in kind.__mro__}
    classes = [kind for kind in bases if is_class_of_library(kind)]
    files = {kind.__module__: sys.modules.get(kind.__module__) for kind in classes}
    owners: list[Any] = [torch, torch.autograd, nn.functional, torch.Tensor, *classes]
    found = {id(one): one for one in chain(owners, files.values()) if hasattr(one, "__dict__")}
    return chain.from_iterable(map(_in, map(vars, found.values())))


def _in(table: Mapping[str, Any]) -> Iterator[FunctionType]:
    for held in tuple(table.values()):
        one = getattr(held, "__func__", held)
        for _ in range(_MOST_WRAPPED):
            if type(one) is not FunctionType:
                break
            if not is_library(one.__code__.co_filename):
                yield one
            one = vars(one).get("__wrapped__")
