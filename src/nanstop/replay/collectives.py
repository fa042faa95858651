"""Collectives inside a micro-batch that is run again: made by all ranks together, once, and from
then on answered to one rank alone as they were.

No run of a step takes part in a collective unless every rank has said that it comes to the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanstop.decide.agreement import ONE_RANK, Ranks
from nanstop.errors import NanstopError
from nanstop.numerics.tensors import bad_mask
from nanstop.ranks import patience_seconds
from nanstop.replay.conditions import eager

_BY_TENSORS = "c10d"
_NAMESPACES = frozenset({_BY_TENSORS, "_c10d_functional", "c10d_functional"})
"""Namespaces of torch's operators that other processes take part in."""
_ENDED = ""


class _Note:
    """What a collective has left in the tensors that it writes to, its first argument."""

    def __init__(self, name: str, values: Sequence[Tensor], returned: Any) -> None:
        self.name = name
        self.values = values
        self.returned = returned

    def changed(self, change: Callable[[Tensor], Tensor]) -> _Note:
        return _Note(self.name, [change(value) for value in self.values], self.returned)


class Collectives:
    """Those of one window, by micro-batch.

    ``absent``: it is known to have none. ``unread``: what they bring is known to make no difference
    to its losses and gradients. ``stopped``: the last that could be neither made nor answered.
    """

    def __init__(self) -> None:
        self.absent = False
        self.unread = False
        self.stopped = ""
        self._ranks: Ranks = ONE_RANK
        self._notes: dict[int, list[_Note]] = {}
        self._gradients: dict[str, Tensor | None] = {}

    def share(self, parameters: Mapping[str, Tensor], average: Callable[[], None]) -> None:
        """Give ``parameters`` the gradients of all ranks: by ``average`` while the ranks run the
        step together, which is remembered; later, in a run of this rank alone, those remembered.
        Where none are, this rank's own stay.
        """
        if self._ranks.size > 1:
            average()
            self._gradients = {
                name: p.grad.detach().clone() if p.grad is not None else None
                for name, p in parameters.items()
            }
            return
        for name, gradient in self._gradients.items():
            parameter = parameters[name]
            # A trial may have the parameter in another format.
            parameter.grad = (
                gradient.to(parameter.dtype, copy=True) if gradient is not None else None
            )

    def forget_shared(self) -> None:
        """Free the gradients that all ranks had together."""
        self._gradients = {}

    def noted(self, micro: int) -> list[Tensor]:
        """Return the noted results of a micro-batch's collectives, as all ranks made them."""
        return [value for note in self._notes.get(micro, ()) for value in note.values]

    @contextmanager
    def together(self, ranks: Ranks) -> Iterator[None]:
        """Have the micro-batches that are run inside make their collectives with those of the same
        number on all other ranks, which are inside as well.
        """
        self._ranks = ranks
        try:
            yield
        finally:
            self._ranks = ONE_RANK

    @contextmanager
    def changed(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside, answer collectives with ``change`` of the noted results."""
        kept = self._notes
        self._notes = {m: [note.changed(change) for note in notes] for m, notes in kept.items()}
        try:
            yield
        finally:
            self._notes = kept

    @contextmanager
    def around(self, micro: int, *, world_size: int) -> Iterator[None]:
        """Return the context that a micro-batch of one of ``world_size`` processes runs in.

        Errors inside it: ``NanstopError`` for a collective that can be neither made nor answered.
        """
        if self.absent or world_size == 1:
            yield
            return
        notes = self._notes.get(micro, [])
        with eager(), ExitStack() as stack:
            if self._ranks.size > 1:
                made = _Made(self, self._ranks, notes if self.unread else [])
                self._notes[micro] = made.notes
                stack.callback(made.ended)
                stack.enter_context(made)
            else:
                stack.enter_context(_Answered(self, notes))
            yield

    @contextmanager
    def of_update(self, *, world_size: int) -> Iterator[None]:
        """Return the context that an update of one of ``world_size`` processes is made again in:
        the others come to the collectives of an optimizer's own only where they make it, too.

        Errors inside it: ``NanstopError`` for a collective that this rank would wait in alone.
        """
        if world_size == 1 or self._ranks.size > 1:
            yield
            return
        with eager(), _Answered(self, ()):
            yield


def finite(value: Tensor) -> Tensor:
    """Return a tensor with 1 for each number that is not finite."""
    return torch.where(bad_mask(value), torch.ones_like(value), value)


def other(value: Tensor) -> Tensor:
    """Return a tensor of other, finite numbers."""
    if value.dtype == torch.bool:
        return ~value
    return finite(value) * 2 + 1


class _Intercepted(TorchDispatchMode):
    """Answers operations that other processes take part in by ``answer``."""

    def __init__(self, owner: Collectives) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _NAMESPACES:
            return func(*args, **(kwargs or {}))
        if func.namespace != _BY_TENSORS:
            raise self.stopped(func, f"`{func}` needs the other processes")
        return self.answer(func, args, dict(kwargs or {}))

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what stands for an operation: each kind of run has an answer of its own."""
        raise NotImplementedError

    def stopped(self, func: Any, reason: str) -> NanstopError:
        """Return the error of an operation that was stopped before it began."""
        self._owner.stopped = str(func)
        return NanstopError(reason, code="NS000")


class _Answered(_Intercepted):
    """Answers the collectives of a run as they are noted, in their order; where none of them is
    read, those of another shape as well.
    """

    def __init__(self, owner: Collectives, notes: Sequence[_Note]) -> None:
        super().__init__(owner)
        self._left = iter(notes)

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        note, written = next(self._left, None), _written(args)
        name = _named(func, args)
        if note is None or not (note.name == name or self._owner.unread):
            raise self.stopped(func, f"`{func}` needs the other processes")
        for tensor, value in zip(written, note.values, strict=False):
            if tensor.shape == value.shape:
                tensor.detach().copy_(value)
            else:
                tensor.detach().zero_()
        returned = note.returned
        return (args[0], returned[-1]) if isinstance(returned, tuple) else returned


class _Made(_Intercepted):
    """Makes the collectives of a run, each once all ranks have come to it, and notes them.

    ``before``: what answers those after the first to which not all of them come.
    """

    def __init__(self, owner: Collectives, ranks: Ranks, before: list[_Note]) -> None:
        super().__init__(owner)
        self.notes: list[_Note] = []
        self._ranks = ranks
        self._before = before
        self._apart = ""
        self._alone: _Answered | None = None

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = _named(func, args)
        self._meet(name)
        if self._alone is not None:
            return self._alone.answer(func, args, kwargs)
        if self._apart:
            raise self.stopped(func, self._apart)
        try:
            returned = func(*_in_time(func, args, kwargs), **kwargs)
            (returned[-1] if isinstance(returned, tuple) else returned).wait()
        except RuntimeError as error:
            self._apart = f"the ranks did not come through `{func}` ({error})"
            self._ranks.leave(self._apart)
            raise self.stopped(func, self._apart) from error
        values = [tensor.detach().clone() for tensor in _written(args)]
        self.notes.append(_Note(name, values, returned))
        return returned

    def ended(self) -> None:
        """Say that this rank's run is over. Errors: ``NanstopError`` where one does not answer."""
        self._meet(_ENDED)

    def _meet(self, name: str) -> None:
        """Learn whether all ranks are at the same collective; those that are not stay apart."""
        if self._apart:
            return
        try:
            said = self._ranks.gather("collective", name)
        except NanstopError as error:
            self._apart = error.message
            raise
        odd = next((rank for rank, other in enumerate(said) if other != said[0]), None)
        if odd is not None:
            self._apart = f"rank 0 {_at(said[0])}, rank {odd} {_at(said[odd])}"
            if self._before:
                self._alone = _Answered(self._owner, self._before[len(self.notes) :])


def _at(name: str) -> str:
    return f"is at `{json.loads(name)[0]}`" if name != _ENDED else "has ended its micro-batch"


def _named(func: Any, args: Any) -> str:
    """Return the name of a collective, with format and shape of what it writes."""
    return json.dumps([str(func), [[str(t.dtype), *t.shape] for t in _written(args)]])


def _written(args: Any) -> list[Tensor]:
    return [t for t in tree_leaves(args[0]) if isinstance(t, Tensor)]


def _in_time(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the positional arguments of a collective, which ends within the patience of ranks."""
    milliseconds = int(patience_seconds() * 1000)
    names = [argument.name for argument in func._schema.arguments]
    if "timeout" not in names:
        return args
    place = names.index("timeout")
    if place < len(args):
        return (*args[:place], milliseconds, *args[place + 1 :])
    kwargs["timeout"] = milliseconds
    return args
