"""Whether a policy is compared with itself: a reference that has the policy's own weights.

Its distance is 0 at every update, whatever is learned. That a difference is 0 is seen in the
numbers; that it stays so, by an experiment: the micro-batch run again, undone, with other weights.
Ratios of a policy to what it was a moment ago are 0 as well, and meant: they have a gradient, and
the loss has no lower bound in them, or none that grows. A loss of preferences has one: raised and
lowered far, the difference leaves the loss where it was, or raises it as fast as itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanstop.detect.other_weights import noises
from nanstop.numerics.graph import is_leaf
from nanstop.records import ObjectiveRow, op_name
from nanstop.replay.step import gradients_of
from nanstop.replay.untouched import TensorMemory, address
from nanstop.tracing.op_patches import LookOfSome, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops, look_again
from nanstop.tracing.source.bindings import memory_given_at

if TYPE_CHECKING:
    from nanstop.replay.step import Step

LEAST_TIMES = 3
"""Updates in a row: of several that are made from one rollout, the first alone is made by the
policy that the rollout is from.
"""
MOST_ELEMENTS = 1 << 20
"""Of the weights that are written to and remembered: those of the head are enough."""
FAR = 1.0
"""By how much of their size weights are moved."""
NOTHING = 1e-4
"""Share of a gradient that roundings are."""
_LARGE = 4e3
"""Beside it any margin is small, and any format can hold eight times as much."""
_SLOWEST, _FASTEST = 1.5, 6.0
"""By what a loss of preferences grows where a difference is doubled: 2, or 4 where it is
squared."""
_STAYS = 0.01
_ROUNDINGS = 16
"""Of a loss, which say nothing."""
_NEAR = 0.1
"""Share of what the policy's way changes in a loss, by which the run's own may be another one."""


class Equals(LookOfSome):
    """Keeps, by the op's index, the differences that are exactly 0 of two
    tensors in places of their own, a gradient coming to one alone, and the parameters that are
    read. Synchronises the device at differences.
    """

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}
        self.read: dict[int, nn.Parameter] = {}

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        self.read |= {id(one): one for one in args if isinstance(one, nn.Parameter)}
        if op_name(str(func)) != "sub" or not _are_two(*args[:2]):
            return None
        if not torch.equal(*args[:2]) or not bool(args[0].any()):
            return None
        return lambda result: self.found.update({index: result})


def _are_two(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    if first.shape != second.shape or not first.numel() or not first.is_floating_point():
        return False
    return first.requires_grad != second.requires_grad and address(first) != address(second)


class OwnReference:
    """Follows a run through ``LEAST_TIMES`` updates in a row."""

    def __init__(self) -> None:
        self._num_times = 0
        self.next: int | None = None
        """The step whose micro-batch is to be looked at again."""
        self._first: list[tuple[Tensor, Tensor]] = []
        """Trained weights, and what they were the first time."""
        self._shares = False
        """Whether the reference has other parameters, in the memory of the policy's."""
        self._value: float | None = None
        """The loss of the first time."""

    def again(self, step: Step) -> tuple[ObjectiveRow, ...]:
        """Return the rows of ``take`` for the first micro-batch, which is run again, undone."""
        seen = Equals()
        look_again(step, 0, seen)
        return self.take(step, seen)

    def take(self, step: Step, seen: Equals) -> tuple[ObjectiveRow, ...]:
        """Return the first of the differences to itself that a policy's loss is made of, once they
        were there in each of some updates.

        Undone bitwise; runs the micro-batch up to nine times where there are any, four more for
        each that has a gradient, and not at all elsewhere. Synchronises the device.
        """
        found, first = self._compared(step, seen), self._first
        self.next, self._first = None, []
        if not found:
            return ()
        self._num_times += 1
        if self._num_times < LEAST_TIMES:
            self.next = step.id.step + 1
            self._first = first or [(p, p.detach().clone()) for p in last_trained(step)]
            return ()
        if not _follows(step, found, first):
            return ()
        told = self._shares or _is_of_no_distance(step, found, first)
        if told is None:
            self.next, self._first = 2 * step.id.step + 1, first
        if not told:
            return ()
        op = first_ops(step)[found[0]]
        line, shared = line_text(op.line), memory_given_at() if self._shares else ()
        return (
            ObjectiveRow(
                op=op.name,
                module=op.module,
                given="itself",
                width=1,
                line=line,
                made_at=tuple(f"{one.short}: {one.text}" for one in shared),
            ),
        )

    def _compared(self, step: Step, seen: Equals) -> list[int]:
        """Return the differences that the loss is made of and that nothing is learned from, that
        are those to other parameters in the same memory, or that a loss of preferences is made of
        which has been the same number each time.
        """
        if not seen.found:
            return []
        plain = first_loss(step, SecondRun())
        found = [index for index in seen.found if first_loss(step, _Raised(index)) != plain]
        own = {id(p) for p in step.view.root.parameters()}
        theirs = {address(p) for p in seen.read.values() if id(p) not in own}
        mine = [p for p in step.view.root.parameters() if p.requires_grad]
        self._shares = any(address(p) in theirs for p in mine)
        if not found or self._shares or _teaches_nothing(step, found):
            return found
        value, self._value = self._value, plain
        is_same = plain == value or not self._num_times
        return found if is_same and all(_is_preference(step, one, plain) for one in found) else []


def _follows(step: Step, differences: list[int], first: list[tuple[Tensor, Tensor]]) -> bool:
    """Return whether the reference has the policy's weights as they are now: it has others where
    the policy is given others, or is not what the policy was the first time.
    """
    others = [(p, p.detach() + noise) for p, noise in noises(last_trained(step), FAR)]
    return _are_zero(step, differences, others) or not _are_zero(step, differences, first)


def _is_of_no_distance(
    step: Step, differences: list[int], first: list[tuple[Tensor, Tensor]]
) -> bool | None:
    """Return whether the run's own loss is that of a reference which went with the policy, and not
    that of one which has stayed where the policy was the first time. None where both are the same
    but for rounding.

    A run by what was recorded lacks what a script switches between two calls of its models
    (adapters): a reference is the policy itself there, whatever it was in the run.
    """
    known = step.losses[0] if step.losses else None
    if known is None or known.numel() != 1:
        return True
    now, then = _Policy(differences), _Policy(differences)
    beside = first_loss(step, now)
    with step.isolated(), written(first), then:
        step.run(0)
    way = {index: now.seen[index] - then.seen[index] for index in differences}
    gap, off = abs(first_loss(step, _Apart(way)) - beside), abs(float(known) - beside)
    if gap and not off:  # a run again is the same to the last bit here, and so it is for a way
        return True
    rounding = _ROUNDINGS * torch.finfo(known.dtype).eps * abs(beside)
    return None if gap <= rounding else off <= _NEAR * gap


def _are_zero(step: Step, differences: list[int], weights: list[tuple[Tensor, Tensor]]) -> bool:
    look = Equals()
    with step.isolated(), written(weights), SecondRun(look):
        step.run(0)
    return look.found.keys() >= set(differences)


def last_trained(step: Step) -> list[Tensor]:
    """Return trained weights of ``MOST_ELEMENTS`` elements at most, the last ones first."""
    trained = [p for p in step.view.root.parameters() if p.requires_grad]
    left = MOST_ELEMENTS
    return [p for p in reversed(trained) if (left := left - p.numel()) >= 0]


@contextmanager
def written(weights: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Have other values in some weights, in their own storages: those who share them follow."""
    kept: list[TensorMemory] = []
    try:
        for weight, values in weights:
            kept.append(TensorMemory.of(weight))
            weight.data.copy_(values)
        yield
    finally:
        for one in reversed(kept):
            one.put_back()


def _is_preference(step: Step, index: int, plain: float) -> bool:
    """Return whether a loss grows with a difference on one side at least, about as fast as that or
    its square, and falls without end on none.
    """
    grows = False
    for far in (_LARGE, -_LARGE):
        one, two = (first_loss(step, _Raised(index, least=times * far)) - plain for times in (1, 2))
        is_growing = one > 0.0 and _SLOWEST <= two / one <= _FASTEST
        grows |= is_growing
        stays = abs(two - one) <= _STAYS * abs(one)  # of what is not finite neither is so
        if not (is_growing or stays):
            return False
    return grows


def _teaches_nothing(step: Step, differences: Sequence[int]) -> bool:
    """Return whether gradients are the same where none comes to some differences."""
    whole, cut = (_gradients(step, mode) for mode in (SecondRun(), _Cut(differences)))
    if whole.keys() != cut.keys():
        return False
    size = sum(float(one.square().sum()) for one in whole.values())
    gap = sum(float((one - cut[name]).square().sum()) for name, one in whole.items())
    return size > 0.0 and gap <= NOTHING**2 * size


def _gradients(step: Step, mode: SecondRun) -> dict[str, Tensor]:
    with step.isolated(), mode:
        step.run(0)
        dense = {n: g for n, g in gradients_of(step.view.root).items() if not g.is_sparse}
        return {name: gradient.float().clone() for name, gradient in dense.items()}


class _Raised(SecondRun):
    """Has one difference be other numbers, no two of them alike: ``least`` to 4 times as much."""

    def __init__(self, index: int, least: float = 1.0) -> None:
        super().__init__()
        self._index, self._least = index, least

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if index == self._index:
            other = torch.linspace(1.0, 2.0, result.numel(), dtype=result.dtype).square()
            result.copy_((self._least * other).to(result.device).reshape(result.shape))
        return result


class _Policy(SecondRun):
    """Keeps what some differences take from the policy, with the sign that it has in them."""

    def __init__(self, differences: Sequence[int]) -> None:
        super().__init__()
        self._differences = differences
        self.seen: dict[int, Tensor] = {}

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index in self._differences:
            one, two = args[:2]
            self.seen[index] = one.detach().clone() if one.requires_grad else -two.detach()
        return func(*args, **kwargs)


class _Apart(SecondRun):
    """Has some differences be other numbers."""

    def __init__(self, values: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._values = values

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if index in self._values:
            result.copy_(self._values[index])
        return result


class _Cut(SecondRun):
    """Has no gradient come to some differences."""

    def __init__(self, differences: Sequence[int]) -> None:
        super().__init__()
        self._differences = differences
        self._made: list[Tensor] = []

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        for one in args:
            is_made = isinstance(one, Tensor) and any(
                address(one) == address(m) for m in self._made
            )
            if is_made and one.requires_grad and not is_leaf(one):
                one.register_hook(torch.zeros_like)
        result = func(*args, **kwargs)
        if index in self._differences:
            self._made.append(result)  # held, so that its memory is no other's
        return result
