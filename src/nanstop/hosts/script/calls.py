"""Model calls, ops and backwards of an unchanged loop, collected into the micro-batches of a window."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from nanstop.errors import TrainingStopped
from nanstop.hosts.loop.given_weights import given_weights, inside_transform
from nanstop.hosts.loop.step import Micro, UnseenMicro
from nanstop.hosts.loop.tape import Tape
from nanstop.hosts.loop.taped_micro import TapedMicro
from nanstop.hosts.loop.tensors import by_torch_alone, tensors, total
from nanstop.hosts.loop.weight_marks import WeightMarks
from nanstop.hosts.patch_table import Table
from nanstop.hosts.script.tape_budget import TapeBudget
from nanstop.hosts.script.window import (
    BufferGroup,
    Window,
    device_of,
    has_parameters,
    inner_module,
    is_scaled_by_hand,
    is_trainable,
    on_one_rank,
)
from nanstop.replay.rng import note_rng
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

MAX_MICROS = 256
"""Micro-batches of a window that are kept: a loop whose updates are not seen must not fill the memory."""
NO_MODEL = "no model call was seen before this backward"

_NOT_TAPED = "the loss is computed outside the model, which is recorded from now on"
_COMPILED = "the script compiles functions, so that ops outside the model are not recorded"
_log = logging.getLogger("nanstop")


class Calls:
    """Stands in for the functions of torch by which a loop makes gradients.

    ``on_error`` is told what they raise, ``on_given_up`` of a micro-batch that the script left out for its loss,
    ``on_updated`` of optimizers that have updated weights inside a backward.
    ``paused`` above 0: every one of them is torch's own. ``met_failure``: from then on every op is recorded, unless
    ``compiles_functions``.
    """

    def __init__(
        self,
        table: Table,
        on_error: Callable[[Exception], None],
        on_given_up: Callable[[TapedMicro], None],
        on_updated: Callable[[list[Optimizer]], None],
    ) -> None:
        self.window = Window(closed=True)
        self.micro: TapedMicro | None = None
        self.buffers = BufferGroup()
        self.paused = 0
        self.met_failure = False
        self._table = table
        self._on_error = on_error
        self._on_given_up = on_given_up
        self._on_updated = on_updated
        self.in_backward = False
        self.updated_inside: list[Optimizer] = []
        self._discovering = False
        self._thread: int | None = None
        self._scaled: tuple[Any, Tensor] | None = None
        self.compiles_functions = False
        self._lingering: list[Tape] = []
        self._early: Tape | None = None
        self._budget = TapeBudget()
        self._marks = WeightMarks()

    def install(self) -> None:
        """Replace torch's functions in the table."""
        self._table.replace(torch.Tensor, "backward", self.backward)
        self._table.replace(torch.autograd, "backward", self.backward)
        self._table.replace(torch.amp.GradScaler, "scale", self.scale)
        self._table.replace(torch.autograd.Function, "apply", self.apply_function)
        self._table.replace(torch.nn.utils.stateless, "_functional_call", self.call_with)
        self.look_for_roots()
        forked = WeakMethod(self.drop)
        # A worker of a data loader inherits the stack of function modes.
        os.register_at_fork(after_in_child=lambda: (drop := forked()) and drop())

    @property
    def idle(self) -> bool:
        """Whether a call now is the loop's own: not paused, not in a model call, a backward, a transform or a worker."""
        return (
            not self.paused
            and self._thread in (None, threading.get_ident())
            and get_worker_info() is None
            and not torch.compiler.is_compiling()
            and not inside_transform()
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave everything to torch inside."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    # ---- model calls

    def look_for_roots(self) -> None:
        """Look at every model call until the next update: those that the loop itself makes are roots."""
        if not self._discovering:
            self._discovering = True
            self._table.replace(nn.Module, "__call__", self.discover)

    @contextmanager
    def _not_looking(self) -> Iterator[None]:
        """Have modules' own ``__call__`` inside a root: compiled code must not see another one."""
        looking = self._discovering
        self.stop_looking()
        try:
            yield
        finally:
            if looking:
                self.look_for_roots()

    def stop_looking(self) -> None:
        if self._discovering:
            self._discovering = False
            self._table.restore(nn.Module, "__call__")

    def discover(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``nn.Module.__call__`` until the first update: a trainable module called by the loop is a root."""
        if self.idle and torch.is_grad_enabled() and is_trainable(module):
            self._thread = threading.get_ident()
            self._table.replace(type(module), "__call__", self.call)
            return type(module).__call__(module, *args, **kwargs)
        return original(module, *args, **kwargs)

    def call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a root class's ``__call__``."""
        if not self.idle:
            return original(module, *args, **kwargs)
        again = on_one_rank(module)
        return self._called(partial(original, module), module, args, kwargs, again=again)

    def call_with(self, original: Any, module: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for what every ``functional_call`` comes to."""
        if not self.idle or not is_trainable(module):
            return original(module, given, *args, **kwargs)
        call, inputs, keywords = given_weights(original, module, given, *args, **kwargs)
        again = call.of(on_one_rank(module))
        return self._called(call, module, inputs, keywords, again=again)

    def _called(self, function: Any, module: Any, args: Any, kwargs: Any, *, again: Any) -> Any:
        """Return what a model call of the loop returns; ``again`` is what a replay calls for it."""
        if not torch.is_grad_enabled():
            with self.untaped():
                return function(*args, **kwargs)
        self._thread = threading.get_ident()
        micro = self._begun(module)
        if micro is None:
            return function(*args, **kwargs)
        micro.tape.stop()
        rng = note_rng() if micro.tape.has_model else micro.rng
        try:
            with self.pause(), self._not_looking():
                result = micro.tape.call(function, args, kwargs, recorded=again, rng=rng)
        except Exception as error:
            self._on_error(error)
            raise
        self._tape_ops(micro)
        return result

    @contextmanager
    def untaped(self) -> Iterator[None]:
        """Keep the tape off the stack of function modes inside, if it was on it."""
        tape = self._tape
        was_on = tape is not None and tape.stop()
        try:
            yield
        finally:
            if was_on and tape is self._tape:
                tape.start()

    @property
    def _tape(self) -> Tape | None:
        return self.micro.tape if self.micro is not None else self._early

    def drop(self) -> None:
        """Let go of a micro-batch that no backward has closed, or that may go on no longer."""
        for tape in self._lingering:
            tape.stop()
        self._lingering.clear()
        if self._tape is not None:
            self._tape.stop()
            if self._tape.lingers:
                self._lingering.append(self._tape)
        self.micro = self._early = None

    def stop_expecting(self) -> None:
        """Record nothing while the gradients come to an update."""
        if self.micro is None:
            self.drop()

    def expect_micro(self) -> None:
        """Record what the script makes of its own tensors before the next model call: see ``Tape``."""
        wanted = self._takes_outer and not self.compiles_functions
        if self._tape is None and wanted and self.idle:
            tape = Tape("cpu", self._on_error)
            if tape.start():
                self._early = tape

    def _begun_tape(self, device: str) -> Tape:
        """Return the tape of a micro-batch that begins now: the one that has recorded since the last, or a new one."""
        tape, self._early = self._early, None
        if tape is not None:
            tape.stop()
        if tape is None or tape.problem or tape.lingers:
            tape = Tape(device, self._on_error)
        tape.device, tape.takes_outer = device, self._takes_outer
        return tape

    @property
    def _takes_outer(self) -> bool:
        return self._budget.outer_is_cheap or self.met_failure

    def look_for_given_up(self) -> None:
        """See whether the micro-batch that is open was left out by the script because its loss is not finite."""
        micro = self.micro
        if micro is not None and micro.given_up():
            self.drop()
            self._on_given_up(micro)

    def _begun(self, module: nn.Module) -> TapedMicro | None:
        """Return the micro-batch that a model call belongs to; None for a module that holds no parameter."""
        try:
            with by_torch_alone():
                if not has_parameters(module):
                    return None
                if device_of(module) != "meta":
                    return self._begin(module)
                self.not_watching("a model on `meta` has no values")
                return None
        except TrainingStopped:
            raise
        except Exception as error:  # nanstop is never the reason a run dies
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        self.not_watching(f"{type(error).__name__}: {error}")

    def not_watching(self, reason: str) -> None:
        """Leave everything to torch from here on, and say why."""
        _log.warning("nanstop: this loop is not watched any more (%s)", reason)
        self.drop()
        self.paused += 1

    def _begin(self, module: nn.Module) -> TapedMicro:
        self.look_for_given_up()
        window = self.window
        if window.closed:
            window = self.window = Window(start=self.buffers.note())
            if self.micro is not None:
                self.drop()
        inner = inner_module(module)
        if id(inner) not in window.roots:
            window.roots[id(inner)] = inner
            noted = self.buffers.add(inner)
            if all(notes is not noted[0] for notes, _ in window.start):
                window.start.append(noted)
        if self.micro is None or self.micro.loss is not None:
            if self.micro is not None:
                self.drop()
            self._budget.begun()
            self.micro = TapedMicro(self._begun_tape(device_of(module)), note_rng(), self._marks)
        return self.micro

    def _tape_ops(self, micro: TapedMicro) -> None:
        if not self.met_failure and not self._budget.is_cheap:
            micro.reason = _NOT_TAPED
        elif self.compiles_functions:
            micro.reason = _COMPILED
        elif not micro.tape.start():
            micro.reason = "the script has a torch function mode of its own"

    # ---- losses

    def apply_function(self, original: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``autograd.Function.apply``, which no function mode sees: a tape gets it as one call."""
        micro = self.micro
        if not self.idle or micro is None or not micro.tape.stop():
            return original(kind, *args, **kwargs)
        try:
            with self.pause():
                return micro.tape.call(original, (kind, *args), kwargs)
        except Exception as error:
            self._on_error(error)
            raise
        finally:
            if micro is self.micro:
                micro.tape.start()

    def scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        """Stand in for ``GradScaler.scale``: keeps the loss as it was before it."""
        micro = self.micro
        wanted = self.idle and scaler.is_enabled() and isinstance(outputs, Tensor)
        if not wanted or micro is None:
            return original(scaler, outputs)
        self.window.scaler = scaler
        with self.untaped(), self.pause():
            scaled = micro.tape.call(partial(original, scaler), (outputs,), {})
        self._scaled = ref(scaled), outputs
        return scaled

    def backward(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``Tensor.backward`` and ``torch.autograd.backward``: closes a micro-batch."""
        if not self.idle:
            return original(loss, *args, **kwargs)
        micro = self.micro
        raw = list(tensors(self._unscaled(loss)))
        if micro is None or self.window.closed:
            self.drop()
            self._unseen(raw)
            with self._inside_backward():
                result = original(loss, *args, **kwargs)
            self._look_for_updates()
            return result
        self._budget.recorded(micro.tape)
        micro.tape.stop()
        if self._discovering and self.window.scaler is None and is_scaled_by_hand(raw):
            self.window.note("scale")
        try:
            with self._inside_backward():
                result = micro.tape.call(original, (loss, *args), kwargs, keep=True)
        except Exception as error:
            self._on_error(error)
            raise
        self._close(micro, raw)
        if self.window.scaler is not None:
            self.window.note_arrival()
        self._look_for_updates()
        if kwargs.get("retain_graph") or (len(args) > 1 and args[1]):
            self._tape_ops(micro)
        else:
            self.drop()
            self.expect_micro()
        return result

    def _look_for_updates(self) -> None:
        if self.updated_inside:
            self._on_updated(self.updated_inside)
            self.updated_inside.clear()

    def _close(self, micro: TapedMicro, raw: list[Tensor]) -> None:
        try:
            micro.closed(raw)
            if not any(m is micro for m in self.window.micros):
                self.keep(micro)
        except Exception as error:  # losses of several devices, say
            self._give_up(error)

    @contextmanager
    def _inside_backward(self) -> Iterator[None]:
        """Leave everything to torch inside; ``updated_inside`` are optimizers that hooks on gradients call there."""
        self.updated_inside.clear()
        self.in_backward = True
        try:
            with self.pause():
                yield
        finally:
            self.in_backward = False

    def _unscaled(self, loss: Any) -> Any:
        known, self._scaled = self._scaled, None
        return known[1] if known is not None and known[0]() is loss else loss

    def _unseen(self, raw: list[Tensor]) -> None:
        self.look_for_roots()
        if self.window.closed:
            self.window = Window(start=self.buffers.note())
        self.keep(UnseenMicro(NO_MODEL, total(raw)))

    def keep(self, micro: Micro) -> None:
        if len(self.window.micros) >= MAX_MICROS:
            self.window.micros = [UnseenMicro(f"the window has more than {MAX_MICROS} backwards")]
        self.window.micros.append(micro)
