"""Small questions to tensors that a loop hands around."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

by_torch_alone = torch._C.DisableTorchFunction
"""Reading a tensor's attributes is a call that function modes of the script would see."""


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a result or an argument list, always in the same order.

    A mapping that is neither a dict nor a ``UserDict`` is left alone:
    reading one may load or draw its values.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from tensors(entry)
    elif isinstance(value, (dict, UserDict)):
        for entry in value.values():
            yield from tensors(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors(getattr(value, field.name, None))  # one without a value yet


def total(losses: Iterable[Tensor]) -> Tensor:
    """Return the detached sum of what ``backward`` was called on in one micro-batch."""
    scalars = [loss.detach().sum() if loss.dim() else loss.detach() for loss in losses]
    return sum(scalars[1:], start=scalars[0]) if scalars else torch.zeros(())


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; inference tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def autocast_state(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
