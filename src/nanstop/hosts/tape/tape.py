"""One micro-batch of an unchanged loop as a list of calls.

Model calls, the ops between them and ``backward``.

A tape holds functions and inputs, never results: an input that is an earlier result is a ``Slot``.
It is played again from the first model call; what the loss does not need is left out.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nanstop.detect.numeric_errors import is_numeric
from nanstop.hosts.tape.given.constants import GivenConstants
from nanstop.hosts.tape.given.fetch import Fetch
from nanstop.hosts.tape.left_behind import LeftBehind
from nanstop.hosts.tape.needed.calls import Delivered, calls_for
from nanstop.hosts.tape.needed.fetched import comes_of_model
from nanstop.hosts.tape.numbers import Numbers, Questions, is_answer
from nanstop.hosts.tape.tape_calls import (
    HISTORY,
    Constant,
    Cuts,
    HeldData,
    Lent,
    Slot,
    TapedCall,
    forget_written,
    is_kept,
    root_of,
)
from nanstop.hosts.tape.tape_functions import (
    AS_IT_IS,
    GRADIENTS,
    LITERALS,
    NOT_REPEATED,
    NUMBERS,
    PLAIN,
    READS,
    SHAPES,
)
from nanstop.hosts.tape.tensors import autocast_state, saved_hooks
from nanstop.hosts.tape.unrepeated import Unrepeated
from nanstop.numerics.graph import is_leaf, node_of
from nanstop.numerics.tensors import by_torch_alone, is_in_place, tensors, version
from nanstop.replay.function_modes import PassingMode
from nanstop.replay.rng import RngState
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import user_frame

__tracebackhide__ = passes_through

MAX_CALLS = 4096
"""Length at which a tape ends: a loop that never calls ``backward`` must not fill the memory."""
_Told = Callable[[Exception], None]
TapedOperand = tuple[Tensor, int, Slot | None]
"""A tensor among a call's arguments, its version before the call, its slot if it has one."""


class Tape(PassingMode):
    """Records while it is on the stack of function modes.

    Model calls and ``backward`` are added by ``call``.

    Ops on small tensors from outside are recorded as well, unless they write or draw: the mean of a
    batch's rewards is part of the loss. What they make before the first model call is taken as it
    is, and made again only where it is not finite. ``num_ops``: how many ops on the model's results
    it recorded. ``num_outer``: how many others, and whatever it saw before a model call but for the
    ``num_passed`` times that it was a gradient or a shape. ``takes_outer``: whether it records
    those at all. ``on_error`` is told what such an op raises, ``on_number`` of a number that the
    script reads before the first model call and that is not finite, with the slot of what it reads,
    ``on_write`` of a tensor that is about to be written in place. ``losses``: slots of what is to
    be replayed, ``asked``: of gradients. ``cuts``: see ``Cuts``. ``refused``: see ``ends_refused``.
    ``problem``: why it records no more. Its slots are those from ``begin`` to ``count``.
    """

    def __init__(self, device: str, on_error: _Told, left: LeftBehind | None = None) -> None:
        super().__init__()
        self.device = device
        self.on_error = on_error
        self.on_number: Callable[[float, int | None], None] = lambda *_: None
        self.on_write: Callable[[Tensor], None] | None = None
        self.left = left or LeftBehind()
        self.unrepeated = Unrepeated()
        self.num_ops = self.num_outer = self.num_passed = 0
        self.takes_outer = True
        self.questions = Questions()
        self.losses, self.asked = list[int](), list[int]()
        self.cuts: Cuts | None = None
        self.refused: TapedCall | None = None
        self.calls: list[TapedCall] = []
        self.problem = ""
        self.slots: dict[int, tuple[weakref.ref[Tensor], Slot]] = {}
        self.count = self.begin = self.left.num_slots
        self._first_of_model: int | None = None
        self._numbers = Numbers()
        self._held, self._lent = HeldData(), Lent()
        self.given = GivenConstants()
        self.data: Delivered = {}, {}
        self.fetch = Fetch()

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in SHAPES or (func in GRADIENTS and id(args[0]) not in self.slots):
            self.num_passed += 1
            return func(*args, **kwargs)
        is_writing = is_in_place(getattr(func, "__name__", "")) or "out" in kwargs
        is_early = self._first_of_model is None
        if is_early and self.fetch.is_on and self.fetch.is_past() and not is_writing:
            return self._unrecorded(func, args, kwargs)
        if is_writing:
            self._writes(args, kwargs)
        if is_early and func in NUMBERS:
            return self._read(func, args, kwargs)
        self.num_outer += is_early
        if self.lingers or self.problem:
            return func(*args, **kwargs)
        operands: list[TapedOperand] = []
        literal = func in LITERALS and not is_early
        call = self._before(func, args, kwargs, operands, always=literal)
        if call is None:
            return self._unrecorded(func, args, kwargs) if is_early else func(*args, **kwargs)
        self.num_ops += not call.outer
        self.num_outer += call.outer and not is_early
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if is_early and is_numeric(error):
                self.refused = call
            elif not call.outer or is_numeric(error):
                self.on_error(error)
            else:
                self.calls.pop()
            raise
        self._after(call, operands, result)
        if not call.outer and (func in READS or is_answer(result)):
            with by_torch_alone():
                slot = self.questions.note(func, call.line, operands, result)
            self._numbers.read(result, slot, call.line)
        useless = not (call.count or call.writes or call.foreign)
        if useless and self.calls and self.calls[-1] is call:
            self.calls.pop()
        return result

    def _unrecorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call that is recorded only where it refuses its operands, and draws nothing."""
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if is_numeric(error):
                self.refused = self._before(func, args, kwargs, [], always=True)
            raise
        known = self.slot if func in NOT_REPEATED else None
        self.unrepeated.follow((*args, *kwargs.values()), result, known=known)
        return result

    @property
    def is_blank(self) -> bool:
        """Whether it has seen nothing yet and may go on."""
        is_seen = self.calls or self.num_outer or self.num_passed or self.unrepeated.made
        return not (is_seen or self.problem or self.lingers)

    @property
    def ends_refused(self) -> bool:
        """Whether its last call is one before any model call that refused what it was given."""
        return bool(self.calls) and self.calls[-1] is self.refused and not self.problem

    def delivered(self, batch: Iterable[Tensor]) -> None:
        """Note what a loader gives to the script."""
        for tensor in batch:
            slot = self.slot(tensor)
            if slot is not None:
                self.data[0][slot] = Constant(tensor, version(tensor), slot)

    def keep(self, written: Tensor) -> None:
        """Have the calls hold what they were given of a tensor that is about to be written to."""
        self.given.keep(written)

    def _writes(self, args: Any, kwargs: Any) -> None:
        with by_torch_alone():
            for tensor in tensors(args[:1]):
                if is_kept(tensor):
                    (self.on_write or self.keep)(tensor)
                    self._lend(tensor, tensors((args[1:], kwargs)))

    def _lend(self, written: Tensor, given: Iterable[Tensor]) -> None:
        """Have calls write to a copy of a tensor from outside what comes from the model."""
        root = root_of(written)
        is_filled = not self._is_of_model(root) and any(map(self._is_of_model, given))
        if not (is_filled and self._held.takes([root], again=True)):
            return
        state, grad = autocast_state(self.device), torch.is_grad_enabled()
        for tensor, function, args in self._lent.calls(root, written, self.slots):
            one = TapedCall(function, args, {}, state, grad, None, None, self.count, count=1)
            self.calls.append(one)
            self.slots[id(tensor)] = weakref.ref(tensor), Slot(self.count)
            self._lent.note(tensor, self.count)
            self.count += 1

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a number that is read before a model call, and tell of one that is not finite."""
        number = func(*args, **kwargs)
        if isinstance(number, float) and not math.isfinite(number):
            self.on_number(number, self.slot(args[0]))
        return self._numbers.read_of(args[0], number, self.slot)

    def call(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        recorded: Callable[..., Any] | None = None,
        rng: RngState | None = None,
        keep: bool = False,
        always: bool = True,
        is_alike: Callable[[TapedCall], bool] | None = None,
    ) -> Any:
        """Return what ``function`` returns and add the call (of ``recorded``, if that is to be
        repeated), ``always`` or only where an op on the same tensors would be recorded.

        ``is_alike``: asked afterwards, whether the call made again would return the same.
        """
        operands: list[TapedOperand] = []
        if rng is not None and self._first_of_model is None:
            self._first_of_model = self.count
        # Not `or`: a module may have a length of its own, which is 0 or which raises.
        repeated = function if recorded is None else recorded
        call = self._before(repeated, args, kwargs, operands, always=always)
        if call is not None:
            call.rng, call.keep = rng, keep
        result = function(*args, **kwargs)
        if call is not None and is_alike is not None and not is_alike(call):
            if self.calls[-1] is call:
                self.calls.pop()
            call = None
        if call is not None:
            self._after(call, operands, result)
        elif rng is None:
            self.unrepeated.note(result)
        return result

    def _before(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        operands: list[TapedOperand],
        *,
        always: bool = False,
    ) -> TapedCall | None:
        """Note a call that is about to be made.

        None for an op that is not recorded, or where that fails.
        """
        try:
            with by_torch_alone():
                noted = self._note(args, operands), self._note(kwargs, operands) if kwargs else {}
                outer = not always and all(slot is None or slot.outer for _, _, slot in operands)
                if outer and not (self.takes_outer and self._may_hold(function, operands)):
                    return None
                return self._begin(function, noted, outer=outer)
        except Exception as error:  # objects of the script: looking at one may raise anything
            self._give_up(error)
            return None

    def _after(self, call: TapedCall, operands: list[TapedOperand], result: Any) -> None:
        try:
            with by_torch_alone():
                self._end(call, operands, result)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.problem = f"a call cannot be recorded ({type(error).__name__}: {error})"

    @property
    def has_model(self) -> bool:
        """Whether a model was called."""
        return self._first_of_model is not None

    def slot(self, tensor: Any) -> int | None:
        """Return the slot of a tensor that a recorded call returned, else None."""
        known = self.slots.get(id(tensor))
        return known[1].index if known is not None and known[0]() is tensor else None

    def _is_of_model(self, tensor: Tensor) -> bool:
        known = self.slots.get(id(tensor))
        return known is not None and not known[1].outer and known[0]() is tensor

    def _may_hold(self, function: Any, operands: list[TapedOperand]) -> bool:
        """Return whether an op on tensors from outside can be repeated, and holds nothing large
        but parameters.
        """
        if not operands or function in NOT_REPEATED or len(self.calls) >= MAX_CALLS // 2:
            return False
        outside = [tensor for tensor, _, slot in operands if slot is None]
        if not self._held.takes(outside):
            return False
        return self.cuts is not None or all(map(is_leaf, outside))

    def _begin(
        self, function: Callable[..., Any], noted: tuple[Any, Any], *, outer: bool
    ) -> TapedCall:
        grad, frame = torch.is_grad_enabled(), user_frame()
        line = None if frame is None else (frame.f_code, frame.f_lineno)
        state = autocast_state(self.device)
        call = TapedCall(function, *noted, state, grad, line, None, self.count, outer=outer)
        call.instruction, call.hooks = -1 if frame is None else frame.f_lasti, saved_hooks()
        if len(self.calls) < MAX_CALLS:
            self.calls.append(call)  # before the call: one that raises is repeated, too
        else:
            self.problem = f"more than {MAX_CALLS} calls before backward"
        return call

    def _end(self, call: TapedCall, operands: list[TapedOperand], result: Any) -> None:
        if call.outer and self._prepares(operands, result):
            self.calls.pop()
            return
        for tensor, before, slot in operands:
            if version(tensor) == before:
                continue
            if slot is not None:
                call.writes += (slot.index,)
                call.into = self._lent.slots(tensor)
            elif not call.keep and call.rng is None:
                call.foreign = "the loss changes in place a tensor from outside the iteration"
        for tensor in (result,) if isinstance(result, Tensor) else tensors(result):
            if not (call.foreign and is_leaf(tensor) and tensor.requires_grad):  # an updated weight
                self.slots[id(tensor)] = weakref.ref(tensor), Slot(self.count, call.outer)
                self._lent.note(tensor, self.count)
            self.count += 1
        if self.unrepeated.made and any(one.unrepeated for one in call.held(Constant)):
            self.unrepeated.note(result)
        call.count = self.count - call.first
        call.scalar = isinstance(result, Tensor) and result.dim() == 0

    def _prepares(self, operands: list[TapedOperand], result: Any) -> bool:
        """Return whether an outer op wrote in place or made nothing new.

        Its operands are taken as they are later.
        """
        written = [tensor for tensor, before, _ in operands if version(tensor) != before]
        if any(node_of(tensor) is not None for tensor in written):
            return False
        slots = [slot.index for tensor, at, slot in operands if slot and version(tensor) != at]
        if slots and all(comes_of_model(slot, self.calls) for slot in slots):  # it is no data
            return False
        is_stale = not all(map(is_kept, written))  # else the calls have copies of the old values
        forget_written(self.slots, written, parts=self.has_model, made=is_stale)
        return bool(written) or any(result is tensor for tensor, _, _ in operands)

    def _note(self, value: Any, operands: list[TapedOperand]) -> Any:
        """Return ``value`` with its tensors replaced by slots and constants, and append these to
        ``operands``.
        """
        if isinstance(value, Tensor):
            known = self.slots.get(id(value))
            slot = known[1] if known is not None and known[0]() is value else None
            operands.append((value, version(value), slot))
            first = self._first_of_model
            trains = slot is not None and slot.outer and is_leaf(value) and value.requires_grad
            if (
                slot is not None
                and not trains
                and (first is None or slot.index >= first or node_of(value) is not None)
            ):
                return slot
            # Whoever holds a tensor holds its graph: of one with a history only the fact is kept.
            if node_of(value) is not None:
                found = self.left.stand_in(value, self)
                if found is not None:
                    operands[-1] = (value, version(value), found[1])
                    return found[0]
                return HISTORY if self.cuts is None else self.cuts.of(value)
            origin = slot.index if slot is not None and not trains else None
            constant = Constant(value, operands[-1][1], origin, value in self.unrepeated)
            self.given.add(constant)
            return constant
        kind = type(value)
        if kind in PLAIN:
            return self._numbers.of(value) if kind is float else value
        if kind is tuple or kind is list:
            return kind([v if type(v) in AS_IT_IS else self._note(v, operands) for v in value])
        if kind is dict:
            return {key: self._note(entry, operands) for key, entry in value.items()}
        # A container of another class is kept whole, unless results of the tape are in it.
        return HISTORY if any(node_of(t) is not None for t in tensors(value)) else value

    def needed(self, *also: int, **how: bool) -> list[TapedCall]:
        """Return, in order, the calls that the losses and the slots ``also`` depend on; ``how``:
        see ``calls_for``.
        """
        ends, first = (*self.losses, *self.asked, *also), self._first_of_model or 0
        return calls_for(ends, self.calls, first, delivered=self.data, **how)
