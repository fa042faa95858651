"""Gradients of an unchanged loop that no backward makes: the script asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from nanstop.detect.sentinel import norm_here
from nanstop.errors import TrainingStopped
from nanstop.hosts.loop.asked_gradients import Asked, Given, KeptAsks, lent
from nanstop.hosts.loop.functional import Functional
from nanstop.hosts.loop.micro import UnseenMicro
from nanstop.hosts.script.judge import Judge
from nanstop.hosts.script.state import LoopState
from nanstop.hosts.script.steps import NO_MODEL
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.hosts.tape.tensors import total
from nanstop.hosts.tape.unrepeated import drawing_again
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

_WRITTEN = "the script writes its gradients by operations that were not recorded"


class Asks:
    """Stands in for ``torch.autograd.grad``. ``tape_ops``: has a micro-batch record from here on;
    ``unseen``: notes losses whose making was not recorded.
    """

    def __init__(
        self,
        state: LoopState,
        judge: Judge,
        *,
        tape_ops: Callable[[TapedMicro], None],
        unseen: Callable[[list[Tensor]], None],
    ) -> None:
        self._state = state
        self._judge = judge
        self._tape_ops = tape_ops
        self._unseen = unseen
        self._kept = KeptAsks()

    def take(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Close the micro-batch that is open where the gradients that an update of ``parameters``
        is about to take are what the script has asked for, and no backward has made any.
        """
        micro, window = self._state.micro, self._state.window
        if window.closed and (window.is_written or not window.micros):
            self._take_written(parameters)
            return
        if micro is None or window.micros or window.closed or not micro.is_asked:
            return
        with self._judge.looking("gradients were not followed"):
            self._state.drop()
            if micro.closed_by([(p, p.grad) for p in parameters() if p.grad is not None]):
                self._state.keep(micro)

    def _take_written(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Open a window of gradients that no backward has made since the last update: the script
        has written them (those of ``torch.func``, say). What it made them of is run again
        where that was recorded.
        """
        state = self._state
        with self._judge.looking("gradients were not followed"):
            given = [(p, p.grad) for p in parameters() if p.grad is not None]
            if not given:
                return
            micro = state.micro.until_now() if state.micro is not None else state.recorded_since()
            state.drop()
            window = state.begin_window()
            window.is_written = True
            is_known = micro is not None and micro.closed_by(given, of_losses=False)
            state.keep(micro if is_known and micro is not None else UnseenMicro(_WRITTEN))

    def grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``torch.autograd.grad``: an operation of the loss, or what an update is made
        of by hand, which closes a micro-batch.
        """
        asked = Asked.of(args, kwargs) if self._state.idle else None
        if asked is None:
            return original(*args, **kwargs)
        self._judge.awaited.settle()
        if not asked.inputs:
            return original(**asked.arguments)
        if self._state.by_hand:
            return self._ask_by_hand(original, asked)
        micro = self._state.micro
        if micro is None:
            micro = self._state.begin_without_model(list(asked.outputs))
        elif not micro.tape.stop_for_call():
            micro = None
        if micro is None:
            return original(**asked.arguments)
        try:
            with self._state.pause():
                result = micro.tape.call(original, (), dict(asked.arguments))
            micro.asks(asked.outputs)
            return result
        except Exception as error:
            self._judge.refusals.raised(error)
            raise
        finally:
            if micro is self._state.micro:
                self._tape_ops(micro)

    def functional(self, made: Any, form: Functional | None, args: Any, kwargs: Any) -> Any:
        """Return what a function gives that ``torch.func`` has made of another: one call of the
        loss. Of a gradient (``form``) have it judged where no optimizer is: an update is made of it
        by hand.
        """
        state = self._state
        if not state.idle:
            return made(*args, **kwargs)
        if form is None or not state.by_hand:
            return self.one_call(made, args, kwargs)
        state.ignore_writes()
        state.drop()
        window, rng = state.begin_window(), state.rng.note()
        with state.pause():
            result = made(*args, **kwargs)
        try:
            micro, given = form.micro(args, kwargs, result, rng)
            window.is_asked = True
            state.keep(micro)
            with lent(given):
                self._judge.by_hand([leaf for leaf, _ in given])
        except TrainingStopped:
            raise
        except Exception as error:  # tensors of a kind not foreseen
            state.not_watching(f"{type(error).__name__}: {error}")
        return result

    def one_call(self, made: Any, args: Any, kwargs: Any, *, but: Sequence[Tensor] = ()) -> Any:
        """Have what a transform or a compiled function makes of its operands recorded as one
        operation: inside of it they are no tensors that mean anything outside. Not one that writes
        to tensors (``but``) that nobody would put back.
        """
        with self._state.untaped() as tape, self._state.pause():
            if tape is None:
                return made(*args, **kwargs)
            is_alike = drawing_again(self._state.rng.note(), but)
            return tape.call(made, args, kwargs, always=False, is_alike=is_alike)

    def _ask_by_hand(self, original: Any, asked: Asked) -> Any:
        self._state.ignore_writes()
        self._note_used()
        micro = self._asked_micro(asked)
        arguments = dict(asked.arguments)
        try:
            with self._state.inside_backward():
                if micro is None:
                    result = original(**arguments)
                else:
                    result = micro.tape.call(original, (), arguments)
        except Exception as error:
            self._judge.refusals.raised(error)
            raise
        with ExitStack() as scope:
            try:
                given = asked.given(result, micro.tape.cuts if micro is not None else None)
                scope.enter_context(lent(given))
            except Exception as error:  # tensors of a kind not foreseen
                self._state.not_watching(f"{type(error).__name__}: {error}")
                return result
            self._judge_asked(micro, asked, given)
        return result

    def _judge_asked(self, micro: TapedMicro | None, asked: Asked, given: Given) -> None:
        leaves, window = [leaf for leaf, _ in given], self._state.window
        window.is_asked = True
        if not asked.keeps:
            if micro is not None:
                self._close_by(micro, asked, given)
            self._judge.by_hand(leaves)
            return
        self._kept.note(leaves, () if micro is None else micro.tape.calls)
        if micro is None:
            self._state.roots.begin()
            self._state.expect_micro()
            return
        micro.asks(asked.outputs)
        norm = norm_here(leaves)
        if not window.failed and window.is_bad(norm, leaves):
            part = micro.until_now()
            self._close_by(part, asked, given)
            window.updated_by_hand()
            self._judge.judge(leaves, norm, can_redo=False)
            window.micros, window.judged, self._state.micro = [], set(), micro
        self._tape_ops(micro)

    def _note_used(self) -> None:
        """Note an update that was made of gradients whose graph was kept: what it was recorded with
        belongs to no loss to come.
        """
        if self._kept.are_used():
            self._judge.used_by_hand()
            if self._state.micro is not None:
                del self._state.micro.tape.calls[: self._kept.num_calls]

    def _asked_micro(self, asked: Asked) -> TapedMicro | None:
        """Return the micro-batch whose gradients are asked for; None where it was not seen."""
        losses = list(asked.outputs)
        micro = self._state.micro or self._state.begin_without_model(losses)
        if micro is None or self._state.window.closed:
            self._state.drop()
            if not asked.keeps:
                self._unseen(losses)
            return None
        self._state.budget.recorded(micro.tape)
        micro.tape.stop()
        return micro

    def _close_by(self, micro: TapedMicro, asked: Asked, given: Given) -> None:
        try:
            micro.asks(asked.outputs)
            if micro.tape.cuts is not None:
                micro.tape.cuts.ask(asked.inputs)
            is_whole = micro.closed_by(given)
            loss = total(asked.outputs)
            self._state.keep(micro if is_whole else UnseenMicro(NO_MODEL, loss))
            self._judge.refusals.came_back(micro)
        except TrainingStopped:
            raise
        except Exception as error:  # losses of several devices, say
            self._state.not_watching(f"{type(error).__name__}: {error}")
