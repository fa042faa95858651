"""Whether what a tape would call may be called once more and no script notices."""

from __future__ import annotations

import inspect
from types import MethodDescriptorType
from typing import Any

import torch
from torch import Tensor

from nanstop.own_code import is_of_library
from nanstop.pure_code import leaves_nothing


def is_made_of_quiet(function: Any) -> bool:
    """Return whether what torch has made of a function, ``vmap`` say, may be called once more; of a
    method in C (``x ** 2``, ``1 - x``) there is nothing of a script's to call.
    """
    own = inspect.unwrap(function)
    is_of_tensors = isinstance(own, MethodDescriptorType) and issubclass(Tensor, own.__objclass__)
    return is_of_tensors or is_of_library(own) or leaves_nothing(own, "torch")


def is_quiet(kind: type[torch.autograd.Function]) -> bool:
    """Return whether a function may be called once more and no script notices."""
    made: list[Any] = [kind.forward, kind.backward]
    if kind.setup_context is not torch.autograd.Function.setup_context:
        made.append(kind.setup_context)
    return all(is_of_library(one) or leaves_nothing(one, "torch") for one in made)
