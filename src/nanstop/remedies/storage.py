"""The format in which parameters, buffers and optimizer state are stored, changed for a while.

Casting there and back is not an undo: a float32 LoRA matrix or rope buffer in a half model would lose bits. So the
storage that was there is kept and put back, and only elements that changed meanwhile are rounded into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.core.step import ModelView

HALF = frozenset((torch.float16, torch.bfloat16))

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stored_in(view: ModelView, formats: frozenset[torch.dtype]) -> tuple[Tensor, ...]:
    """Return parameters and buffers of these formats, each once; packed weights of quantized layers are left out."""
    packed = {id(view.root.get_submodule(name).weight) for name in view.quantized_layers()}
    unique = {id(tensor): tensor for tensor in chain(view.root.parameters(), view.root.buffers())}
    return tuple(
        tensor for key, tensor in unique.items() if tensor.dtype in formats and key not in packed
    )


@contextmanager
def swapped(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Hold ``tensors`` (leaves) and their gradients in ``dtype``; the same storages are back on exit.

    The tensors stay the same objects, so an optimizer that holds them goes on. Tensors that share one storage share its
    copy. What changed meanwhile is rounded into the old storage. Exit synchronises the device.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    with ExitStack() as undo:
        for tensor in tensors:
            old = tensor.data
            key = (old.untyped_storage().data_ptr(), old.storage_offset(), old.shape, old.stride())
            if key not in copies or not old.numel():
                copies[key] = old.to(dtype)
            undo.enter_context(_held_as(tensor, copies[key]))
        yield


@contextmanager
def _held_as(tensor: Tensor, data: Tensor) -> Iterator[None]:
    old, old_grad = tensor.data, tensor.grad
    _assign(tensor, data, None if old_grad is None else old_grad.to(data.dtype))
    try:
        yield
    finally:
        grad = tensor.grad
        if grad is not None and old_grad is not None:
            round_into(old_grad, grad)
            grad = old_grad
        elif grad is not None:
            grad = grad.to(old.dtype)
        round_into(old, tensor.data)
        _assign(tensor, old, grad)


def _assign(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    tensor.grad = None  # torch refuses a gradient of another format, even for the moment between
    tensor.data = data
    tensor.grad = grad


@contextmanager
def state_swapped(
    optimizer: Optimizer, parameters: Iterable[Tensor], dtype: torch.dtype
) -> Iterator[None]:
    """Hold the half-precision optimizer state of ``parameters`` in ``dtype``; back in its format and storage on exit.

    Enter before the parameters themselves are swapped. State that is created meanwhile takes the format of its
    parameter on exit; step counts, which are scalars, stay as they are. Exit synchronises the device.
    """
    held = tuple(parameters)
    noted = {
        (parameter, name): value
        for parameter in held
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.dtype in HALF
    }
    for (parameter, name), value in noted.items():
        optimizer.state[parameter][name] = value.to(dtype)
    try:
        yield
    finally:
        for parameter in held:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if (parameter, name) in noted:
                    round_into(noted[parameter, name], value)
                    state[name] = noted[parameter, name]
                elif isinstance(value, Tensor) and value.dtype == dtype and value.dim():
                    state[name] = value.to(parameter.dtype)


def round_into(old: Tensor, new: Tensor) -> None:
    """Write into ``old`` those elements of ``new`` that are not ``old``'s in ``new``'s format, bit for bit.

    Synchronises the device.
    """
    integer = _INTEGER[new.element_size()]
    new = new.to(old.device)
    changed = old.to(new.dtype).view(integer) != new.view(integer)
    if changed.any():
        old.copy_(torch.where(changed, new.to(old.dtype), old))
