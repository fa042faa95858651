"""Follows a sample of each optimizer's gradients from their backward to the change of the weights.

Hosts say when something is about to happen to gradients, or has; at updates 0, 1, 2, 4, 8, ... of
an optimizer a small copy is taken then. What is lost, doubled or hidden between two copies is so
whatever the script called to do it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.measure.gradient_balance import (
    LEAST_SCALE,
    Backward,
    Samples,
    balance,
    is_even,
    on_host,
)
from nanstop.measure.hook_stations import HookStations
from nanstop.measure.loss_graph import LossMark, leaves, loss_factor
from nanstop.numerics.tensors import by_torch_alone, is_measurable
from nanstop.records import GradientAccount, StepId
from nanstop.replay.conditions import unrecorded
from nanstop.tracing.places import source_line

MOST_TENSORS, MOST_ELEMENTS = 16, 256
MORE_WINDOWS = 8
"""Windows in a row that are looked at after one in which something was hidden: bad batches are
rare, and the line that hides them is told by one.
"""
MOST_STAGES = 256
"""Changes of gradients in a window that are told apart: a loop has one for each parameter."""
MOST_BACKWARDS = 64
"""Backwards of a window that are followed; one of more has no account."""

Line = tuple[CodeType, int] | None
_log = logging.getLogger("nanstop")


class GradientAccounts:
    """The accounts of one process. Nothing is copied at updates that are not looked at.

    Copies stay on their device; ``updated`` alone synchronises it, at updates that are.
    """

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[Optimizer, _Followed] = WeakKeyDictionary()
        self._scaler: Any = None
        self._is_uneven = False
        self.is_looking = False
        """Whether any window is looked at now."""

    def made(self, optimizer: Optimizer, line: Line = None) -> None:
        """Follow an optimizer, which ``line`` made, from its first update on."""
        self._followed.setdefault(optimizer, _Followed(optimizer, line))
        self.is_looking = True

    @property
    def wants_lines(self) -> bool:
        """Whether the last account did not balance, so that the lines that write are worth
        their cost.
        """
        return self._is_uneven and self.is_looking

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

    def watched(self) -> list[Tensor]:
        """Return the parameters whose gradients are looked at now: lines are looked for."""
        found: list[Tensor] = []
        for one in self._followed.values():
            if one.samples is not None:
                one.samples.was_read = bool(one.samples.was_read)
                found += one.chosen()
        return found

    def forward(self) -> None:
        """Look at the weights that the first forward after an update finds."""
        for one in self._followed.values():
            samples = one.samples
            if samples is not None and samples.awaits_forward:
                samples.met = one.weights()

    def scaled(self, scaler: Any) -> None:
        """Note that a loss was scaled: the gradients to come are."""
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

    def wrote(self, line: Line) -> None:
        """Note a line that changed gradients outside of any backward."""
        source = source_line(line)
        for one in self._followed.values():
            if one.samples is not None and source is not None and one.samples.backwards:
                one.samples.changed_at.append(source)

    def changed(self) -> None:
        """Look at gradients that a line, whoever's it is, has just changed."""
        for one in self._followed.values():
            samples = one.samples
            if samples is not None and samples.backwards and len(samples.stages) < MOST_STAGES:
                samples.stages.append(one.first_gradient())

    def rewrote(self, line: Line) -> None:
        """Note a line that wrote to weights between an update and the next forward."""
        source = source_line(line)
        for one in self._followed.values():
            samples = one.samples
            if samples is not None and source is not None and samples.awaits_forward:
                samples.rewritten_at.append(source)

    def read(self) -> None:
        """Note that a line computed with gradients outside of any backward."""
        for one in self._followed.values():
            if one.samples is not None and one.samples.backwards:
                one.was_read = True

    def unscaling(self, optimizer: Optimizer) -> None:
        """Look at gradients that a scaler is about to divide by its scale."""
        one = self._followed.get(optimizer)
        if one is not None and one.samples is not None and one.samples.backwards:
            one.samples.at_unscale = one.gradients()
            one.samples.norm_at_unscale = one.norm()

    def updating(self, optimizer: Optimizer) -> None:
        """Look at the gradients that an update takes and the weights that it will change."""
        one = self._followed.get(optimizer)
        if one is None or one.samples is None:
            return
        samples = one.samples
        samples.consumed, samples.weights = one.gradients(), one.weights()
        samples.num_replaced = one.num_replaced()
        if (samples.loss_factor or 1.0) >= LEAST_SCALE:
            samples.norm_consumed = one.norm()
        scaler = self._scaler() if self._scaler is not None else None
        divides_itself = getattr(optimizer, "grad_scale", None) is not None
        if scaler is not None and not divides_itself:
            samples.scale = scaler._scale

    def updated(self, optimizer: Optimizer, at: StepId) -> GradientAccount | None:
        """Return the account that an update ends; one that was not looked at is counted alone.

        Synchronises the device where it was.
        """
        return self._safely(self._updated, optimizer, at)

    def _updated(self, optimizer: Optimizer, at: StepId) -> GradientAccount | None:
        one = self._followed.get(optimizer)
        if one is None:
            return None
        if one.samples is not None and one.samples.consumed is None:
            one.samples = Samples()  # the update was left out: the next one is looked at instead
            return None
        samples, self._scaler = one.close(), None
        self.is_looking = any(each.samples is not None for each in self._followed.values())
        if samples is None or not samples.backwards:
            return None
        others = sum(bool(each.num_updates) for each in self._followed.values())
        name = f"{type(optimizer).__name__} {one.place(self._followed)}".removesuffix(" 1")
        samples.settle_hooks()
        account = balance(
            on_host(samples), at, name, is_only=others == 1, made_at=source_line(one.line)
        )
        if account is not None and _is_open(account):
            one.look_on()
            self.is_looking = True
        self._is_uneven = one.looks_on or (account is not None and not is_even(account))
        return account

    def drop(self) -> None:
        """Forget what is open: nanstop itself changes these gradients, or a backward has raised."""
        for one in self._followed.values():
            with by_torch_alone():
                one.detach()
            if one.samples is not None:
                one.samples = Samples()


class _Followed:
    """An optimizer's sample. ``samples``: of the present window, None where it is not looked at."""

    def __init__(self, optimizer: Optimizer, line: Line) -> None:
        self._optimizer = ref(optimizer)
        self.line = line
        self._unheld: list[Tensor] | None = None
        self._chosen: list[Tensor] | None = None
        self._last_loss = LossMark()
        self._begun: Backward | None = None
        self._hooks: HookStations | None = None
        self.num_updates = 0
        self._num_more = 0
        self.was_read = False
        """Whether what the last backward left was computed with."""
        self.samples: Samples | None = Samples()

    @property
    def looks_on(self) -> bool:
        """Whether the present window is looked at whatever its number."""
        return self._num_more > 0

    def look_on(self) -> None:
        """Look at the next windows, each."""
        self._num_more = MORE_WINDOWS
        if self.samples is None:
            self.samples = Samples()

    def chosen(self) -> list[Tensor]:
        """Return evenly spread parameters, matrices alone where there are any."""
        if self._chosen is None:
            fit = [p for p in self.parameters() if is_measurable(p)]  # frozen ones may wake later
            fit = [p for p in fit if p.device == fit[0].device]
            fit = [p for p in fit if p.dim() > 1] or fit
            self._chosen = fit[:: -(-len(fit) // MOST_TENSORS) or 1][:MOST_TENSORS]
        return self._chosen

    def gradients(self, known: Mapping[int, Tensor] | None = None) -> Tensor:
        """Return a copy of the sampled gradients, zeros where there is none or a sparse one;
        ``known``: samples, by the parameter's id, that count in the place of what is there.
        """
        return _joined([(known or {}).get(id(p), _sampled_gradient(p)) for p in self.chosen()])

    def parameters(self) -> list[Tensor]:
        optimizer = self._optimizer()
        groups = optimizer.param_groups if optimizer is not None else ()
        return [p for group in groups for p in group["params"]]

    def first_gradient(self) -> Tensor:
        """Return a copy of the sampled gradient of one parameter."""
        return _joined([_sampled_gradient(p) for p in self.chosen()[:1]])

    def weights(self) -> Tensor:
        return _joined([_spread(p) for p in self.chosen()])

    def norm(self) -> Tensor | None:
        found = [_dense(p.grad) for p in self.parameters()]
        present = [g for g in found if g is not None]
        return torch.nn.utils.get_total_norm(present) if present else None

    def place(self, among: Any) -> int:
        kind = type(self._optimizer())
        same = [one for one in among.values() if type(one._optimizer()) is kind]
        return next(place for place, one in enumerate(same, start=1) if one is self)

    def begin_backward(
        self,
        losses: Sequence[Tensor],
        reached: list[Tensor] | None,
        held: set[int],
        *,
        is_again: bool,
    ) -> None:
        samples = self.samples
        if samples is None or not self.chosen():
            return
        if len(samples.backwards) >= MOST_BACKWARDS:
            self.samples = None
            return
        samples.was_read = self.was_read or samples.was_read
        again = self._last_loss.move(losses) or is_again
        others = reached is None or any(not isinstance(leaf, nn.Parameter) for leaf in reached)
        self._unheld = [p for p in reached or () if id(p) not in held and not others]
        self.detach()
        before = self.gradients()
        self._begun = Backward(before, before, self.weights(), None, again, others)
        self._begun.loss_factor = loss_factor(losses)
        self._hooks = HookStations(self.chosen(), _spread)

    def end_backward(self, line: Line) -> None:
        hooks, computed = self._hooks, self.detach()
        if self.samples is None or self._begun is None:
            return
        begun, self._begun, self.was_read = self._begun, None, False
        ended = replace(begun, after=self.gradients(), source=source_line(line))
        if computed and hooks is not None:
            ended.computed, ended.hooks = self.gradients(computed), hooks
        self.samples.backwards.append(ended)

    def detach(self) -> dict[int, Tensor]:
        """Take the probes of a backward away, also of one that has raised."""
        hooks, self._hooks = self._hooks, None
        return hooks.detach() if hooks is not None else {}

    def num_replaced(self) -> int:
        """Return how many parameters got gradients of the last backward and are in no optimizer,
        where as many of the same shapes are held that never got one.
        """
        wanted = Counter(p.shape for p in self._unheld or ())
        idle = Counter(p.shape for p in self.parameters() if p.requires_grad and p.grad is None)
        return sum(wanted.values()) if wanted <= idle else 0

    def close(self) -> Samples | None:
        """Return what was copied since the last update, and begin anew."""
        closed, self.samples = self.samples, None
        self.num_updates += 1
        if closed is not None and closed.consumed is not None:
            closed.updated = self.weights()
        self._num_more -= self.looks_on
        if self.looks_on or not self.num_updates & (self.num_updates - 1):
            self.samples = Samples()
            if closed is not None and closed.updated is not None:
                self.samples.was, self.samples.became = closed.weights, closed.updated
                self.samples.left = self.gradients()
        return closed


def _is_open(account: GradientAccount) -> bool:
    """Return whether the next windows are to tell the line of what this one has shown."""
    hidden, put_back = account.num_hidden, account.is_put_back
    return bool(hidden and not account.changed_at) or (put_back and not account.rewritten_at)


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is not None and is_measurable(gradient) else None


def _sampled_gradient(parameter: Tensor) -> Tensor:
    gradient = _dense(parameter.grad)
    return _spread(parameter if gradient is None else gradient, zero=gradient is None)


def _spread(tensor: Tensor, *, zero: bool = False) -> Tensor:
    """Return evenly spread elements of a tensor, as a view where it is contiguous."""
    flat = tensor.detach()
    flat = (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)
    # An odd distance: an even one may meet the same column of every row.
    each = 1 if flat.numel() <= MOST_ELEMENTS else -(-flat.numel() // MOST_ELEMENTS) | 1
    return torch.zeros_like(flat[::each]) if zero else flat[::each]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if not parts:
        return torch.zeros(0)
    wide = torch.float64 if any(p.dtype == torch.float64 for p in parts) else torch.float32
    return torch.cat([part.to(wide) for part in parts])
