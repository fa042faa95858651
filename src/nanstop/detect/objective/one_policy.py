"""Whether two log-probabilities of one policy differ, in a ratio that is 1 for equal ones.

A script scores its rollout without a graph and trains on it at once: both sides have the same
weights and the same tokens, and differ all the same where dropout, positions, a temperature or
formats do. That both sides have read the same weights and tokens is seen in the operations; that
the scored side is of the weights that train, by an experiment: with others it is another one, which
that of a reference is not. What a mask leaves out of the loss is left out by another: the loss is
computed with those differences at 0 that are large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanstop.detect.objective.operands.numbers import TOLERANCE
from nanstop.detect.objective.ratios import MOST_TRIED, are_compared, place_of
from nanstop.detect.objective.references import last_trained, written
from nanstop.detect.other_weights import noises
from nanstop.records import RatioRow, op_name
from nanstop.tracing.op_patches import LookOfSome, OtherResult, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops, look_again

if TYPE_CHECKING:
    from nanstop.replay.step import Step

LEAST_NATS = 0.05
"""A token, on average: bfloat16 against another kernel costs 0.01 to 0.02."""
_MOVED = 0.5
"""By how much of their size weights are moved."""


class OnePolicy(LookOfSome):
    """Keeps differences of log-probabilities whose exponential is taken, a
    gradient coming to one side alone, and what was read with a graph and without. Synchronises the
    device at differences.
    """

    def __init__(self) -> None:
        self.nats: dict[int, float] = {}
        """How far apart both sides are, a token on average, by the index of the difference."""
        self.read: dict[bool, set[int]] = {True: set(), False: set()}
        self.tokens: dict[bool, dict[int, Tensor]] = {True: {}, False: {}}
        """Indices at which tables of weights were read first, by the id of the table."""
        self._differences: dict[tuple[int, torch.Size], tuple[int, float]] = {}

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        base, has_graph = op_name(str(func)), torch.is_grad_enabled()
        self.read[has_graph].update(id(one) for one in args if isinstance(one, nn.Parameter))
        if base == "embedding":
            self.tokens[has_graph].setdefault(id(args[0]), args[1].detach().clone())
        if base == "exp" and place_of(args[0]) in self._differences:
            at, nats = self._differences[place_of(args[0])]
            self.nats[at] = nats
        if base != "sub" or not _are_scores(*args[:2]):
            return None
        nats = float((args[0].detach() - args[1].detach()).abs().mean())
        return lambda result: self._differences.update({place_of(result): (index, nats)})

    def is_one(self, trained: set[int], table: int) -> bool:
        """Return whether what was read without a graph is what was read with one: all the weights
        that are ``trained``, and the tokens, at their ``table``.
        """
        mine, scored = self.read[True] & trained, self.read[False] & trained
        tokens, others = self.tokens[True].get(table), self.tokens[False].get(table)
        same = tokens is not None and others is not None and torch.equal(tokens, others)
        return bool(mine) and mine == scored and same

    def read_elsewhere(self) -> list[int]:
        """Return ids of the tables that were read at other places by one side."""
        mine, scored = self.tokens[True], self.tokens[False]
        return [key for key in mine if key in scored and not torch.equal(mine[key], scored[key])]


def _are_scores(first: Any, second: Any) -> bool:
    """Return whether two operands are log-probabilities, and a gradient comes to one of them."""
    return are_compared(first, second) and all(
        bool((one.detach() <= TOLERANCE).all()) for one in (first, second)
    )


def apart_rows(step: Step, policy: OnePolicy) -> tuple[RatioRow, ...]:
    """Return the ratios of a policy to itself that the first micro-batch's loss is made of.

    Undone bitwise; runs the micro-batch once, and five times more for each difference that may be
    one, and not at all where none is. Synchronises the device.
    """
    if all(nats < LEAST_NATS for nats in policy.nats.values()):
        return ()
    with getattr(step, "made_anew", nullcontext)():  # a loop scores its rollout before its loss
        again = OnePolicy()
        look_again(step, 0, again)
        return _rows(step, again)


def _rows(step: Step, policy: OnePolicy) -> tuple[RatioRow, ...]:
    large = [at for at, nats in policy.nats.items() if nats >= LEAST_NATS][:MOST_TRIED]
    named = {id(p): name for name, p in step.view.root.named_parameters() if p.requires_grad}
    embedding = step.view.embedding()
    if not large or embedding is None:
        return ()
    table: Any = step.view.root.get_submodule(embedding).weight
    if not policy.is_one(set(named), id(table)):
        return ()
    plain = first_loss(step, SecondRun())
    used = [at for at in large if first_loss(step, _made_equal(at)) != plain]
    found = [at for at in used if _is_own(step, at)]
    if not found:
        return ()
    ops = first_ops(step)
    elsewhere = tuple(named[key] for key in policy.read_elsewhere() if key in named)
    return tuple(
        RatioRow(
            op=ops[at].name,
            module=ops[at].module,
            largest=policy.nats[at],
            line=line_text(ops[at].line),
            is_of_one=True,
            read_elsewhere=elsewhere,
        )
        for at in found
    )


def _made_equal(index: int) -> OtherResult:
    return OtherResult(index, lambda apart: torch.where(apart.abs() >= LEAST_NATS, 0.0, apart))


def _is_own(step: Step, index: int) -> bool:
    """Return whether the side of a difference to which no gradient comes is another one where the
    weights that train are others.
    """
    before = _Scored(index)
    first_loss(step, before)
    weights = [(p, p.detach() + noise) for p, noise in noises(last_trained(step), _MOVED)]
    after = _Scored(index)
    with step.isolated(), written(weights), after:
        step.run(0)
    return (
        before.seen is not None
        and after.seen is not None
        and not torch.equal(before.seen, after.seen)
    )


class _Scored(SecondRun):
    """Keeps the operand of one difference to which no gradient comes."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        self.seen: Tensor | None = None

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index == self._index:
            self.seen = next(one.detach().clone() for one in args[:2] if not one.requires_grad)
        return func(*args, **kwargs)
