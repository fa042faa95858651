"""Tensors whose data is held in another format, and what the script sees of them: its own.

A held tensor is *awake*, in the other format, while a step computes. Between steps it may be *at
rest*, in its own storage and format: what the script then reads, copies, averages or writes is what
it would be without nanstop, and what it wrote has arrived when the tensor wakes. A copy or a pickle
of one that is awake has the script's format as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nanstop.numerics.tensors import by_torch_alone
from nanstop.replay.stand_in import standing_in
from nanstop.replay.undo import exchanged

T = TypeVar("T")

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**22
_COPYING = ("__reduce_ex__", "__deepcopy__")


def _unrecorded(function: Callable[..., T]) -> Callable[..., T]:
    """Run outside of autograd, inference mode and whatever watches torch's functions."""

    @functools.wraps(function)
    def run(*args: Any) -> T:
        with by_torch_alone(), torch.inference_mode(mode=False), torch.no_grad():
            return function(*args)

    return run


class Swap:
    """Tensors that are held together. ``pins``: how many have asked that they stay awake."""

    def __init__(self) -> None:
        self.members: list[Held] = []
        self.pins = 0

    def wake(self) -> None:
        """Hold every member in the other format again."""
        for held in self.members:
            held.wake()


class Held:
    """A tensor (a leaf) and its gradient, held in another format.
    ``under``: what held it in a further one before.

    The tensor stays the same object, so an optimizer that holds it goes on.
    """

    def __init__(self, swap: Swap, tensor: Tensor, data: Tensor) -> None:
        self.swap = swap
        self.tensor = tensor
        self.under = holder(tensor)
        self.own, self.other, self.dtype = tensor.data, data, data.dtype
        self.resting = False
        self._apart: Tensor | None = None
        self._shown: int | None = None
        self._own_grad = tensor.grad
        self._put(data, tensor.grad)

    @_unrecorded
    def wake(self) -> None:
        """Hold the tensor in the other format again, with the elements that were written at
        rest.
        """
        if not self.resting:
            return
        if self.under is not None:
            self.under.wake()
        data = self.tensor.data
        if _is_same(data, self.own) and self.other.dtype == self.dtype:
            self._take_over()
        else:  # the script gave it other data
            self.own, self.other = data, data.to(self.dtype)
        self._own_grad = self.tensor.grad
        self._put(self.other, self._own_grad)
        self.resting = False

    @_unrecorded
    def align(self) -> None:
        """Have the gradient in the tensor's format:
        a graph that was made of it at rest leaves one in the script's.

        torch refuses to assign such a gradient, and an optimizer to use it.
        """
        grad = self.tensor.grad
        if grad is not None and grad.dtype != self.tensor.dtype:
            self._put(self.tensor.data, grad)

    @_unrecorded
    def catch_up(self) -> None:
        """Take over what the script wrote through a tensor that ``shown`` gave."""
        if not self.resting and self._shown not in (None, self.own._version):
            self._take_over()
        self._shown = None if self.resting or self._shown is None else self.own._version

    def rest(self) -> None:
        """Put its own storage and format back, with what changed meanwhile rounded into it."""
        self.undo()
        if self.under is not None:
            self.under.rest()

    @_unrecorded
    def undo(self) -> None:
        """Put back what was there before it was held."""
        if self.resting:
            return
        own_grad, grad = self._own_grad, self.tensor.grad
        if grad is not None and own_grad is not None and own_grad.shape == grad.shape:
            round_into(own_grad.data, grad)  # a graph may hold it: its version does not move
            grad = own_grad
        self._own_grad = None
        try:
            self._settle()
        finally:  # where memory is short, too
            self._put(self.own, grad)
            self.resting = True

    @_unrecorded
    def plain(self) -> Tensor:
        """Return the data as the script has it: in its own storage and format."""
        if self.resting:
            return self.tensor.data
        self._settle()
        return self.own if self.under is None else self.under.plain()

    def shown(self) -> Tensor:
        """Return the data as the script has it, and follow what is written there (``catch_up``)."""
        plain = self.plain()
        if not self.resting:
            self._shown = self.own._version
        return plain.detach()

    def twin(self) -> Tensor:
        """Return a tensor of the same class over the script's own data, with the script's own
        attributes.
        """
        tensor = self.tensor
        twin = _leaf_over(self.plain(), tensor)
        vars(twin).update({k: v for k, v in vars(tensor).items() if k not in _COPYING})
        return twin

    def reduced(self, protocol: Any) -> Any:
        """Stand in for ``__reduce_ex__``."""
        return self.twin().__reduce_ex__(protocol)

    def copied(self, memo: dict[int, Any]) -> Tensor:
        """Stand in for ``__deepcopy__``."""
        if id(self.tensor) not in memo:
            twin = self.twin()
            memo[id(self.tensor)] = type(self.tensor).__deepcopy__(twin, memo)
            memo.setdefault(id(memo), []).append(
                twin
            )  # as copy does: another with its id would be taken for it
        return memo[id(self.tensor)]

    def _settle(self) -> None:
        """Bring the own storage up to date with what the tensor holds awake."""
        self.catch_up()
        self.other = self.tensor.data
        if self.own.shape == self.other.shape and self.own.device == self.other.device:
            round_into(self.own, self.other)
        else:  # the script gave it other data
            self.own = self.other.to(self.own.dtype)

    def _take_over(self) -> None:
        """Write into the other storage those elements of the own one that are not what became of
        it.
        """
        written = _bits(self.other.to(self.own.dtype)) != _bits(self.own)
        self.other.copy_(torch.where(written, self.own.to(self.dtype), self.other))

    def _put(self, data: Tensor, grad: Tensor | None) -> None:
        self.tensor.grad = None  # torch refuses a gradient of another format, even for a moment
        if self.tensor.dtype != data.dtype:
            self._trade(data)
        self.tensor.data = data
        self.tensor.grad = None if grad is None else grad.to(data.dtype)

    def _trade(self, data: Tensor) -> None:
        """Have the tensor's object stand for another tensor of torch's, in the format of ``data``.

        Assigning data of another format would part it from the node that gathers its gradients,
        which graphs of the script end in and their hooks are on. Where something refers to the
        tensor weakly (the cache of an autocast that is open), it is parted all the same.
        """
        apart, self._apart = self._apart, None
        try:
            if apart is None or apart.dtype != data.dtype:
                apart = _leaf_over(data, self.tensor)
            _share_hooks(self.tensor, apart)
            apart.requires_grad_(self.tensor.requires_grad)
            torch._C._swap_tensor_impl(self.tensor, apart)
        except RuntimeError:
            return
        self._apart = apart


@contextmanager
def swapped(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Hold ``tensors`` (leaves) and their gradients in ``dtype``; the same storages are back on
    exit.

    Tensors that share one storage share its copy.
    What changed meanwhile is rounded into the old storage.
    """
    swap = Swap()
    copies: dict[tuple[Any, ...], Tensor] = {}
    with ExitStack() as undo:
        undo.callback(swap.members.clear)  # a circle, which would keep the copies until it is found
        for tensor in tensors:
            old = tensor.data
            key = (old.untyped_storage().data_ptr(), old.storage_offset(), old.shape, old.stride())
            if key not in copies or not old.numel():
                copies[key] = old.to(dtype)
            undo.enter_context(_held(swap, tensor, copies[key]))
        yield


@contextmanager
def _held(swap: Swap, tensor: Tensor, data: Tensor) -> Iterator[None]:
    held = Held(swap, tensor, data)
    swap.members.append(held)
    with exchanged(vars(tensor), dict(zip(_COPYING, (held.reduced, held.copied), strict=True))):
        try:
            yield
        finally:
            held.undo()


def holder(tensor: Tensor) -> Held | None:
    """Return the outermost ``Held`` that keeps a tensor in another format now, or None."""
    found = getattr(vars(tensor).get("__reduce_ex__"), "__self__", None)
    return found if isinstance(found, Held) else None


def holders(tensors: Iterable[Tensor]) -> list[Held]:
    """Return the ``Held`` of those tensors that are held in another format, each once."""
    found = (holder(tensor) for tensor in tensors)
    return list(dict.fromkeys(held for held in found if held is not None))


def holders_in(root: nn.Module) -> list[Held]:
    """Return what holds parameters and buffers of a module and of those below it."""
    return holders(chain(root.parameters(), root.buffers()))


@contextmanager
def awake(module: nn.Module) -> Iterator[None]:
    """Have a module and those below it compute in the format that a remedy gave them, inside.

    Where gradients are recorded, everything that is held with it wakes as well, until an update
    moves it. Else it is at rest again on exit.
    """
    present = holders_in(module)
    for held in present:
        held.catch_up()
    resting = [held for held in present if held.resting]
    if torch.is_grad_enabled():
        for swap in dict.fromkeys(held.swap for held in resting):
            swap.wake()
        yield
        return
    with ExitStack() as undo:
        for held in resting:
            held.wake()
            undo.callback(held.rest)
        yield


@contextmanager
def kept_awake(root: nn.Module) -> Iterator[None]:
    """Have everything awake inside, whatever is updated:
    steps that are run again and undone see one format.
    """
    held_now = holders_in(root)
    with ExitStack() as undo:
        for held in held_now:
            if held.resting:
                held.wake()
                undo.callback(held.rest)
            held.align()
        for swap in dict.fromkeys(held.swap for held in held_now):
            swap.pins += 1
            undo.callback(_unpin, swap)
        yield


def _unpin(swap: Swap) -> None:
    swap.pins -= 1


@contextmanager
def at_rest(root: nn.Module) -> Iterator[None]:
    """Have parameters and buffers in the script's own formats inside:
    no step computes meanwhile.
    """
    with ExitStack() as undo:
        for held in holders_in(root):
            if not held.resting:
                held.rest()
                undo.callback(held.wake)
        yield


@contextmanager
def saved_plain(root: nn.Module) -> Iterator[None]:
    """Have ``state_dict`` give what is held in the script's own format, at any root, also of one
    that is awake.
    """
    with ExitStack() as undo:
        for module in root.modules():
            if holders(_own_tensors(module)):
                save = functools.partial(_save_plain, module, module._save_to_state_dict)
                undo.enter_context(standing_in(module, "_save_to_state_dict", save))
        yield


def _save_plain(
    module: nn.Module, save: Callable[..., None], state: Any, prefix: str, keep_vars: bool
) -> None:
    save(state, prefix, keep_vars)
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        held = holder(tensor) if tensor is not None else None
        if held is not None and not held.resting and f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = held.twin() if keep_vars else held.shown()


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    every = chain(module._parameters.values(), module._buffers.values())
    return (tensor for tensor in every if tensor is not None)


def _leaf_over(data: Tensor, like: Tensor) -> Tensor:
    return torch.Tensor._make_subclass(type(like), data, like.requires_grad)


def _share_hooks(tensor: Tensor, other: Tensor) -> None:
    """Have the hooks on a tensor's gradient on another one as well."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name)
        if hooks is not getattr(other, name):
            setattr(other, name, hooks)


def round_into(old: Tensor, new: Tensor) -> None:
    """Write into ``old`` those elements of ``new`` that are not ``old``'s in ``new``'s format,
    bit for bit.
    """
    new = new.to(old.device)
    for one, other in _pieces(old, new):
        changed = _bits(one.to(other.dtype)) != _bits(other)
        one.copy_(torch.where(changed, other.to(one.dtype), one))


def _pieces(old: Tensor, new: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two tensors of one shape in parts, so that nothing of their size is made on the way."""
    if old.numel() <= _PIECE or not (old.is_contiguous() and new.is_contiguous()):
        yield old, new
        return
    parts = (tensor.view(-1).split(_PIECE) for tensor in (old, new))
    yield from zip(*parts, strict=True)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGER[tensor.element_size()])


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same place in memory, seen the same way."""
    return (one.data_ptr(), one.shape, one.dtype, one.device) == (
        other.data_ptr(),
        other.shape,
        other.dtype,
        other.device,
    )
