"""Follows a sample of each optimizer's gradients from their backward to the change of the weights.

Hosts say when something is about to happen to gradients, or has; at updates 0, 1, 2, 4, 8, ... of
an optimizer a small copy is taken then. What is lost, doubled or hidden between two copies is so
whatever the script called to do it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.diagnose.evidence.accounts import is_swallowed
from nanstop.measure.accounts.followed import Followed
from nanstop.measure.accounts.gradient_balance import balance, is_even
from nanstop.measure.accounts.own_update import OwnUpdate
from nanstop.measure.accounts.samples import Samples, on_host
from nanstop.measure.accounts.weight_writes import WeightWrites
from nanstop.measure.loss_graph import leaves
from nanstop.numerics.tensors import by_torch_alone
from nanstop.own_code import is_library
from nanstop.records import GradientAccount, SourceLine, StepId
from nanstop.replay.conditions import unrecorded
from nanstop.tracing.places import Line, calling_line, source_line
from nanstop.tracing.source.written import is_fixed_here

MOST_STAGES = 256
"""Changes of gradients in a window that are told apart: a loop has one for each parameter."""
_MOST_LINES = 3
FIRST_UPDATES = 2
MOST_OWN = 16
"""Updates of a script's own, without an optimizer, that are followed."""

_log = logging.getLogger("nanstop")


class GradientAccounts:
    """The accounts of one process. Nothing is copied at updates that are not looked at.

    Copies stay on their device; ``updated`` alone synchronises it, at updates that are.
    """

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[Optimizer | OwnUpdate, Followed] = WeakKeyDictionary()
        self._own: OwnUpdate | None = None
        self._may_be_own = True
        self._scaler: Any = None
        self._is_uneven = self._is_swallowed = False
        self._fixed: dict[Line, bool] = {}
        self.is_looking = False
        """Whether any window is looked at now."""
        self.are_written = False
        """Whether a script is known to write to gradients between their backward and what is made
        of them: it may do so in each window, whether the tensors tell it or not.
        """
        self.written_at: tuple[SourceLine, ...] = ()
        """The first lines that were seen to."""
        self.weight_writes = WeightWrites()

    def made(self, optimizer: Optimizer, line: Line = None) -> None:
        """Follow an optimizer, which ``line`` made, from its first update on."""
        if optimizer not in self._followed:
            self.leave_own()
            self._followed[optimizer] = Followed(optimizer, line)
            self.is_looking = True

    def leave(self, optimizer: Optimizer) -> None:
        """Do not follow an optimizer: what it updates is not what a backward reaches."""
        if self._followed.pop(optimizer, None) is not None:
            are_open = any(one.samples is not None for one in self._followed.values())
            self.is_looking = are_open or self._own is not None

    def made_at(self, optimizer: Optimizer | None) -> SourceLine | None:
        """Return the script's line that made an optimizer, None where that was not seen."""
        one = self._followed.get(optimizer) if optimizer is not None else None
        line = one.line if one is not None else None
        return None if line is None or is_library(line[0].co_filename) else source_line(line)

    def by_hand(self, losses: Sequence[Tensor], at: StepId) -> GradientAccount | None:
        """Return the account of an update that a script without an optimizer has made since its
        last backward, and follow what a backward of ``losses`` is about to give gradients to.

        Synchronises the device, for the first ``MOST_OWN`` such updates.
        """
        return self._safely(self._by_hand, losses, at) if self._may_be_own else None

    def _by_hand(self, losses: Sequence[Tensor], at: StepId) -> GradientAccount | None:
        reached, own, account = leaves(losses) or [], self._own, None
        if own is not None:
            one = self._followed[own]
            if own.is_made(one.weights()):
                at = replace(at, step=one.num_updates)
                own.close(one)
                account = self._updated(own, at)
                account = own.told(account) if account is not None else None
            are_others = not any(p is leaf for leaf in reached for p in one.parameters())
            if are_others or one.num_updates > MOST_OWN:
                self.leave_own()
        elif reached and len({isinstance(leaf, nn.Parameter) for leaf in reached}) == 1:
            self._own = OwnUpdate(reached)
            self._followed[self._own] = Followed(self._own, None, is_own=True)
            self.is_looking = True
        return account

    def leave_own(self) -> None:
        """Follow no update of the script's own any more."""
        self._may_be_own = False
        if self._own is not None:
            self._followed.pop(self._own, None)
            self._own = None

    @property
    def wants_lines(self) -> bool:
        """Whether the last account did not balance, or a script writes to gradients nobody knows
        where, so that the lines that write are worth their cost.
        """
        wanted = self._is_uneven or (self.are_written and not self.written_at)
        return self._own is not None or (wanted and self.is_looking)

    @property
    def wants_weight_lines(self) -> bool:
        """Whether those that write to weights are: beside optimizers, at first or if some do."""
        first = any(one.num_updates < FIRST_UPDATES for one in self._followed.values())
        return self.is_looking and not self.is_own and (first or self.weight_writes.wants_lines)

    def guarded(self, look: Callable[..., Any], *given: Any) -> Any:
        """Return what a look of these accounts gives, None where nothing is looked at."""
        return self._safely(look, *given) if self.is_looking else None

    def _safely(self, look: Callable[..., Any], *given: Any) -> Any:
        """What a look fails at ends the accounts, not the run; no function mode of a script
        hears of it.
        """
        try:
            with unrecorded(), by_torch_alone(), torch.no_grad():
                return look(*given)
        except Exception as error:  # nanstop is never the reason a run dies
            self._followed.clear()
            reason = f"{type(error).__name__}: {error}"
            _log.warning("nanstop: gradients are not followed any more (%s)", reason)
            return None

    def watched(self, *, only_weights: bool = False) -> list[Tensor]:
        """Return the parameters that are looked at now, all of an optimizer's where lines that
        write to weights are looked for; ``only_weights``: and not to gradients.
        """
        of_all = self.wants_weight_lines
        found: list[Tensor] = []
        for one in self._followed.values():
            if one.samples is not None and not only_weights:
                one.samples.was_read = bool(one.samples.was_read)
            if one.samples is not None or one.is_own:
                found += one.parameters() if of_all else one.chosen()
        return found

    def forward(self) -> None:
        """Look at the weights that the first forward after an update finds."""
        for one in self._followed.values():
            samples = one.samples
            if samples is not None and samples.awaits_forward:
                samples.met = one.weights()

    def scaled(self, scaler: Any) -> None:
        """Note that a loss was multiplied by the scale of ``scaler``, and so will its gradients
        be.
        """
        self._scaler = ref(scaler)

    def before_backward(self, losses: Sequence[Tensor], *, is_again: bool = False) -> None:
        """Look at the gradients that a backward of ``losses`` will add to; ``is_again``: they were
        made of the very batch of the backward before.
        """
        looking = [one for one in self._followed.values() if one.samples is not None]
        reached = leaves(losses) if looking else None
        held = {id(p) for one in self._followed.values() for p in one.parameters()}
        for one in looking:
            one.begin_backward(losses, reached, held, is_again=is_again)

    def after_backward(self, line: Line) -> None:
        """Look at what the backward has made of them; ``line`` called it."""
        for one in self._followed.values():
            one.end_backward(line)
        if self._own is not None:
            self._own.begin(self._followed[self._own].weights())

    def wrote(self, line: Line) -> None:
        """Note a line that changed gradients outside of any backward."""
        source, caller = source_line(line), source_line(calling_line())
        for one in self._followed.values():
            if one.samples is not None and source is not None and one.samples.backwards:
                one.samples.changed_at.append(source)
                one.samples.are_fixed.append(self._is_fixed(line))
                is_apart = source.function != getattr(
                    one.samples.backwards[-1].source, "function", source.function
                )
                if caller is not None and is_apart:
                    one.samples.called_at.append(caller)
                if source not in self.written_at and len(self.written_at) < _MOST_LINES:
                    self.written_at = (*self.written_at, source)

    def _is_fixed(self, line: Line) -> bool:
        """Return whether a line that runs now does the same in each step, where that is asked."""
        if not self._is_swallowed or line is None:
            return False
        if line not in self._fixed:
            self._fixed[line] = is_fixed_here()
        return self._fixed[line]

    def changed(self) -> None:
        """Look at gradients that a line, whoever's it is, has just changed."""
        for one in self._followed.values():
            samples = one.samples
            if samples is not None and samples.backwards and len(samples.stages) < MOST_STAGES:
                samples.stages.append(one.first_gradient())

    @property
    def wants_values(self) -> bool:
        """Whether next to nothing of the gradients came to the last update that was looked at, so
        that what lines make of them is worth being read.
        """
        return self._is_swallowed and self.is_looking

    def overflowed(self, line: Line) -> None:
        """Note a line that made a number which is not finite of gradients that are."""
        source = source_line(line)
        for one in self._followed.values():
            if one.samples is not None and source is not None and one.samples.backwards:
                one.samples.overflowed_at.append(source)

    def rewrote(self, weights: Sequence[Tensor], line: Line) -> None:
        """Note a line that wrote to weights outside of any update of an optimizer."""
        source = source_line(line)
        if source is not None and self._own is None:
            self.weight_writes.note(weights, source)
        for one in self._followed.values():
            samples = one.samples
            if samples is not None and source is not None and samples.awaits_forward:
                samples.rewritten_at.append(source)

    def moving(self, weight: Tensor, given: Sequence[Tensor], factor: float | None) -> None:
        """Note a write to a weight that is at hand: what it adds, times ``factor``, None where it
        adds nothing that is known.
        """
        if self._own is not None:
            self._own.moving(weight, given, factor)

    def moved_by(self, line: Line, *, is_elsewhere: bool = False) -> None:
        """Note a line that has made an update of a weight; ``is_elsewhere``: of a copy of it, or
        as a new tensor.
        """
        source = source_line(line)
        if self._own is not None and source is not None:
            (self._own.elsewhere_at if is_elsewhere else self._own.written_at).append(source)

    def kept(self, state: Tensor, parameter: int | None, line: Line) -> None:
        """Note a tensor that takes up the gradient of a parameter, by its id, in an update of the
        script's own.
        """
        if self._own is not None and parameter is not None:
            self._own.states.note(state, parameter, line)

    def divided_by_nothing(self, share: float, line: Line) -> None:
        """Note that an update of the script's own divides by squares of which a share is 0 in their
        format, and the line that made them so.
        """
        source = source_line(line)
        if self._own is not None and source is not None:
            self._own.lost_squares.append((share, source))

    @property
    def is_own(self) -> bool:
        """Whether an update of the script's own is followed."""
        return self._own is not None

    @property
    def is_first_own(self) -> bool:
        """Whether the present window is to end in the first update of the script's own."""
        return self._own is not None and not self._followed[self._own].num_updates

    def read(self) -> None:
        """Note that a line computed with gradients outside of any backward."""
        for one in self._followed.values():
            if one.samples is not None and one.samples.backwards:
                one.was_read = True

    def sinking(self) -> None:
        """Look at gradients that are about to be unscaled, clipped or applied, for the first
        time.
        """
        for one in self._followed.values():
            if one.samples is not None and one.samples.backwards and one.samples.at_sink is None:
                one.samples.at_sink = one.gradients()

    def unscaling(self, optimizer: Optimizer) -> None:
        """Look at gradients that a scaler is about to divide by its scale."""
        one = self._followed.get(optimizer)
        if one is not None and one.samples is not None and one.samples.backwards:
            one.samples.at_unscale = one.gradients()
            one.samples.norm_at_unscale = one.norm()

    def updating(self, optimizer: Optimizer, line: Line = None) -> None:
        """Look at the gradients that an update takes and the weights that it will change; ``line``
        asked for it.
        """
        one = self._followed.get(optimizer)
        if one is None or one.samples is None:
            return
        samples = one.samples
        samples.consumed, samples.weights = one.gradients(), one.weights()
        samples.num_replaced, samples.num_unheld = one.num_replaced(), one.num_unheld()
        samples.num_at_the_end = one.num_left_at_the_end()
        samples.num_with_gradient = sum(p.grad is not None for p in one.parameters())
        one.was_reached = one.was_reached or samples.num_with_gradient > 0
        samples.was_reached, samples.given_rate = one.was_reached, one.given_rate()
        samples.updated_at = source_line(line)
        if samples.is_scaled:
            samples.norm_consumed = one.norm()
        scaler = self._scaler() if self._scaler is not None else None
        divides_itself = getattr(optimizer, "grad_scale", None) is not None
        if scaler is not None and not divides_itself:
            samples.scale = scaler._scale

    def updated(
        self, optimizer: Optimizer, at: Callable[[], StepId], norm: float | None = None
    ) -> GradientAccount | None:
        """Return the account that an update ends; one that was not looked at is counted alone.

        ``norm``: of all gradients, as the host has read it; the next windows are looked at where it
        leaves nothing of them. Synchronises the device where it was. ``at`` is asked then.
        """
        one = self._followed.get(optimizer)
        if one is None:
            return None
        account = None
        one.was_reached = one.was_reached or any(p.grad is not None for p in one.parameters())
        if not self.is_looking and one.passes():
            self._scaler = None
        else:
            account = self._safely(self._updated, optimizer, at(), norm)
        if norm in (0.0, math.inf) and one.met(norm):
            one.look_on()
            self.is_looking = True
        return account

    def _updated(
        self, optimizer: Optimizer | OwnUpdate, at: StepId, norm: float | None = None
    ) -> GradientAccount | None:
        one = self._followed.get(optimizer)
        if one is None:
            return None
        if one.samples is not None and one.samples.consumed is None:
            one.samples = Samples()  # the update was left out: the next one is looked at instead
            return None
        samples, self._scaler = one.close(), None
        are_open = any(each.samples is not None for each in self._followed.values())
        self.is_looking = are_open or self._own is not None
        if samples is None or not samples.backwards:
            return None
        others = sum(bool(each.num_updates) for each in self._followed.values())
        name = f"{type(optimizer).__name__} {one.place(self._followed)}".removesuffix(" 1")
        samples.settle_hooks()
        samples = on_host(samples)
        self.are_written |= samples.are_written
        if samples.are_weights_written and not one.is_own and not self.weight_writes.are_any:
            self.weight_writes.are_any = self.is_looking = True
            one.look_on()
        made_at = source_line(one.line)
        account = balance(samples, at, name, norm=norm, is_only=others == 1, made_at=made_at)
        if account is not None and _is_open(account):
            one.look_on()
            self.is_looking = True
        self._is_swallowed = account is not None and is_swallowed(account)
        self._is_uneven = one.looks_on or (account is not None and not is_even(account))
        return account

    def drop(self) -> None:
        """Forget what is open: nanstop itself changes these gradients, or a backward has raised."""
        for one in self._followed.values():
            with by_torch_alone():
                one.detach()
            if one.samples is not None:
                one.samples = Samples()


def _is_open(account: GradientAccount) -> bool:
    """Return whether the next windows are to tell the line of what this one has shown, or to show
    it again.
    """
    if account.num_replaced:
        return True
    hidden, written = account.num_hidden, account.is_put_back or bool(account.rounded_to)
    return bool(hidden and not account.changed_at) or (written and not account.rewritten_at)
