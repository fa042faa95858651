"""What a script's exceptions, and what it leaves out, say of the numbers that it has computed."""

from __future__ import annotations

import cmath
import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from nanstop.decide.policy import GIVEN_UP, RAISED
from nanstop.detect.numeric_errors import is_numeric, phase_of
from nanstop.errors import TrainingStopped
from nanstop.frozen import frozen
from nanstop.hosts.loop.controller import LoopController
from nanstop.hosts.loop.micro import Micro
from nanstop.hosts.loop.step import LoopStep
from nanstop.hosts.script.state import LoopState
from nanstop.hosts.script.steps import Steps
from nanstop.hosts.script.window import ScriptWindow, models_in, window_of
from nanstop.hosts.tape.numbers import Question
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.numerics.tensors import by_torch_alone
from nanstop.numerics.trained import held_by
from nanstop.own_code import is_library
from nanstop.ranks import num_launched
from nanstop.records import Phase
from nanstop.tracebacks import passes_through, raised_in
from nanstop.tracing.places import Line, user_line

__tracebackhide__ = passes_through

Looking = Callable[[str], AbstractContextManager[None]]
_MOST_STEPS = 16
"""Of autograd, that a number may be made in that a script puts in the place of a loss."""
_MOST_TRIES = 8
"""Exceptions of one micro-batch that are kept, the last ones."""
_MOST_IN_VAIN = 8
"""Questions that turned out to be of ordinary numbers, after which no more is run again."""


@frozen
class Refusal:
    """An exception that an operation of the loss has raised because of a number, and the window up
    to it.

    A script may have an answer of its own: a matrix that cannot be factorised gets more on its
    diagonal and is tried again. Then the loss is made of what was there before, and nothing has
    failed.

    ``error``: a copy without the traceback, which would hold the variables of the step. ``line``:
    that of the script which it goes through.
    """

    error: Exception
    phase: Phase
    window: ScriptWindow
    until: TapedMicro
    met_in: TapedMicro
    line: Line

    @classmethod
    def of(cls, error: Exception, window: ScriptWindow, micro: TapedMicro) -> Refusal:
        """Return what ``micro``, the open one of a window, has raised now."""
        try:
            copied = copy.copy(error)
        except Exception:  # exceptions of another make take arguments of their own
            copied = RuntimeError(str(error))
        until = micro.until_now()
        window = replace(window, micros=[*window.micros, until])
        return cls(copied, phase_of(error), window, until, micro, user_line())

    @property
    def is_last(self) -> bool:
        """Whether nothing has been computed since."""
        return self.met_in.tape.calls[-1:] == self.until.tape.calls[-1:]

    def is_answered_by(self, micro: TapedMicro) -> bool:
        """Return whether the loss of a micro-batch is made of what the model had returned before
        the exception.
        """
        before = {id(call) for call in self.until.tape.calls if not call.outer}
        return any(id(call) in before for call in micro.tape.needed())


class Refusals:
    """Reports exceptions of a script that say that a number was bad. ``looking``: see ``Judge``."""

    def __init__(
        self, state: LoopState, steps: Steps, controller: LoopController, looking: Looking
    ) -> None:
        self._state = state
        self._steps = steps
        self._controller = controller
        self._looking = looking
        self._refusals: list[Refusal] = []
        """Of the open micro-batch: a script may try several times, and go on at last."""
        self._left_call = 0
        """The identity of the exception that has left a call of a model last."""
        state.on_error = self.in_loss

    def raised(self, error: Exception, *, if_seen: bool = False) -> bool:
        """Report an exception of the script that says that a number was bad; or ``if_seen`` any,
        but only if a bad one was computed in what has been recorded (of an assertion, in what led
        to the last of it), if the loss was read and is bad, if the last that was asked was asked of
        a NaN, or if a model raises it because of a number. Return whether it was reported.
        """
        micro = self._state.micro
        if not if_seen:
            self._left_call = id(error)
        if micro is None or not self._state.idle or not (if_seen or is_numeric(error)):
            return False
        has_read = if_seen and micro.given_up()
        self._state.drop()
        with self._looking("the exception was not investigated"):
            is_bad = has_read or _comes_to_bad(micro, error) if if_seen else True
            if not (is_bad or self._answers_bad(micro, error, is_last=if_seen)):
                return False
            self._state.met_failure = True
            self._state.keep(micro)
            step = self._steps.step(self._state.window, None, ())
            if has_read:  # the loss is bad; what the script makes of that is not run again
                self._controller.given_up(step, RAISED)
            else:
                self._controller.raised(step, error)
        self._state.window.closed = True
        return True

    def _answers_bad(self, micro: TapedMicro, error: Exception, *, is_last: bool) -> bool:
        """Return whether a model of the script raises, because of a bad number. What a library
        raises in it is asked only where the script ends with that (``is_last``).
        """
        from nanstop.localize.own_answer import answers_a_bad_number  # no use to a healthy run

        if self._left_call != id(error) or (is_library(raised_in(error)) and not is_last):
            return False
        window = replace(self._state.window, micros=[*self._state.window.micros, micro])
        return answers_a_bad_number(self._steps.step(window, None, ()), error)

    def in_loss(self, error: Exception) -> None:
        """Keep what an operation of the loss has raised until the script has come back from it."""
        micro = self._state.micro
        if micro is None or not self._state.idle or not is_numeric(error):
            return
        if any(one.met_in is not micro for one in self._refusals):
            self.report()
        met = Refusal.of(error, self._state.window, micro)
        self._refusals = [*self._refusals[1 - _MOST_TRIES :], met]

    def came_back(self, micro: TapedMicro) -> None:
        """Forget what operations raised where the script has an answer of its own, now that there
        was a backward; else report it.
        """
        if self._refusals:
            self._refusals = [one for one in self._refusals if not one.is_answered_by(micro)]
        self.report()

    def report(self, *, at_end: bool = False) -> None:
        """Report what an operation of the loss has raised last; ``at_end``: of the script, only if
        it has done nothing since.
        """
        refusals, self._refusals = self._refusals, []
        if not refusals or (at_end and not refusals[-1].is_last):
            return
        refusal = refusals[-1]
        self._state.met_failure = True
        with self._looking("the exception was not investigated"):
            step = self._steps.step(refusal.window, None, ())
            self._controller.raised(step, refusal.error, refusal.phase, refusal.line)

    def died(self, error: Exception) -> None:
        """Report what the script ends with: what an operation of the loss has raised, or Python
        code between a model call and its backward, or anything between two steps.
        """
        with suppress(TrainingStopped):  # it has ended by an exception of its own
            self.report()
            is_told = self.raised(error, if_seen=True)
            if not is_told and is_numeric(error) and self._state.idle:
                self._between_steps(error)

    def _between_steps(self, error: Exception) -> None:
        """Report an exception between two steps, of models that were called without gradients or,
        where no model is called at all, of the tensors that are trained.
        """
        called = self._state.evaluations.modules or [*self._state.window.roots.values()]
        bare = () if called else [p for one in self._steps.updates for p in held_by(one)]
        micro = self._state.refused_between_steps() if called or bare else None
        if micro is not None:
            phase: Phase = "forward" if bare else "generate"
            self._report_call(micro, called, error, bare=bare, phase=phase)
            return
        since = self._state.recorded_since()
        self._state.drop()
        for one, modules in self._state.read_of(None, math.nan):
            if self._report_call(one, modules, error, phase="generate", if_again=True):
                return
        with self._looking("the exception was not investigated"):
            if since is None or not since.comes_to_bad():
                return
        self._report_call(since, models_in(since), error, phase="generate")

    def _report_call(
        self,
        micro: Micro,
        called: Sequence[nn.Module],
        error: Exception,
        *,
        phase: Phase,
        bare: Sequence[Tensor] = (),
        if_again: bool = False,
    ) -> bool:
        """Report what was called between two steps; ``if_again``: only if it fails when it is made
        again. Return whether it was reported.
        """
        with self._looking("the exception was not investigated"):
            step = self._steps.step(window_of(micro, called, self._state.buffers), None, bare)
            if if_again and not self._controller.fails_again(step):
                return False
            self._controller.raised(step, error, phase)
        return True


class LeftOut:
    """Reports micro-batches that a script leaves out by itself because a number is not finite, at
    the next model call or where the script ends. ``looking``: see ``Judge``.
    """

    def __init__(
        self,
        state: LoopState,
        steps: Steps,
        controller: LoopController,
        looking: Looking,
    ) -> None:
        self._state = state
        self._steps = steps
        self._controller = controller
        self._looking = looking
        self._in_vain: list[tuple[Line, bool]] = []
        """Lines that have asked, and what they were told, of numbers that were finite."""

    def look(self, why: str = GIVEN_UP) -> None:
        """Report the micro-batch that is open if the script left it out because its loss is not
        finite, or because of what it was told of a value that is not.

        There is no update to hold back: ``why``.
        """
        micro = self._state.micro
        if micro is not None and micro.loss is None:
            self._look_at(micro, why)

    def look_at_replaced(self, losses: Sequence[Tensor]) -> None:
        """Report the open micro-batch as ``look`` does if it has been asked something, and
        ``losses``, of which a backward is about to begin, are made of no parameter: a script may
        put a number of its own in the place of a loss that is not finite.
        """
        micro = self._state.micro
        if micro is None or micro.loss is not None or not losses:
            return
        asked = micro.tape.questions
        if (asked.looked_at or asked.last) is not None and not is_of_parameters(losses):
            self._look_at(micro.until_now())

    def _look_at(self, micro: TapedMicro, why: str = GIVEN_UP) -> None:
        question = self._to_try(micro)
        is_read = micro.given_up()
        if not is_read and question is None:
            return
        unless = "the loss was not investigated"
        window = self._state.window
        window.micros.append(micro)
        try:
            with self._state.untaped(), self._looking(unless):
                step = self._steps.step(window, None, ())
                if self._is_of_bad(step, micro, None if is_read else question):
                    self._state.met_failure = True
                    if micro is self._state.micro:
                        self._state.drop()
                    self._controller.given_up(step, why)
        finally:
            window.micros.remove(micro)

    @property
    def _is_weary(self) -> bool:
        return len(self._in_vain) >= _MOST_IN_VAIN

    def _to_try(self, micro: TapedMicro) -> Question | None:
        """Return what the script has asked last if that may be why it has left a micro-batch out.
        Synchronises the device where it has compared a number.

        The model's set-up is not known before a window has ended, and is not read of one that may
        be no part of the training: only where a number tells. Nothing is run again that other
        ranks may have to take part in: they need not have come to the same answer.
        """
        asked = micro.tape.questions
        is_shared = micro.reduced or num_launched() > 1
        if asked.last is None or is_shared or self._is_weary:
            return None
        with by_torch_alone():  # a tape that is on would take it for a question of the script's
            tells = asked.compared is not None and not cmath.isfinite(asked.compared.item())
        is_new = (asked.last.line, asked.last.said) not in self._in_vain
        is_known = self._controller.session is not None
        return asked.last if tells or (is_new and is_known) else None

    def _is_of_bad(self, step: LoopStep, micro: TapedMicro, question: Question | None) -> bool:
        """Return whether a loss that was read was computed, or a ``question`` would be answered
        otherwise of finite values, which are the loss then.
        """
        from nanstop.localize.own_answer import asks_of_a_bad_number, is_computed

        told = (question.line, question.said) if question else (micro.tape.calls[-1].line, True)
        is_weary = self._is_weary
        self._in_vain.append(told)
        if question is None:
            # -Inf is what masks are made of: the largest of what is left where nothing is.
            is_low = micro.loss is not None and bool((micro.loss == -math.inf).all())
            is_bad = not is_low or (not is_weary and is_computed(step))
        else:
            micro.tape.losses = [question.slot]
            is_bad = asks_of_a_bad_number(step)
            if is_bad:
                with step.isolated():
                    is_bad = micro.asks_of_nan(question.slot)
        if is_bad:
            self._in_vain.remove(told)
        else:
            micro.loss, micro.tape.losses = None, []
        return is_bad


def is_of_parameters(losses: Iterable[Tensor]) -> bool:
    """Return whether what has made some losses reads a parameter, or is more than a few steps of
    autograd: the graph of a model. No device work.
    """
    waiting, seen = [one.grad_fn for one in losses], set[Any]()
    while waiting and len(seen) < _MOST_STEPS:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        waiting += [one for one, _ in node.next_functions]
    return bool(waiting)


def _comes_to_bad(micro: TapedMicro, error: Exception) -> bool:
    is_asserted = isinstance(error, AssertionError)
    if is_asserted or is_numeric(error):
        return micro.comes_to_bad(of_last=is_asserted)
    return micro.asks_of_nan()
