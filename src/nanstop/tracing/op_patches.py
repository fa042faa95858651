"""Second runs: the same ops counted the same way, some looked at closely, some bad elements put
right.

Counting is that of the recorder, without its ranges: such a run costs little more than a plain one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.frozen import frozen
from nanstop.numerics.tensors import bad_mask, is_measurable
from nanstop.records import op_name
from nanstop.replay.conditions import eager
from nanstop.replay.rng import rng_kept
from nanstop.tracing import operators
from nanstop.tracing.op_details import replaced_in
from nanstop.tracing.operators import operands_of, outputs_of
from nanstop.tracing.recorder import is_counted, opened

Look = Callable[[int, Any, Any, Mapping[str, Any]], "Callable[[Any], None] | None"]


class LookOfSome(ABC):
    """A look that is called with some operations alone: those whose names (``records.op_name``) are
    in ``ops``, all where it is None, and whether the engine of autograd runs them or not
    (``in_backward``, both where it is None).
    """

    ops: ClassVar[frozenset[str] | None] = None
    in_backward: ClassVar[bool | None] = False

    @abstractmethod
    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any], /
    ) -> Callable[[Any], None] | None:
        """Look at an operation that is about to run; return what is to see its result."""

    def reads(self, name: str, *, in_backward: bool) -> bool:
        return self.in_backward in (None, in_backward) and (self.ops is None or name in self.ops)


class ReachedError(Exception):
    """The operation has run; what follows is of no interest."""


class SecondRun(TorchDispatchMode):
    """Calls each of ``looks`` with every counted op of a run, and then what it returned with the
    op's result. Compiled code runs eagerly: torch gives up what it compiled and meets under a mode.
    ``until``: the op that the run ends with, raising ``ReachedError``.

    A look that fails (out of memory, an operand of a kind not foreseen) is given up;
    the run goes on.
    """

    def __init__(self, *looks: Look, until: int | None = None) -> None:
        super().__init__()
        self._looks, self._until = looks, until
        self._readers: dict[tuple[Any, bool], tuple[Look, ...]] = {}
        self._count = 0

    def __enter__(self) -> SecondRun:
        self._count = 0
        self._eagerly = eager()
        self._eagerly.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._eagerly.__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Take no part in torch's guard against compiling what a mode does, which costs as much as
        a small op: second runs are eager.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counted = is_counted(func, types)
        if counted is None:
            return NotImplemented
        if operators.traits(func).may_copy:
            return opened(self, func, args, kwargs)
        if not counted:
            return func(*args, **kwargs)
        index = self._count
        self._count += 1
        afterwards: list[Callable[[Any], None]] = []
        for look in self._readers_of(func):
            with suppress(Exception):
                done = look(index, func, args, kwargs)
                if done is not None:
                    afterwards.append(done)
        result = self.call(index, func, args, kwargs)
        for done in afterwards:
            with suppress(Exception):
                done(result)
        if index == self._until:
            raise ReachedError
        return result

    def _readers_of(self, func: Any) -> tuple[Look, ...]:
        in_backward = torch._C._current_graph_task_id() != -1
        known = self._readers.get((func, in_backward))
        if known is None:
            name = op_name(str(func))
            known = self._readers[func, in_backward] = tuple(
                look
                for look in self._looks
                if not isinstance(look, LookOfSome) or look.reads(name, in_backward=in_backward)
            )
        return known

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what the op numbered ``index`` gives; for those who run one of them otherwise."""
        del index
        return func(*args, **kwargs)


@torch.no_grad()
def displace(values: Tensor, places: Any) -> None:
    """Write other numbers into some places of values [..., features], in place: another shift for
    each feature, since a norm takes away one that all have.
    """
    far = 1.0 + values.detach().abs().amax()
    each = torch.linspace(-1.0, 1.0, values.shape[-1], device=values.device)
    values[places] += (far * each).to(values.dtype)


ElementMasks = tuple[Tensor | None, ...]


class OtherResult(SecondRun):
    """Has one op of a run, by its index, give what ``change`` makes of its result."""

    def __init__(self, index: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._index, self._change = index, change

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        return self._change(result) if index == self._index else result


class Filled:
    """Has one op, by its index, leave a number in all that it returns."""

    def __init__(self, index: int, number: float = 1.0) -> None:
        self._index, self._number = index, number

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if index != self._index:
            return None

        def done(result: Any) -> None:
            with torch.no_grad():
                for output in outputs_of(func, args, kwargs, result):
                    output.fill_(self._number)

        return done


@frozen
class Spot:
    """What is to be put right at one op:
    ``bad`` elements of each output, None where there are none.

    ``read``: elements of each operand that were bad when the op did this.
    """

    op: str
    bad: ElementMasks
    read: ElementMasks = ()


class Patch:
    """Makes chosen elements of chosen ops' outputs finite, as if the op had not failed there.

    Only elements that are bad are replaced, by numbers of the size of their finite neighbours that
    differ from each other (no norm or deviation of 0). What operands bring that are bad where they
    were not before stays bad: an op downstream of the cause is not put right for what it was given.
    """

    def __init__(self, spots: Mapping[int, Spot]) -> None:
        self.missed = False
        self._spots = spots

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        spot = self._spots.get(index)
        if spot is None:
            return None
        if spot.op != str(func):
            self.missed = True  # the run took another path: what follows proves nothing
            return None
        brought = _brought(func, args, kwargs, spot.read)

        def done(result: Any) -> None:
            outputs = outputs_of(func, args, kwargs, result)
            masks = zip_longest(spot.bad[: len(outputs)], brought)
            for output, (mask, given) in zip(outputs, masks, strict=False):
                if mask is not None and is_measurable(output) and output.shape == mask.shape:
                    own = mask.to(output.device)
                    _mend(output, own if given is None else own & ~given)

        return done


@torch.no_grad()
def _brought(func: Any, args: Any, kwargs: Mapping[str, Any], usual: ElementMasks) -> ElementMasks:
    """Return which elements of each output are bad because of what the op reads, beyond what is
    ``usual``.

    The op is run on ordinary numbers with only those bad elements among them, and on ordinary
    numbers alone.
    """
    ordinary: dict[int, Tensor] = {}
    spoiled: dict[int, Tensor] = {}
    strange = False
    for operand, known in zip_longest(operands_of(func, args, kwargs), usual):
        if operand is None or not is_measurable(operand) or not operand.is_floating_point():
            continue
        bad = bad_mask(operand)
        if known is not None and known.shape == bad.shape:
            bad = bad & ~known.to(bad.device)
        strange = strange or bool(bad.any())
        ordinary[id(operand)] = numbers = _spread(operand).mul_(0.5).to(operand.dtype)
        spoiled[id(operand)] = torch.where(bad, operand, numbers)
    if not strange:
        return ()
    with_them = _bad_of(func, *replaced_in(args, kwargs, spoiled))
    without = _bad_of(func, *replaced_in(args, kwargs, ordinary))
    return tuple(
        None if bad is None or own is None else bad & ~own
        for bad, own in zip(with_them, without, strict=True)
    )


def _bad_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> ElementMasks:
    with rng_kept():
        outputs = outputs_of(func, args, kwargs, func(*args, **kwargs))
    return tuple(bad_mask(output) if is_measurable(output) else None for output in outputs)


def _spread(like: Tensor) -> Tensor:
    """Return float32 numbers between 0.5 and 1.5 that differ from each other."""
    steps = torch.arange(like.numel(), device=like.device, dtype=torch.float32)
    return (0.5 + (steps * 0.618034) % 1.0).view(like.shape)


@torch.no_grad()
def _mend(output: Tensor, mask: Tensor) -> None:
    bad = bad_mask(output)
    healthy = output[~bad].abs().float()
    scale = healthy.median() if healthy.numel() else torch.ones((), device=output.device)
    output.copy_(torch.where(mask & bad, (scale * _spread(output)).to(output.dtype), output))
