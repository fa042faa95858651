"""A micro-batch of an unchanged loop that can be run again from its tape."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.hosts.tape.given.weights import WEIGHTS
from nanstop.hosts.tape.left_behind import put_back
from nanstop.hosts.tape.needed.fetched import data_of, is_data, rows_taken
from nanstop.hosts.tape.quiet import is_made_of_quiet, is_quiet
from nanstop.hosts.tape.retraced import cuts, makers
from nanstop.hosts.tape.tape import Tape
from nanstop.hosts.tape.tape_calls import Constant, Slot, TapedCall, spelled_by, variable_names
from nanstop.hosts.tape.tensors import SavedHooks, total
from nanstop.hosts.tape.unrepeated import functions_of
from nanstop.hosts.tape.weight_marks import WeightMarks
from nanstop.numerics.graph import is_leaf
from nanstop.numerics.nested import leaves, named_inputs
from nanstop.numerics.tensors import by_torch_alone, is_inexact
from nanstop.own_code import is_of_library
from nanstop.records import BatchRows
from nanstop.replay.rng import RngState
from nanstop.replay.step import Batch, Measure
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import Line

__tracebackhide__ = passes_through


class TapedMicro:
    """See ``hosts.loop.step.Micro``.

    ``batch``: the first model call's inputs and the tensors that the loss alone uses.

    The latter have the names of the script's variables, as they are when the batch is first asked
    for. ``gives_weights``: whether a model was called with weights that are not its own.
    ``is_hooked``: whether it is run again under ``hooks``; ``is_anew``: with what the script made
    before its first model call.
    """

    def __init__(self, tape: Tape, rng: RngState, marks: WeightMarks | None = None) -> None:
        self.tape = tape
        self.rng = rng
        self.loss: Tensor | None = None
        self.reduced = False
        self.reason = ""
        self._marks = marks or WeightMarks()
        self.gives_weights = self.is_hooked = self.is_anew = False
        self._at_backward: list[Any] = []
        self._asked: dict[int, Tensor] = {}
        self._gives: list[tuple[Tensor, int]] = []
        self._variables: dict[int, str] | None = None
        self._result: int | None = None
        self._made: Tensor | None = None

    def closed(self, raw: Sequence[Tensor]) -> None:
        """Note that ``backward`` was called for these raw (unscaled) losses."""
        slots = map(self.tape.slot, raw)
        self.tape.losses += [slot for slot in slots if slot is not None]
        self.loss = total(raw if self.loss is None else [self.loss, *raw])
        self._at_backward = self._marks.of(self._models())

    def asks(self, outputs: Iterable[Tensor]) -> None:
        """Note that gradients of these were asked for, by a call that is recorded."""
        for tensor in outputs:
            slot = self.tape.slot(tensor)
            if slot is not None:
                self._asked[slot] = tensor.detach()

    def returns(self, result: Any) -> bool:
        """Note what the script has made of this micro-batch and hands on, from a closure; return
        whether it can be made again: it is one number, that was made before the backward.
        """
        is_one = isinstance(result, Tensor) and result.numel() == 1
        self._result = self.tape.slot(result) if is_one else None
        return self._result is not None

    def made_again(self, result: Tensor) -> Tensor:
        """Return a ``result`` as the last run made it, 0 where there was none: all of its samples
        were left out.
        """
        return torch.zeros_like(result) if self._made is None else self._made

    @property
    def hooks(self) -> list[SavedHooks]:
        """The script's own hooks on what autograd saves, each once; nobody undoes a library's."""
        found = dict.fromkeys(call.hooks for call in self.tape.needed() if call.hooks)
        return [] if any(any(map(is_of_library, pair)) for pair in found) else [*found]

    @property
    def functions(self) -> list[Any]:
        """What it calls of the script's code, models and hooks apart."""
        return functions_of(self.tape.calls)

    @property
    def is_asked(self) -> bool:
        """Whether gradients of something were asked for."""
        return bool(self._asked)

    def closed_by(self, given: Sequence[tuple[Tensor, Tensor]], *, of_losses: bool = True) -> bool:
        """Close it with gradients that are made of what was asked for, each with its leaf; return
        whether all of them are, and of which losses. Without ``of_losses`` they may be made
        without one.
        """
        slots = [(leaf, self.tape.slot(gradient)) for leaf, gradient in given]
        known = [(leaf, slot) for leaf, slot in slots if slot is not None]
        if not known or len(known) < len(slots):
            return False
        tape, wanted = self.tape, {slot for _, slot in known}
        ends = [at for at, c in enumerate(tape.calls) if wanted & {*c.results, *c.writes}]
        calls, tape.calls = tape.calls, tape.calls[: ends[-1] + 1]
        tape.asked = list(wanted)
        read = {one.index for call in tape.needed() for one in call.held(Slot)}
        tape.losses = [slot for slot in self._asked if slot in read]
        if of_losses and not tape.losses:
            tape.asked, tape.calls = [], calls
            return False
        self._gives = known
        if not of_losses:
            self._doubt_written()
        if tape.losses:
            self.loss = total([self._asked[slot] for slot in tape.losses])
        self._at_backward = self._marks.of(self._models())
        return True

    def _doubt_written(self) -> None:
        """Have numbers that are not finite count as lost where the script has written in place to
        what holds them: by a sum that it has added up, say, which nothing tells from data.
        """
        for call in self.tape.needed():
            for constant in call.held(Constant):
                constant.unrepeated |= constant.version > 0 and not constant.tensor.requires_grad

    def until_now(self) -> TapedMicro:
        """Return what was recorded by now as a micro-batch of its own."""
        tape = copy.copy(self.tape)
        tape.calls, tape.losses = [*self.tape.calls], [*self.tape.losses]
        micro = TapedMicro(tape, self.rng, self._marks)
        micro._asked, micro.gives_weights = {**self._asked}, self.gives_weights
        return micro

    def has_moved(self) -> bool:
        """Return whether the models that it called have other weights than at its backward.

        No device work.
        """
        return self._marks.of(self._models()) != self._at_backward

    def _models(self) -> list[nn.Module]:
        called = (call.function for call in self.tape.calls if call.rng is not None)
        return [function for function in called if isinstance(function, nn.Module)]

    def given_up(self) -> bool:
        """Return whether the script looked at a loss that is not finite and went on without a
        backward.

        Synchronises the device where it looked at one.
        """
        seen = self.tape.questions.looked_at
        if self.loss is not None or seen is None:
            return False
        with by_torch_alone():  # it is no call of the script
            if bool(seen[1].isfinite()):
                return False
        self.loss = seen[1]
        self.tape.losses.append(seen[0])
        return True

    def comes_to_bad(self, *, of_last: bool = False) -> bool:
        """Return whether something that was made since its first model call holds a NaN or, where
        nothing does, +Inf (-Inf is what masks are made of); the last that does is its loss then.
        ``of_last``: only of what led to the last that was made. Runs forward once more.
        """
        tape, values = self.tape, dict[int, Tensor]()
        if self.obstacle():
            return False
        first = next((call.first for call in tape.calls if call.rng is not None), 0)
        ends = [call for call in tape.calls if call.first >= first and not call.foreign]
        slots = [slot for call in ends for slot in call.results]
        tape.losses = slots[-1:] if of_last else slots
        with suppress(Exception):  # the last may raise, and what comes before has been made
            for call in tape.needed():
                call.play(values, {})
        made = [slot for slot in slots if slot in values]
        nan = [slot for slot in made if bool(values[slot].isnan().any())]
        bad = nan or [slot for slot in made if bool((values[slot] == math.inf).any())]
        tape.losses = bad[-1:]
        self.loss = values[bad[-1]].detach().sum() if bad else None
        return bool(bad)

    def asks_of_nan(self, slot: int | None = None) -> bool:
        """Return whether the last that was made is NaN or says something of what is (``loss !=
        loss``, ``not loss < 1e6``), which is its loss then; or a ``slot``, also of an infinity.
        Runs forward once more.
        """
        tape, values = self.tape, dict[int, Tensor]()
        made = {slot: call for call in tape.calls for slot in call.results}
        if self.obstacle() or not made:
            return False
        newest = slot is None
        asked = tape.losses = [max(made) if slot is None else slot]
        with suppress(Exception):
            for call in tape.needed():
                call.play(values, {})
        while asked:
            *asked, slot = asked
            value = values.get(slot)
            if value is not None and not is_inexact(value):
                asked += [one.index for one in made[slot].held(Slot) if one.index in made]
            elif value is not None and (value.isnan() if newest else ~value.isfinite()).any():
                self.loss, tape.losses = value.detach().sum(), [slot]
                return True
        tape.losses = []
        return False

    def is_loss(self) -> bool:
        """Return whether a gradient would come to a weight from what the script has made without
        one, as it would not from an accuracy or a count. Runs forward once more.
        """
        values: dict[int, Tensor] = {}
        with suppress(Exception):  # what is written in place where no gradient is taken
            for call in self.tape.needed():
                trained = copy.copy(call)
                trained.grad = True
                trained.play(values, {})
            return any(values[slot].requires_grad for slot in self.tape.losses)
        return False

    @property
    def made_at(self) -> Line:
        """The line that made its loss."""
        made = {slot: call for call in self.tape.calls for slot in call.results}
        return next((made[slot].line for slot in self.tape.losses if slot in made), None)

    def cuts(self) -> list[Line]:
        """Return the lines by which the loss loses its graph. Runs forward once more."""
        return cuts(self.tape)

    def makers(self, measure: Measure) -> list[Line]:
        """Return the lines that made something of which more is measured than of all that they
        read. Runs forward once more.
        """
        return makers(self.tape, measure)

    @property
    def calls_script(self) -> bool:
        kinds = (call.args[0] for call in self.tape.calls if call.args)
        functions = (kind for kind in kinds if isinstance(kind, type))
        own = (kind for kind in functions if issubclass(kind, torch.autograd.Function))
        made = [c.function for c in self.tape.calls if hasattr(c.function, "__wrapped__")]
        return any(not is_quiet(kind) for kind in own) or not all(map(is_made_of_quiet, made))

    @property
    def batch(self) -> Batch:
        return {name: constant.tensor for name, constant in self._inputs()}

    @property
    def autocast(self) -> tuple[str, bool, torch.dtype]:
        """Device type, whether autocast is on and its format, at the first model call, or the first
        call of any.
        """
        calls = self.tape.calls
        return next((call for call in calls if call.rng is not None), calls[0]).autocast

    def given_weights(self) -> list[Tensor]:
        """Return the weights that models were called with, and that are not their own."""
        given = [call.kwargs[WEIGHTS] for call in self.tape.calls if WEIGHTS in call.kwargs]
        return [constant.tensor for constant in leaves(given, kind=Constant)]

    def trained(self) -> list[Tensor]:
        """Return the tensors that its backward may have given a gradient, each once."""
        held = [p for model in self._models() for p in model.parameters() if p.requires_grad]
        return list({id(tensor): tensor for tensor in (*held, *self.leaves())}.values())

    def obstacle(self) -> str:
        if self.tape.problem:
            return self.tape.problem
        found = next((c.obstacle for c in self.tape.needed() if c.obstacle), "")
        return self.reason if found and self.reason else found

    def refuse(self, reason: str) -> None:
        self.tape.problem = reason

    def rerun(self, batch: Batch | None) -> Tensor:
        replaced = self._replaced(batch)
        values: dict[int, Tensor] = {}
        also = () if self._result is None else (self._result,)
        needed = self.tape.needed(*also, anew=self.is_anew)
        with put_back(needed):
            for call in needed:
                call.play(values, replaced, hooked=self.is_hooked)
        self._made = values[also[0]].detach() if also else None
        for leaf, slot in self._gives:
            gradient = values[slot].detach()
            leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad + gradient
        # Of gradients without a loss their sum tells whether another run gives the same.
        ends = self.tape.losses or self.tape.asked
        return total(values[slot] for slot in ends) if ends else _objective(needed, values)

    @property
    def data(self) -> frozenset[str]:
        """The names of its inputs that a loader has given, or the script has taken by an index."""
        calls, given = self.tape.calls, self.tape.data[0]
        return frozenset(name for name, one in self._inputs() if is_data(one, calls, given))

    @property
    def rows_taken(self) -> BatchRows | None:
        """Which rows of its data its samples are, where the script took them by an index."""
        return rows_taken((constant for _, constant in self._inputs()), self.tape.calls)

    def made_before(self) -> list[Tensor]:
        """Return what it reads of what the script had made before its first model call."""
        given = (c for call in self.tape.needed() for c in call.held(Constant))
        return [constant.tensor for constant in given if constant.origin is not None]

    def leaves(self) -> list[Tensor]:
        calls = self.tape.calls
        held = (c.tensor for call in calls for c in call.held(Constant))
        given = (leaf for leaf, _ in self._gives)
        return [one for one in (*held, *given) if one.requires_grad and is_leaf(one)]

    def _inputs(self) -> Iterator[tuple[str, Constant]]:
        """Yield names and tensors.

        The model's inputs as its forward calls them, those of the loss as the script does.
        """
        needed = self.tape.needed()
        first = next((call for call in needed if call.rng is not None), None)
        made = {i for c in needed if c.outer for i in c.results}
        names: dict[int, str] = {}
        for name, constant in _given(first) if first is not None else ():
            if id(constant.tensor) not in names and constant.origin not in made:
                names[id(constant.tensor)] = name
                yield name, constant
        for call in needed:
            if call is first:
                continue
            for constant in call.held(Constant):
                tensor = constant.tensor
                if constant.origin in made or id(tensor) in names or constant.is_lost:
                    continue
                if tensor.dim() and not tensor.requires_grad:
                    name = self._name(constant, call)
                    if not name or name in names.values():
                        name = f"loss{len(names)}"
                    names[id(tensor)] = name
                    yield name, constant

    def _name(self, constant: Constant, call: TapedCall) -> str:
        """Return what the script calls a tensor, or has called it where it gave it to a call, or
        what it has taken it from; "" where that is not known.
        """
        if self._variables is None:
            self._variables = variable_names()
        key = id(constant.tensor)
        if key not in self._variables:
            calls = self.tape.calls
            self._variables[key] = spelled_by(call, constant) or data_of(constant, calls)
        return self._variables[key]

    def _replaced(self, batch: Batch | None) -> dict[int, Tensor]:
        if batch is None:
            return {}
        return {id(c.tensor): batch[name] for name, c in self._inputs() if name in batch}


def _objective(calls: Sequence[TapedCall], values: Mapping[int, Tensor]) -> Tensor:
    """Return what a run has come to whose own run raised before it had a loss: the number that a
    model makes, no element where it is on the way to one, so that nothing is proven by it.
    """
    made = values.get(calls[-1].first) if calls and calls[-1].rng is not None else None
    return made.detach() if made is not None and not made.dim() else torch.zeros(0)


def _given(call: TapedCall) -> Iterator[tuple[str, Constant]]:
    kwargs = {name: value for name, value in call.kwargs.items() if name != WEIGHTS}
    return named_inputs(call.function, call.args, kwargs, Constant)
