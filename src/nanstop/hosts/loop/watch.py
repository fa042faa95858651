"""The manual interface to raw PyTorch loops: ``nanstop.watch(model, optimizer)``.

Loops without any call of nanstop are watched by ``hosts.script``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.detect.numeric_errors import is_numeric
from nanstop.detect.sentinel import total_norm
from nanstop.errors import NanstopError, TrainingStopped
from nanstop.hosts.loop.controller import LoopController
from nanstop.hosts.loop.function_micro import FunctionMicro
from nanstop.hosts.loop.step import LoopStep
from nanstop.hosts.model.updates import accumulation_of
from nanstop.hosts.model.view import PlainView
from nanstop.hosts.replicas import ONE_COPY
from nanstop.hosts.sharded.models import SharedModels, reduces
from nanstop.hosts.sharded.unshared import unshared
from nanstop.hosts.tape.pieces import pieces, program_of_function
from nanstop.hosts.tape.tensors import autocast_state, total
from nanstop.hosts.tape.weight_marks import WeightMarks
from nanstop.measure.accounts.gradient_accounts import GradientAccounts
from nanstop.numerics.tensors import format_name
from nanstop.numerics.trained import held_by
from nanstop.own_code import is_library
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.copies.snapshot import ready_scaler
from nanstop.replay.rng import RngNotes
from nanstop.session.watched_run import OpenSession
from nanstop.tracebacks import passes_through, raised_in
from nanstop.tracing.places import user_line

__tracebackhide__ = passes_through

Pause = Callable[[], AbstractContextManager[None]]


class WatchedLoop:
    """The manual interface: ``step`` for each micro-batch, ``update`` for each optimizer step.

    Losses are divided by the number of micro-batches of a window: ``accumulation``, or the number
    in the window before; where a window turns out longer or shorter its gradients are corrected
    before they are used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        open_session: OpenSession,
        *,
        accumulation: int | None = None,
        pause: Pause = nullcontext,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise NanstopError(
                f"watch(model, optimizer) needs a torch module and a torch optimizer, got "
                f"{type(model).__name__} and {type(optimizer).__name__}"
            )
        if accumulation is not None and accumulation < 1:
            raise NanstopError(f"accumulation is {accumulation}; it counts micro-batches from 1")
        self.view, self._optimizer = PlainView(model, optimizer), optimizer
        self.controller = LoopController(open_session)
        self.accumulation = accumulation
        self._pause = pause
        self._divisor = accumulation or 1
        self._buffers = BufferNotes(model)
        self._start: Any = None
        self._micros: list[FunctionMicro] = []
        self._clip: float | None = None
        self._autocast: str | None = None
        self._accounts = GradientAccounts()
        self._accounts.made(optimizer)
        self._is_live = self._is_rewritten = False
        """``_is_live``: what happens to gradients is the run's own, and accounted for."""
        self._marks = WeightMarks()
        self._marked: list[Any] = []
        self._shared = SharedModels("watch")
        self._rng_notes = RngNotes()
        self._other_errors: set[type[Exception]] = set()
        """Classes of what the script has raised for another reason than a bad number."""

    @property
    def session(self) -> Any:
        """The session, or None before the first step."""
        return self.controller.session

    def step(self, loss_fn: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Call ``loss_fn(batch)`` and backward; return the detached loss, not divided.

        No synchronisation, but where copies of several ranks are compared. Errors: what
        ``loss_fn`` raises, after it was reported where it says that a number was bad.
        """
        if not callable(loss_fn):
            raise NanstopError(f"step(loss_fn, batch): {type(loss_fn).__name__} cannot be called")
        if not self._micros:
            self._start, self._is_rewritten = self._buffers.note(), False
        else:
            self._look_for_writes()
        if self.controller.hooks is None:
            self.controller.look_at_hooks(self.view.model)
        micro = FunctionMicro(
            loss_fn,
            batch,
            backward=self.backward,
            rng=self._rng_notes.note(),
            reduced=reduces(self.view.root),
        )
        self._micros.append(micro)
        if self._accounts.is_looking:
            self._accounts.guarded(self._accounts.forward)
        with self._pause(), self._first_look():
            self._is_live = True
            try:
                micro.loss = self.backward(loss_fn(batch))
            except Exception as error:
                if is_numeric(error) or self._is_own_answer(error):
                    self._open()
                    self.controller.raised(self._step(), error)
                self._micros.remove(micro)
                raise
            finally:
                self._is_live = False
            if micro.reduced:
                at = self.controller.step_id()
                self._shared.compare((self.view.root,), at, self.session, batch)
        self._marked = self._marks.of_gradients((self.view.root,))
        return micro.loss

    def _is_own_answer(self, error: Exception) -> bool:
        """Return whether the script itself raises, because of a bad number. Of exceptions of one
        class, by which it may leave out batches all the time, the first is looked into.
        """
        from nanstop.localize.own_answer import answers_a_bad_number  # no use to a healthy run

        if is_library(raised_in(error)) or type(error) in self._other_errors:
            return False
        self._open()
        found = answers_a_bad_number(self._step(), error)
        if not found:
            self._other_errors.add(type(error))
        return found

    def backward(self, loss: Any) -> Tensor:
        """Divide, scale and backward a loss; return it detached, as it was."""
        if not isinstance(loss, Tensor):
            raise NanstopError(f"the loss function returned {type(loss).__name__}, not a tensor")
        accounts, scaler = self._accounts, self.view.scaler
        divided = loss / self._divisor if self._divisor > 1 else loss
        if self._is_live and accounts.is_looking:
            accounts.guarded(accounts.before_backward, [loss])
        if self._is_live and scaler is not None:
            accounts.scaled(scaler)
        try:
            (scaler.scale(divided) if scaler is not None else divided).backward()
        except BaseException:
            accounts.drop()
            raise
        if self._is_live and accounts.is_looking:
            accounts.guarded(accounts.after_backward, user_line())
        return total([loss])

    def update(
        self, clip: float | None = 1.0, scaler: Any = None, scheduler: Any = None
    ) -> Tensor | None:
        """Read the flag, clip, step the optimizer and the scheduler, zero the gradients.

        Return the gradient norm.

        None if the update was left out. One device synchronisation: before the update or, where
        that is fused and on a GPU, while the device is at it.
        Errors: ``TrainingStopped``.
        """
        if not self._micros:
            raise NanstopError("update() without step()", hint="call w.step(loss_fn, batch) first")
        self._look_for_writes()
        self._settle(scaler)
        self._clip = clip
        self._open()
        with self._pause():
            try:
                norm, applied = self._settled(clip)
            except TrainingStopped:
                self._drop_window()
                raise
        self._account(applied=applied)
        if applied and scheduler is not None:
            scheduler.step()
        self._drop_window()
        self.controller.completed(self._optimizer, applied=applied)
        return norm if applied else None

    def _look_for_writes(self) -> None:
        """Look whether the script itself has written to the gradients that a step has left."""
        present = self._marks.of_gradients((self.view.root,))
        self._is_rewritten |= present != self._marked

    def _account(self, *, applied: bool) -> None:
        accounts = self._accounts
        if not applied:
            accounts.drop()
        norm = self.controller.latest_norm
        found = accounts.updated(self._optimizer, self.controller.step_id, norm)
        if found is not None:
            self.session.accounted(found)

    def _drop_window(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._micros.clear()

    def close(self, exit_code: int = 0) -> None:
        """End the watch; the model and the optimizer were never changed by it."""
        self.controller.finish(exit_code)

    def __enter__(self) -> WatchedLoop:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close(0 if kind is None else 1)

    def _first_look(self) -> AbstractContextManager[None]:
        """In the first micro-batch, note the autocast that the loss function runs the model
        under.
        """
        is_known = self.controller.session is not None or self._autocast is not None
        return nullcontext() if is_known else self._autocast_noted()

    @contextmanager
    def _autocast_noted(self) -> Iterator[None]:
        handle = self.view.root.register_forward_pre_hook(lambda *_: self._note_autocast())
        try:
            yield
        finally:
            handle.remove()

    def _note_autocast(self) -> None:
        _, on, dtype = autocast_state(self.view.device_type)
        self._autocast = format_name(dtype) if on else None

    def _open(self) -> None:
        if self.controller.session is not None:
            return
        programs = [(m, program_of_function(m.loss_fn, m.batch)) for m in self._micros]
        split = self.accumulation is not None or pieces(programs)
        self.controller.open(
            self.view,
            autocast=self._autocast,
            clip=self._clip,
            num_micro=max(1, len(self._micros)),
            ranks_agree=self._shared.agree((self.view.root,)),
            accumulation=accumulation_of(self.view.root) if split else None,
        )

    def _step(self) -> LoopStep:
        is_rewritten, facts, replicas = self._is_rewritten, self.controller.facts, ONE_COPY
        if self._micros[-1].reduced:
            replicas = self._shared.of_window(self._micros, (self.view.root,), self._optimizer)
        elif facts.world_size > 1:
            replicas = unshared(self._optimizer)
        return LoopStep(
            id=self.controller.step_id(),
            view=self.view,
            facts=facts,
            micros=tuple(self._micros),
            buffers=self._buffers,
            start=self._start,
            apply=lambda _: self._update_again(),
            rates=self.controller.note_rates(self.view.optimizer),
            usual=self.controller.usual_rates,
            rewritten_at=lambda: () if is_rewritten else None,
            replicas=replicas,
        )

    def _settle(self, scaler: Any) -> None:
        """Correct gradients whose number of micro-batches, or whose scaler, was not known at
        their backward.
        """
        wanted = self.accumulation or len(self._micros)
        factor = self._divisor / wanted
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        if enabled is not self.view.scaler:
            before = self.view.scaler
            loss = self._micros[0].loss
            one = torch.ones((), device=loss.device if loss is not None else None)
            factor *= float(enabled.scale(one)) if enabled is not None else 1.0
            factor /= before.get_scale() if before is not None else 1.0
            self.view.scaler = enabled
        self._divisor = wanted
        if factor != 1.0:
            gradients = [p.grad for p in self._parameters() if p.grad is not None]
            # torch's own optimizers call it so; its stubs do not list it.
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]

    def _settled(self, clip: float | None) -> tuple[Tensor | None, bool]:
        """Return the norm of the gradients, None where their update is left out, and whether it was
        applied.
        """
        step, (norm, found) = self._step(), self._unscaled()
        gated = self.controller.gated(step, norm)
        if gated is not None:
            self._clip_by(clip, gated.norm)
            self._note_update()
            gated.begin()
            try:
                self._optimizer.step()
            finally:
                gated.end()
        scaler = self.view.scaler
        ending = self.controller.judge(step, norm, found, gated=gated)
        if ending.failed:
            self._accounts.drop()
        if not ending.apply:
            if scaler is not None:
                scaler.update()
            return None, False
        if gated is not None and not gated.is_bad:
            self.controller.ends.last_look(self._optimizer)
            return norm, True
        if ending.redone:
            ready_scaler(scaler)
            norm, _ = self._unscaled()
        return norm, self._apply(clip, norm, is_live=True)

    def _unscaled(self) -> tuple[Tensor, list[Tensor]]:
        scaler, optimizer = self.view.scaler, self._optimizer
        if scaler is None:
            return total_norm(self._parameters()), []
        scaler.unscale_(optimizer)
        states = scaler._per_optimizer_states[id(optimizer)]
        return total_norm(self._parameters()), list(states["found_inf_per_device"].values())

    def _parameters(self) -> list[Tensor]:
        return held_by(self._optimizer)

    def _apply(self, clip: float | None, norm: Tensor, *, is_live: bool = False) -> bool:
        """Clip and step; return whether the update was applied: a scaler may leave it out.
        ``is_live``: it is the run's own, and accounted for.
        """
        scaler, optimizer = self.view.scaler, self._optimizer
        self._clip_by(clip, norm)
        settled = self.controller.ends.last_look(optimizer)
        if settled is not None:
            return settled
        if is_live:
            self._note_update()
        if scaler is None:
            optimizer.step()
            return True
        states = scaler._per_optimizer_states[id(optimizer)]
        found = any(bool(flag) for flag in states["found_inf_per_device"].values())
        scaler.step(optimizer)
        scaler.update()
        return not found

    def _clip_by(self, clip: float | None, norm: Tensor) -> None:
        if clip:
            torch.nn.utils.clip_grads_with_norm_(self._parameters(), clip, norm)

    def _note_update(self) -> None:
        if self._accounts.is_looking:
            self._accounts.guarded(self._accounts.updating, self._optimizer)
        if self.controller.facts.world_size > 1:
            self._shared.updating((self.view.root,), self._optimizer, self._micros)

    def _update_again(self) -> None:
        norm, _ = self._unscaled()
        self._apply(self._clip, norm)


def watch_loop(
    model: nn.Module,
    optimizer: Optimizer,
    open_session: OpenSession,
    *,
    accumulation: int | None = None,
    pause: Pause = nullcontext,
) -> WatchedLoop:
    """Return a watch on a raw loop.

    ``w.step(loss_fn, batch)`` for each micro-batch, then ``w.update(...)``.

    ``pause``: makes a context in which no other watch of this process minds what is trained.
    """
    return WatchedLoop(model, optimizer, open_session, accumulation=accumulation, pause=pause)
