"""What the controller is asked about the windows of an unchanged loop, and what its answers
change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.detect.numeric_errors import is_numeric
from nanstop.detect.sentinel import norm_here
from nanstop.errors import TrainingStopped
from nanstop.hosts.loop.controller import LoopController
from nanstop.hosts.loop.gated_update import GatedUpdate
from nanstop.hosts.loop.micro import UnseenMicro
from nanstop.hosts.loop.moved_weights import has_moved
from nanstop.hosts.script.refusals import LeftOut, Refusals
from nanstop.hosts.script.state import LoopState
from nanstop.hosts.script.steps import Steps, is_of_weights
from nanstop.hosts.script.updates.awaited import AwaitedUpdates
from nanstop.hosts.script.updates.closures import OpenUpdate, Returned
from nanstop.hosts.script.window import window_of
from nanstop.hosts.tape.tensors import total
from nanstop.hosts.window.ending import Ending
from nanstop.numerics.trained import held_by
from nanstop.numerics.weights import param_groups
from nanstop.records import GradientAccount, StepId
from nanstop.records.facts import INSIDE
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import Line, source_line

__tracebackhide__ = passes_through

_log = logging.getLogger("nanstop")
_IN_VAIN = 8
"""Updates that a whole run has asked for from which on backwards are missing."""


class Judge:
    """Settles the windows of one process, and reports what its script raises or leaves out."""

    def __init__(self, state: LoopState, steps: Steps, controller: LoopController) -> None:
        self._state = state
        self.steps = steps
        self.controller = controller
        self.refusals = Refusals(state, steps, controller, self.looking)
        self.left_out = LeftOut(state, steps, controller, self.looking)
        state.on_number = self.read_number
        state.on_left = steps.leave
        self.awaited = AwaitedUpdates(state, self)
        self._num_in_vain = 0  # updates that were asked for before any gradient was seen

    def judge(
        self,
        parameters: Sequence[Tensor],
        norm: Tensor | None,
        optimizer: Optimizer | None = None,
        found_inf: Sequence[Tensor] = (),
        *,
        can_redo: bool = True,
        anew: Callable[[], Tensor | None] | None = None,
        gated: GatedUpdate | None = None,
    ) -> Ending:
        """Have the open window settled for the gradients of ``parameters``; ``anew``: returns their
        norm once more. ``gated``: its update, which the device may have by now.

        Errors: ``TrainingStopped``.
        """
        window, ending = self._state.window, Ending()
        self._state.drop()
        first, seen = not window.judged, set(map(id, parameters))
        if not first and seen <= window.judged and not window.closed:
            return ending
        if window.failed and (window.closed or window.vetoed):  # already looked into
            return Ending(apply=not window.vetoed, failed=True)
        window.judged |= seen
        rest = not first and optimizer is not None and optimizer not in window.rates_of
        try:
            with self._state.pause(), torch.no_grad():
                if gated is None:
                    step = self.steps.step(window, optimizer, parameters)
                    can_redo &= not has_moved(step, norm)
                else:
                    step = gated.step
                may = can_redo and first and not window.closed
                ending = self.controller.judge(
                    step, norm, found_inf, can_redo=may, rest=rest, anew=anew, gated=gated
                )
        except TrainingStopped:
            window.failed = window.vetoed = window.closed = True
            raise
        except Exception as error:  # nanstop is never the reason a run dies
            self._state.not_watching(f"{type(error).__name__}: {error}")
        self._state.met_failure |= ending.failed
        window.failed |= ending.failed
        window.vetoed |= not ending.apply
        return ending

    def judge_again(
        self, parameters: Sequence[Tensor], norm: Tensor | None, optimizer: Optimizer
    ) -> None:
        """Judge gradients that were clipped and are not to be unscaled: what was left to the
        scaler there is the script's own. Errors: ``TrainingStopped``.
        """
        self._state.window.judged.difference_update(map(id, parameters))
        self.came_to_another_sink()
        self.judge(parameters, norm, optimizer, can_redo=False)

    def judge_refused_clip(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        """Judge gradients that a clip is about to raise for: no scaler gets to leave the update out
        then, so that what was left to one is the script's own. Synchronises the device. Errors:
        ``TrainingStopped``.
        """
        window = self._state.window
        if window.failed or window.scaler is None or norm is None or bool(norm.isfinite()):
            return
        window.judged.difference_update(map(id, parameters))
        with self.controller.without_scaler():
            self.judge(parameters, norm, can_redo=False)

    def judge_rewritten(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        """Judge gradients once more to which the script has written since they were found finite,
        if they are no longer. Synchronises the device. Errors: ``TrainingStopped``.
        """
        window = self._state.window
        if window.failed or not window.judged.issuperset(map(id, parameters)):
            return
        with self._state.pause(), torch.no_grad():
            norm = norm_here(parameters)
            is_bad = window.is_bad(norm, parameters)
        if is_bad:
            window.judged.difference_update(map(id, parameters))
            self.judge(parameters, norm, optimizer, can_redo=False)

    def came_to_another_sink(self) -> None:
        """Have the set-up looked at anew if gradients were clipped in the first window before they
        came to what has noted itself last in ``sinks``.
        """
        with self.looking("the set-up was not read"):
            self.steps.add_sinks(self._state.window)

    @property
    def may_leave_out(self) -> bool:
        """Whether an update that fails may be left out, as far as is known by now."""
        session = self.controller.session
        return session is None or session.may_leave_out

    def evaluation(self, update: OpenUpdate, norm: Tensor | None, result: Any) -> Any:
        """Judge what an update's closure has made, or keep it for the end of the update; return
        its ``result``, made again where the window is. Errors: ``TrainingStopped``.
        """
        window, optimizer = self._state.window, update.optimizer
        if update.waits:
            with self.looking("an evaluation was not looked at"):
                if window.is_bad(norm, held_by(optimizer)):
                    update.note_failure(window, norm)
        if update.failed is not None:
            return result
        window.is_past = update.moved and not update.copies
        may = (returned := Returned(window, result)).can_be_made and update.is_only
        try:
            ending = self.judge(held_by(optimizer), norm, optimizer, can_redo=may)
        except TrainingStopped:
            update.put_back()
            raise
        return returned.anew() if ending.redone else result

    def updated(self, update: OpenUpdate) -> None:
        """Judge the evaluation of an update's closure that has failed, with the weights that it
        had, unless the update has come to finite weights all the same; and put back what is to be
        left out. Errors: ``TrainingStopped``.
        """
        failed, optimizer = update.failed, update.optimizer
        if failed is None:
            return
        with self.looking("an update was not settled"):
            if update.has_recovered():
                return
            window = self._state.window = failed.window
            try:
                with failed.loaded():
                    self.judge(held_by(optimizer), failed.norm, optimizer, can_redo=False)
            finally:
                if window.vetoed:
                    update.put_back()

    def is_settled(self, optimizer: Optimizer) -> bool:
        """Return whether an update has been applied by now, or is to be left out."""
        self._name_what_sets_a_rate(optimizer)
        try:
            with self._state.pause(), torch.no_grad():
                settled = self.controller.ends.last_look(optimizer)
                if settled is None:
                    self.steps.updating(self._state.window, optimizer)
        except TrainingStopped:
            window = self._state.window
            window.failed = window.vetoed = window.closed = True
            raise
        self._state.window.vetoed |= settled is False
        return settled is not None

    def _name_what_sets_a_rate(self, optimizer: Optimizer) -> None:
        """Learn which line gives an optimizer a rate that is no finite number, where no schedule
        of torch's does.
        """
        rates = [group.get("lr") for group in optimizer.param_groups]
        if all(not isinstance(rate, float) or math.isfinite(rate) for rate in rates):
            return
        if self.controller.facts.schedule_at is None:
            from nanstop.detect.rates.given import line_that_sets_a_rate  # reads sources

            with self.looking("the line that sets the rate was not looked for"):
                self.learned(schedule_at=line_that_sets_a_rate())

    def ended(self, optimizer: Optimizer) -> None:
        """Note that the window has come to an update, applied or not."""
        if self.controller.session is None and self._state.window.micros:
            # No sink looked at this window: not one parameter of the optimizer has a gradient.
            self.judge((), None, optimizer, can_redo=False)
        window = self._state.window
        if window.micros and not window.is_written:  # else no backward says what the models are
            self._state.roots.end()
        if window.vetoed:
            self.steps.joint.left_out(optimizer)
        else:
            window.made_by += [optimizer]
            if window.closed:
                self.steps.joint.note(window.made_by)
        window.closed = True
        self._state.drop()
        self.controller.num_updates = self.steps.updates.get(optimizer, 0)
        accounts, norm = self._state.accounts, self.controller.latest_norm
        account = accounts.updated(optimizer, self.controller.step_id, norm)
        if account is not None and self.controller.session is None:
            # What its backwards gave was cleared: no sink has opened one.
            with self.looking("the update was not accounted for"):
                self.steps.step(self._state.window, optimizer, held_by(optimizer))
        if account is not None and self.controller.session is not None:
            self.controller.session.accounted(account)
        self.steps.updates[optimizer] = self.controller.num_updates + 1
        self.controller.completed(optimizer, applied=not self._state.window.vetoed)
        self._state.expect_micro()

    def exchanged(self) -> None:
        """Look at the copies of its models that several ranks keep alike, after a backward in
        which they have exchanged gradients.
        """
        with self.looking("copies were not compared"):
            self.steps.compare(self._state.window)

    def refused(self, optimizer: Optimizer, error: Exception) -> None:
        """Have the set-up looked at anew where a scaler does not take the gradients."""
        window = self._state.window
        if not self._state.idle or not window.micros or not is_numeric(error):
            return
        with self.looking("the set-up was not read"):
            step = self.steps.step(window, optimizer, held_by(optimizer))
            groups = param_groups(step.view.root.named_parameters())
            if self.controller.session is not None:
                self.controller.session.learned(param_groups=groups)

    @contextmanager
    def looking(self, unless: str) -> Iterator[None]:
        """Leave everything to torch inside.

        What nanstop itself fails at is a line of the log: ``unless``.
        """
        try:
            with self._state.pause():
                yield
        except TrainingStopped:
            raise
        except Exception as own:  # nanstop is never the reason a run dies
            _log.warning("nanstop: %s (%s: %s)", unless, type(own).__name__, own)

    def updated_inside(self, optimizers: list[Optimizer]) -> None:
        """Report a window whose update was made inside its backward.

        Nothing can be held back or run again.
        """
        window = self._state.window
        losses = [m.loss for m in window.micros if m.loss is not None]
        window.micros = [UnseenMicro(INSIDE, total(losses), seen=next(iter(window.micros), None))]
        window.no_veto = INSIDE
        self.judge(held_by(optimizers[0]), None, optimizers[0], can_redo=False)
        self.ended(optimizers[0])

    def read_number(self, number: float, slot: int | None) -> None:
        """Report an evaluation if the script has read a number that is not finite, and what its
        model returns is not finite either: the latest such call that it still is of; else what has
        made the number of it.
        """
        if not self._state.idle:
            return
        with self.looking("an evaluation was not investigated"), torch.no_grad():
            for micro, called in self._state.read_of(slot, number):
                step = self.steps.step(window_of(micro, called, self._state.buffers), None, ())
                if is_of_weights(step, micro) and self.controller.evaluated(step, number):
                    return

    def by_hand(self, parameters: Sequence[Tensor]) -> None:
        """Have a window settled whose gradients the script itself makes an update of: it ends with
        its backward.
        """
        window = self._state.window
        window.updated_by_hand()
        if not window.failed:
            self.judge(parameters, norm_here(parameters), can_redo=False)
        window.closed = True
        self._state.roots.end()
        self.controller.completed()
        self._state.expect_micro()

    def used_by_hand(self) -> None:
        """Note an update that the script has made itself of gradients that were not settled."""
        window = self._state.window
        window.updated_by_hand()
        window.failed = False
        if self.controller.session is None and window.roots:
            with self.looking("the set-up was not read"):
                self.steps.step(window, None, ())
        self.controller.completed()

    def learned(self, **facts: Any) -> None:
        """Have the set-up looked at once more, by those of some facts that are there."""
        known = {name: fact for name, fact in facts.items() if fact is not None}
        if known and self.controller.session is not None:
            with self.looking("the set-up was not looked at"):
                self.controller.session.learned(at=self.controller.step_id(), **known)

    def account_by_hand(self, losses: Sequence[Tensor]) -> None:
        """Account for the update that a script without an optimizer has made since its last
        backward.
        """
        account = self._state.accounts.by_hand(losses, self.controller.step_id())
        if account is not None and self.controller.session is not None:
            self.controller.session.accounted(account)

    def asked_first(self, line: Line) -> None:
        """Note the line that asks for an update while nothing was judged yet."""
        window = self._state.window
        window.updated_at = line
        self._num_in_vain += bool(window.roots) and not window.micros

    def never_made(self, optimizers: Sequence[Optimizer], at: StepId) -> Iterator[GradientAccount]:
        """Yield the account of the only optimizer of a script that is over, where no backward was
        made for the updates that it asked for. One that made backwards alone may have timed them.
        """
        num_asked, backwards = self._num_in_vain, self._state.num_backwards
        is_open = self.controller.session is not None
        if not is_open and len(optimizers) == 1 and num_asked >= _IN_VAIN and not backwards:
            (optimizer,) = optimizers
            updated_at = source_line(self._state.window.updated_at)
            yield GradientAccount(
                at=at,
                optimizer=type(optimizer).__name__,
                num_elements=0,
                num_asked=num_asked,
                lacks_backwards=True,
                made_at=self._state.accounts.made_at(optimizer),
                updated_at=(updated_at,) if updated_at is not None else (),
            )

    def never_updated(self, account: GradientAccount) -> None:
        """Account for updates that were asked for and never made, now that the script is over."""
        with self.looking("the updates were not accounted for"):
            if self.controller.session is None:
                self.steps.step(self._state.window, None, ())
            if self.controller.session is not None:
                self.controller.session.accounted(account)

    def died(self, error: BaseException) -> None:
        """Look at what the script ends with: an exception that says that a number was bad, else
        gradients that no sink has seen.

        It may have seen for itself.
        """
        if isinstance(error, Exception):
            self.refusals.died(error)
        with suppress(TrainingStopped):
            self.awaited.settle()
        window = self._state.window
        if not self._state.idle or not window.micros or window.closed or window.judged:
            return
        parameters = [p for root in window.roots.values() for p in root.parameters()]
        norm = norm_here(parameters)
        if norm is not None and not bool(norm.isfinite()):
            with suppress(TrainingStopped):  # it has ended by an exception of its own
                self.judge(parameters, norm, can_redo=False)
