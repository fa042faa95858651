"""Watches an unchanged training loop: what stands in for torch's own functions while nanstop watches a script.

A window is what lies between two optimizer updates. Its *first sink* (``GradScaler.unscale_`` or ``step``,
``clip_grad_norm_``, ``clip_grad_value_``, else the optimizer's step) is where the flag is read and a resolution carried
out: the optimizer alone is too late, it is never called for a step that the scaler leaves out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import get_worker_info

from nanstop.adapters.loop import Guard, OpenSession, Verdict
from nanstop.adapters.loop_step import LoopStep, Micro, UnseenMicro
from nanstop.adapters.plain_view import PlainView
from nanstop.adapters.signatures import is_numeric
from nanstop.adapters.table import Table
from nanstop.adapters.tape import Tape, TapedMicro, tensors, total
from nanstop.core.rng import note_rng
from nanstop.core.sentinel import total_norm
from nanstop.core.snapshot import BufferNotes
from nanstop.errors import NanstopError

MAX_MICROS = 256
"""Micro-batches of a window that are kept: a loop whose updates are not seen must not fill the memory."""

_OP_SECONDS = 6e-6
_TIME_SHARE = 0.01
_FREE_SECONDS = 250e-6
"""Recording the ops outside the model costs about 6 us each. It stays on while that is below 1 % or unnoticeable."""

_NO_MODEL = "no model call was seen before this backward"
_NOT_TAPED = "the loss is computed outside the model, which is recorded from now on"
_log = logging.getLogger("nanstop")


class BufferGroup:
    """Buffers of several modules, noted and restored together; see ``core.snapshot.BufferNotes``."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, BufferNotes] = WeakKeyDictionary()

    def add(self, module: nn.Module) -> Any:
        """Follow a module's buffers from now on; return their first note."""
        if module not in self._known:
            self._known[module] = BufferNotes(module)
        return self._known[module], self._known[module].note()

    def note(self) -> list[Any]:
        return [(notes, notes.note()) for notes in self._known.values()]

    def restore(self, noted: Sequence[Any]) -> None:
        for notes, values in noted:
            notes.restore(values)


@dataclass(slots=True)
class Window:
    """``judged``: ids of parameters whose gradients were looked at. ``closed``: an update has ended it."""

    micros: list[Micro] = field(default_factory=list)
    roots: dict[int, nn.Module] = field(default_factory=dict)
    start: list[Any] = field(default_factory=list)
    judged: set[int] = field(default_factory=set)
    scaler: Any = None
    clip: float | None = None
    vetoed: bool = False
    closed: bool = False


class RawLoops:
    """The state behind the replaced functions. ``paused`` above 0: every one of them is torch's own."""

    def __init__(self, open_session: OpenSession, table: Table) -> None:
        self.guard = Guard(open_session)
        self.paused = 0
        self._table = table
        self._discovering = False
        self._buffers = BufferGroup()
        self._window = Window(closed=True)
        self._micro: TapedMicro | None = None
        self._views: dict[tuple[int, ...], PlainView] = {}
        self._updates: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._thread: int | None = None
        self._scaled: tuple[Any, Tensor] | None = None
        self._stash: list[tuple[Tensor, Tensor]] = []
        self._in_scaler = False
        self._met_failure = False
        self._num_ops = 0
        self._micro_seconds = 0.0
        self._micro_began = 0.0

    @property
    def idle(self) -> bool:
        """Whether a call now is the loop's own: not paused, not inside a model call or a backward, not of a worker."""
        return (
            not self.paused
            and self._thread in (None, threading.get_ident())
            and get_worker_info() is None
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave everything to torch inside."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def install(self) -> None:
        """Replace torch's functions in the table."""
        table, utils = self._table, torch.nn.utils
        table.replace(torch.Tensor, "backward", self.backward)
        table.replace(torch.autograd, "backward", self.backward)
        for module in (utils, utils.clip_grad):
            table.replace(module, "clip_grad_norm_", self.clip_norm)
            table.replace(module, "clip_grad_value_", self.clip_value)
        table.replace(torch.amp.GradScaler, "scale", self.scale)
        table.replace(torch.amp.GradScaler, "unscale_", self.unscale)
        table.replace(torch.amp.GradScaler, "step", self.scaler_step)
        table.hook(register_optimizer_step_pre_hook(self.before_update))
        table.hook(register_optimizer_step_post_hook(self.after_update))
        self.look_for_roots()

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
        self._stop_looking()
        try:
            yield
        finally:
            if looking:
                self.look_for_roots()

    def _stop_looking(self) -> None:
        if self._discovering:
            self._discovering = False
            self._table.restore(nn.Module, "__call__")

    def discover(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``nn.Module.__call__`` until the first update: a trainable module called by the loop is a root."""
        outer = self.idle and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if outer and any(p.requires_grad for p in module.parameters()):
            self._thread = threading.get_ident()
            self._table.replace(type(module), "__call__", self.call)
            return type(module).__call__(module, *args, **kwargs)
        return original(module, *args, **kwargs)

    def call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a root class's ``__call__``."""
        if not self.idle or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        micro = self._begin(module)
        micro.tape.stop()
        try:
            with self.pause(), self._not_looking():
                result = micro.tape.call(
                    partial(original, module),
                    args,
                    kwargs,
                    recorded=_on_one_rank(module),
                    rng=micro.rng if not micro.tape.calls else note_rng(),
                )
        except Exception as error:
            self._raised(error)
            raise
        self._tape_ops(micro)
        return result

    def _begin(self, module: nn.Module) -> TapedMicro:
        window = self._window
        if window.closed:
            window = self._window = Window(start=self._buffers.note())
            self._micro = None
        inner = _inner(module)
        if id(inner) not in window.roots:
            window.roots[id(inner)] = inner
            noted = self._buffers.add(inner)
            if all(notes is not noted[0] for notes, _ in window.start):
                window.start.append(noted)
        if self._micro is None or self._micro.loss is not None:
            now = time.perf_counter()
            self._micro_seconds, self._micro_began = now - self._micro_began, now
            self._micro = TapedMicro(Tape(_device(module), self._raised), note_rng())
        return self._micro

    def _tape_ops(self, micro: TapedMicro) -> None:
        cost = self._num_ops * _OP_SECONDS
        if not self._met_failure and cost > max(_TIME_SHARE * self._micro_seconds, _FREE_SECONDS):
            micro.reason = _NOT_TAPED
        elif not micro.tape.start():
            micro.reason = "the script has a torch function mode of its own"

    # ---- losses

    def scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        """Stand in for ``GradScaler.scale``: keeps the loss as it was before it."""
        micro = self._micro
        if (
            not self.idle
            or micro is None
            or not scaler.is_enabled()
            or not isinstance(outputs, Tensor)
        ):
            return original(scaler, outputs)
        self._window.scaler = scaler
        with self.pause(), _off(micro.tape):
            scaled = micro.tape.call(partial(original, scaler), (outputs,), {})
        self._scaled = ref(scaled), outputs
        return scaled

    def backward(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``Tensor.backward`` and ``torch.autograd.backward``: closes a micro-batch."""
        if not self.idle:
            return original(loss, *args, **kwargs)
        window, micro = self._window, self._micro
        raw = list(tensors(self._unscaled(loss)))
        if micro is None or window.closed:
            self._unseen(raw)
            with self.pause():
                return original(loss, *args, **kwargs)
        self._num_ops = micro.tape.num_ops
        micro.tape.stop()
        try:
            with self.pause():
                result = micro.tape.call(original, (loss, *args), kwargs, keep=True)
        except Exception as error:
            self._raised(error)
            raise
        micro.closed(raw)
        if not any(m is micro for m in window.micros):
            self._keep(micro)
        if kwargs.get("retain_graph") or (len(args) > 1 and args[1]):
            self._tape_ops(micro)
        else:
            self._micro = None
        return result

    def _unscaled(self, loss: Any) -> Any:
        known, self._scaled = self._scaled, None
        return known[1] if known is not None and known[0]() is loss else loss

    def _unseen(self, raw: list[Tensor]) -> None:
        self.look_for_roots()
        if self._window.closed:
            self._window = Window(start=self._buffers.note())
        self._keep(UnseenMicro(_NO_MODEL, total(raw)))

    def _keep(self, micro: Micro) -> None:
        if len(self._window.micros) >= MAX_MICROS:
            self._window.micros = [UnseenMicro(f"the window has more than {MAX_MICROS} backwards")]
        self._window.micros.append(micro)

    # ---- sinks

    def clip_norm(
        self,
        original: Any,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Stand in for ``clip_grad_norm_``: the norm that it computes anyway is the flag."""
        if not self.idle or not self._window.micros or self._window.closed:
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm_of = partial(_norm, parameters, norm_type, foreach)
        self._window.clip = float(max_norm)
        norm = norm_of()
        if norm is None or error_if_nonfinite:
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        if self._judge(parameters, norm).redone:
            norm = norm_of()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
        return norm

    def clip_value(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``clip_grad_value_``, which turns Inf into the bound and leaves NaN."""
        if not self.idle or not self._window.micros or self._window.closed:
            return original(parameters, *args, **kwargs)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._judge(parameters, _norm(parameters))
        return original(parameters, *args, **kwargs)

    def unscale(self, original: Any, scaler: Any, optimizer: Optimizer) -> None:
        """Stand in for ``GradScaler.unscale_``: what it finds is the flag."""
        original(scaler, optimizer)
        if not self.idle or not scaler.is_enabled() or not self._window.micros:
            return
        self._window.scaler = scaler
        found = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        if self._judge(_parameters(optimizer), None, optimizer, found).redone:
            scaler._per_optimizer_states.pop(id(optimizer))
            original(scaler, optimizer)

    def scaler_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        """Stand in for ``GradScaler.step``, which calls no optimizer when it found an Inf."""
        if not self.idle or not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kw)
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                self._window.scaler = scaler
                self._judge(_parameters(optimizer), _norm(_parameters(optimizer)), optimizer)
            else:
                scaler.unscale_(optimizer)
        self._in_scaler = True
        try:
            return original(scaler, optimizer, *args, **kw)
        finally:
            self._in_scaler = False
            self._ended(optimizer)

    def before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at gradients that no earlier sink saw, and hold back a vetoed update; an optimizer's pre-hook."""
        if not self.idle:
            return None
        self._stash.clear()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            return (args[0],), {**kwargs, "closure": partial(self._closure, closure, optimizer)}
        unseen = [p for p in _parameters(optimizer) if id(p) not in self._window.judged]
        if self._window.closed or any(p.grad is not None for p in unseen):
            self._judge(unseen, _norm(unseen), optimizer)
        self._hold_back(optimizer)
        return None

    def after_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Put held back gradients where the script left them; an optimizer's post-hook."""
        if not self.idle:
            return
        for parameter, gradient in self._stash:
            parameter.grad = gradient
        self._stash.clear()
        if not self._in_scaler:
            self._ended(optimizer)

    def _closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        with torch.enable_grad():
            result = closure()
        parameters = _parameters(optimizer)
        # The closure's own result is out already: a window made anew would not match it.
        self._judge(parameters, _norm(parameters), optimizer, can_redo=False)
        self._hold_back(optimizer)
        self._window.closed = True
        return result

    def _hold_back(self, optimizer: Optimizer) -> None:
        # Gradients of None are the only ones that every optimizer leaves out, moments and step counts included.
        if self._window.vetoed:
            self._stash += [(p, p.grad) for p in _parameters(optimizer) if p.grad is not None]
            for parameter, _ in self._stash:
                parameter.grad = None

    def _ended(self, optimizer: Optimizer) -> None:
        self._window.closed = True
        self._stop_looking()
        self.guard.num_updates = self._updates.get(optimizer, 0)
        self._updates[optimizer] = self.guard.num_updates + 1
        self.guard.completed(applied=not self._window.vetoed)

    def _judge(
        self,
        parameters: Sequence[Tensor],
        norm: Tensor | None,
        optimizer: Optimizer | None = None,
        found_inf: Sequence[Tensor] = (),
        *,
        can_redo: bool = True,
    ) -> Verdict:
        window, verdict = self._window, Verdict()
        first, seen = not window.judged, {id(p) for p in parameters}
        if not first and seen <= window.judged and not window.closed:
            return verdict
        window.judged |= seen
        try:
            with self.pause(), torch.no_grad():
                step = self._step(window, optimizer, parameters)
                may = can_redo and first and not window.closed
                verdict = self.guard.judge(step, norm, found_inf, can_redo=may)
        except NanstopError as error:
            _log.error("%s", error)
            raise SystemExit(3) from error
        except Exception as error:  # nanstop is never the reason a run dies
            name = type(error).__name__
            _log.warning("this loop is not watched any more (%s: %s)", name, error)
            self.paused += 1
        self._met_failure |= verdict != Verdict()
        window.vetoed |= not verdict.apply
        return verdict

    def _raised(self, error: Exception) -> None:
        """Report an exception of the script that says that a number was bad."""
        micro = self._micro
        if micro is None or not self.idle or not is_numeric(error):
            return
        micro.tape.stop()
        self._micro = None
        self._met_failure = True
        try:
            with self.pause():
                self._keep(micro)
                self.guard.raised(self._step(self._window, None, ()), error)
        except Exception as own:  # nanstop is never the reason a run dies
            _log.warning("the exception was not investigated (%s: %s)", type(own).__name__, own)
        self._window.closed = True

    def _step(
        self, window: Window, optimizer: Optimizer | None, parameters: Sequence[Tensor]
    ) -> LoopStep:
        optimizer = optimizer or self._optimizer_of(parameters)
        self.guard.num_updates = self._updates.get(optimizer, 0) if optimizer is not None else 0
        view = self._view(window, optimizer, parameters)
        self._open(window, view)
        return LoopStep(
            id=self.guard.step_id(),
            view=view,
            facts=self.guard.facts,
            micros=window.micros or (UnseenMicro(_NO_MODEL),),
            buffers=self._buffers,
            start=window.start,
            apply=partial(_update_again, view, window.clip),
        )

    def _open(self, window: Window, view: PlainView) -> None:
        if self.guard.session is not None:
            return
        first = next((m for m in window.micros if isinstance(m, TapedMicro)), None)
        _, on, dtype = first.tape.calls[0].autocast if first is not None else ("", False, None)
        inputs = list(first.batch.values()) if first is not None else []
        self.guard.open(
            view,
            autocast=str(dtype).removeprefix("torch.") if on else None,
            clip=window.clip,
            num_micro=max(1, len(window.micros)),
            batch_shape=tuple(inputs[0].shape) if inputs else None,
        )

    def _optimizer_of(self, parameters: Sequence[Tensor]) -> Optimizer | None:
        wanted = {id(p) for p in parameters}
        for optimizer in self._updates:
            if any(id(p) in wanted for p in _parameters(optimizer)):
                return optimizer
        return None

    def _view(
        self, window: Window, optimizer: Optimizer | None, parameters: Sequence[Tensor]
    ) -> PlainView:
        roots = list(window.roots.values())
        key = (*window.roots, id(optimizer), id(window.scaler))
        if key not in self._views:
            self._views = {key: PlainView(_one_root(roots, parameters), optimizer, window.scaler)}
        return self._views[key]


def _one_root(roots: Sequence[nn.Module], parameters: Sequence[Tensor]) -> nn.Module:
    """Return the model, or a holder of several; where none was seen, a holder of the parameters."""
    if len(roots) == 1:
        return roots[0]
    holder = nn.Module()
    for root in roots:
        name = type(root).__name__
        taken = sum(key.startswith(name) for key in holder._modules)
        holder._modules[f"{name}{taken or ''}"] = root
    if not roots:
        holder._parameters.update({f"p{i}": p for i, p in enumerate(parameters)})
    return holder


def _on_one_rank(module: nn.Module) -> nn.Module:
    """Return the module inside DDP: a replay on one rank must not wait for the others."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _inner(module: nn.Module) -> nn.Module:
    """Return the module that the script wrote, inside DDP and ``torch.compile``: findings name its parts."""
    module = _on_one_rank(module)
    return module._modules.get("_orig_mod") or module


def _device(module: nn.Module) -> str:
    return next(p.device.type for p in module.parameters())


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _norm(
    parameters: Sequence[Tensor], norm_type: float = 2.0, foreach: bool | None = None
) -> Tensor | None:
    """Return the norm as ``clip_grad_norm_`` computes it, or None without gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    dense = [g._values() if g.is_sparse else g for g in gradients]
    return torch.nn.utils.get_total_norm(dense, norm_type, foreach=foreach) if dense else None


def _update_again(view: PlainView, clip: float | None) -> None:
    scaler, optimizer = view.scaler, view.optimizer
    assert optimizer is not None
    if scaler is not None:
        scaler.unscale_(optimizer)
    if clip is not None:
        parameters = _parameters(optimizer)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, total_norm(parameters))
    (optimizer.step if scaler is None else partial(scaler.step, optimizer))()


@contextmanager
def _off(tape: Tape) -> Iterator[None]:
    """Keep a tape off the stack of function modes inside, if it was on it."""
    was_on = tape.stop()
    try:
        yield
    finally:
        if was_on:
            tape.start()
