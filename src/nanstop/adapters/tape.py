"""One micro-batch of an unchanged loop as a list of calls: model calls, the ops between them and ``backward``.

A tape holds functions and inputs, never results: an input that is an earlier result is a ``Slot``. It is played again
from the first model call; what the loss does not need is left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from nanstop.adapters.tape_calls import (
    HISTORY,
    Call,
    Constant,
    Slot,
    autocast_state,
    by_torch_alone,
    leaves,
    tensors,
    total,
    user_line,
    version,
)
from nanstop.core.rng import RngState
from nanstop.core.step import Batch

MAX_CALLS = 4096
"""Length at which a tape is given up: a loop that never calls ``backward`` must not fill the memory."""

_LOOKS = frozenset(
    {
        Tensor.item,
        Tensor.__float__,
        *(
            getattr(owner, f"is{kind}")
            for owner in (torch, Tensor)
            for kind in ("nan", "inf", "finite")
        ),
    }
)
_PLAIN = frozenset(
    {int, float, bool, str, type(None), type(...), slice, torch.dtype, torch.device, torch.Size}
)

Operand = tuple[Tensor, int, Slot | None]
"""A tensor among a call's arguments, its version before the call, its slot if it has one."""


class Tape(TorchFunctionMode):
    """Records while it is on the stack of function modes; model calls and ``backward`` are added by ``call``.

    ``num_ops``: how many ops on recorded results it saw. ``on_error`` is told what such an op raises. ``looked_at``: the
    last scalar whose value, or whether it is finite, the script asked for. ``losses``: slots of what is to be replayed.
    ``problem``: why it records nothing any more.
    """

    def __init__(self, device: str, on_error: Callable[[Exception], None]) -> None:
        super().__init__()
        self.device = device
        self.on_error = on_error
        self.num_ops = 0
        self.lingers = False
        self.looked_at: tuple[Slot | None, Tensor] | None = None
        self.losses: list[int] = []
        self.calls: list[Call] = []
        self.problem = ""
        self._slots: dict[int, tuple[weakref.ref[Tensor], Slot]] = {}
        self._count = 0
        self._started = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.lingers or self.problem:
            return func(*args, **kwargs)
        operands: list[Operand] = []
        call = self._before(func, args, kwargs, operands)
        if call is None:
            return func(*args, **kwargs)
        self.num_ops += 1
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.on_error(error)
            raise
        self._after(call, operands, result)
        if func in _LOOKS:
            self._looked(operands[0])
        if not (call.count or call.writes or call.foreign) and self.calls[-1] is call:
            self.calls.pop()
        return result

    def call(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        recorded: Callable[..., Any] | None = None,
        rng: RngState | None = None,
        keep: bool = False,
    ) -> Any:
        """Return what ``function`` returns and add the call (of ``recorded``, if another one is to be repeated)."""
        operands: list[Operand] = []
        # Not `or`: a module may have a length of its own, which is 0 or which raises.
        repeated = function if recorded is None else recorded
        call = self._before(repeated, args, kwargs, operands, always=True)
        if call is not None:
            call.rng, call.keep = rng, keep
        result = function(*args, **kwargs)
        if call is not None:
            self._after(call, operands, result)
        return result

    def _before(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        operands: list[Operand],
        *,
        always: bool = False,
    ) -> Call | None:
        """Note a call that is about to be made; None for an op on nothing recorded, or where that fails."""
        try:
            with by_torch_alone():
                noted = self._note(args, operands), self._note(kwargs, operands)
                if not always and all(slot is None for _, _, slot in operands):
                    return None
                return self._begin(function, noted)
        except Exception as error:  # objects of the script: looking at one may raise anything
            self._give_up(error)
            return None

    def _after(self, call: Call, operands: list[Operand], result: Any) -> None:
        try:
            with by_torch_alone():
                self._end(call, operands, result)
        except Exception as error:  # as above
            self._give_up(error)

    def _looked(self, operand: Operand) -> None:
        with by_torch_alone():
            if operand[0].dim() == 0:
                self.looked_at = operand[2], operand[0].detach()

    def _give_up(self, error: Exception) -> None:
        self.problem = f"a call cannot be recorded ({type(error).__name__}: {error})"

    def slot(self, tensor: Any) -> int | None:
        """Return the slot of a tensor that a recorded call returned, else None."""
        known = self._slots.get(id(tensor))
        return known[1].index if known is not None and known[0]() is tensor else None

    def _begin(self, function: Callable[..., Any], noted: tuple[Any, Any]) -> Call:
        grad, line = torch.is_grad_enabled(), user_line()
        call = Call(function, *noted, autocast_state(self.device), grad, line, None, self._count)
        if len(self.calls) < MAX_CALLS:
            self.calls.append(call)  # before the call: one that raises is repeated, too
        else:
            self.problem = f"more than {MAX_CALLS} calls before backward"
        return call

    def _end(self, call: Call, operands: list[Operand], result: Any) -> None:
        for tensor, before, slot in operands:
            if version(tensor) == before:
                continue
            if slot is not None:
                call.writes += (slot.index,)
            elif not call.keep and call.rng is None:
                call.foreign = "the loss changes in place a tensor from outside the iteration"
        for tensor in (result,) if isinstance(result, Tensor) else tensors(result):
            self._slots[id(tensor)] = weakref.ref(tensor), Slot(self._count)
            self._count += 1
        call.count = self._count - call.first

    def _note(self, value: Any, operands: list[Operand]) -> Any:
        """Return ``value`` with its tensors replaced by slots and constants, and append these to ``operands``."""
        if isinstance(value, Tensor):
            known = self._slots.get(id(value))
            slot = known[1] if known is not None and known[0]() is value else None
            operands.append((value, version(value), slot))
            if slot is not None:
                return slot
            # Whoever holds a tensor holds its graph: of one with a history only the fact is kept.
            return Constant(value, operands[-1][1]) if value.grad_fn is None else HISTORY
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple or kind is list:
            return kind([self._note(entry, operands) for entry in value])
        if kind is dict:
            return {key: self._note(entry, operands) for key, entry in value.items()}
        # A container of another class is kept whole, unless results of the tape are in it.
        return HISTORY if any(t.grad_fn is not None for t in tensors(value)) else value

    def needed(self) -> list[Call]:
        """Return, in order, the calls that the losses depend on."""
        wanted = set(self.losses)
        chosen: list[Call] = []
        last = len(self.calls) - 1
        for place in range(last, -1, -1):
            call = self.calls[place]
            results = range(call.first, call.first + call.count)
            # A write may reach the loss through a view of its target: none but foreign ones is left out.
            if call.keep or call.writes or place == last or wanted.intersection(results):
                chosen.append(call)
                wanted.update(s.index for s in leaves(call.args, call.kwargs, kind=Slot))
        return chosen[::-1]

    def start(self) -> bool:
        """Record ops from here on; False where the script has a function mode of its own (its order must hold)."""
        # Modes leave the stack by its top, whoever is there; only that of set_default_device stays where it is.
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        if any(mode is not default for mode in _modes()):
            return False
        _push_mode(self)
        self._started = True
        return True

    def stop(self) -> bool:
        """Take the tape off the stack of function modes, wherever in it it is; return whether it was there.

        Inside an op that raised it cannot be taken off: torch holds it and puts it back. It ``lingers`` then, records
        nothing any more, and a later ``stop`` succeeds.
        """
        if not any(mode is self for mode in _modes()):
            self.lingers = self._started
            return False
        self._started = self.lingers = False
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        return True


class TapedMicro:
    """See ``loop_step.Micro``. ``batch``: the first model call's inputs and the tensors that the loss alone uses."""

    def __init__(self, tape: Tape, rng: RngState) -> None:
        self.tape = tape
        self.rng = rng
        self.loss: Tensor | None = None
        self.reason = ""

    def closed(self, raw: Sequence[Tensor]) -> None:
        """Note that ``backward`` was called for these raw (unscaled) losses."""
        slots = map(self.tape.slot, raw)
        self.tape.losses += [slot for slot in slots if slot is not None]
        self.loss = total(raw if self.loss is None else [self.loss, *raw])

    def given_up(self) -> bool:
        """Return whether the script looked at a loss that is not finite and went on without a backward.

        Synchronises the device where it looked at one.
        """
        if self.loss is not None or self.tape.looked_at is None:
            return False
        slot, seen = self.tape.looked_at
        if slot is None or bool(seen.isfinite()):
            return False
        self.loss = seen
        self.tape.losses.append(slot.index)
        return True

    @property
    def batch(self) -> Batch:
        return {name: constant.tensor for name, constant in self._inputs()}

    def obstacle(self) -> str:
        if self.tape.problem:
            return self.tape.problem
        found = next((c.obstacle for c in self.tape.needed() if c.obstacle), "")
        return self.reason if found and self.reason else found

    def rerun(self, batch: Batch | None) -> Tensor:
        replaced = self._replaced(batch)
        values: dict[int, Tensor] = {}
        for call in self.tape.needed():
            call.play(values, replaced)
        return total(values[slot] for slot in self.tape.losses)

    def _inputs(self) -> Iterator[tuple[str, Constant]]:
        """Yield names and tensors: positionals as ``arg0``.., others by name, those of the loss alone as ``loss0``.."""
        first, *rest = self.tape.needed() or (None,)
        seen: set[int] = set()
        for name, constant in _named(first) if first is not None else ():
            if id(constant.tensor) not in seen:
                seen.add(id(constant.tensor))
                yield name, constant
        for call in rest:
            for constant in leaves(call.args, call.kwargs, kind=Constant):
                tensor = constant.tensor
                if tensor.dim() and not tensor.requires_grad and id(tensor) not in seen:
                    yield f"loss{len(seen)}", constant
                    seen.add(id(tensor))

    def _replaced(self, batch: Batch | None) -> dict[int, Tensor]:
        if batch is None:
            return {}
        return {id(c.tensor): batch[name] for name, c in self._inputs() if name in batch}


def _modes() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(place) for place in range(count)]


def _named(call: Call) -> Iterator[tuple[str, Constant]]:
    entries = [(f"arg{place}", value) for place, value in enumerate(call.args)]
    for name, value in (*entries, *call.kwargs.items()):
        if isinstance(value, Constant):
            yield name, value
        elif type(value) is dict:
            yield from ((str(k), v) for k, v in value.items() if isinstance(v, Constant))
        else:
            numbered = enumerate(leaves(value, kind=Constant))
            yield from ((f"{name}.{place}", leaf) for place, leaf in numbered)
