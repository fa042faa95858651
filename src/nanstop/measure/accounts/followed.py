"""What is copied of the gradients and weights of one optimizer, or of a script's own update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.living import living
from nanstop.measure.accounts.hook_stations import HookStations
from nanstop.measure.accounts.samples import (
    Backward,
    Samples,
    dense,
    joined,
    sample_of,
    sampled_gradient,
)
from nanstop.measure.loss_graph import LossMark, is_scaled_apart, left_at_the_end, loss_factor
from nanstop.numerics.tensors import is_measurable
from nanstop.numerics.trained import held_by
from nanstop.tracing.places import Line, source_line, variables

MOST_TENSORS = 16
MORE_WINDOWS = 8
"""Windows in a row that are looked at after one in which something was hidden: bad batches are
rare, and the line that hides them is told by one.
"""
_OFTEN = 16
MOST_BACKWARDS = 64
"""Backwards of a window that are followed; one of more has no account."""


class Followed:
    """An optimizer's sample. ``samples``: of the present window, None where it is not looked at.

    ``is_own``: what is followed is a script's own update, with ``param_groups`` as an optimizer's.
    """

    def __init__(self, optimizer: Any, line: Line, *, is_own: bool = False) -> None:
        self._optimizer = ref(optimizer)
        self.is_own = is_own
        self.line = line
        self._unheld: list[Tensor] | None = None
        self._chosen: list[Tensor] | None = None
        self._tail: list[tuple[ref[Tensor], Tensor]] | None = None
        """The last layer, where it is in no optimizer, with a sample of it as it was at first."""
        self._last_loss = LossMark()
        self._begun: Backward | None = None
        self._hooks: HookStations | None = None
        self.num_updates = 0
        self._num_more = 0
        self._num_extreme = 0
        self.was_reached = self.was_read = False
        """Whether any parameter had a gradient at an update; what a backward left was read."""
        self.samples: Samples | None = Samples()

    @property
    def looks_on(self) -> bool:
        """Whether the present window is looked at whatever its number."""
        return self._num_more > 0

    def look_on(self) -> None:
        """Look at each of the next ``MORE_WINDOWS`` windows."""
        self._num_more = MORE_WINDOWS
        if self.samples is None:
            self.samples = Samples()

    def met(self, norm: float) -> bool:
        """Return whether the norm of all gradients, as an update is to take them, asks for more
        looks: 0 or infinite, for the first time, the 2nd, the 4th, the 8th, ... The first updates
        with a norm of 0 are looked at often enough: a script may freeze its weights by zeros.
        """
        if norm != math.inf and (norm != 0.0 or self.num_updates <= _OFTEN):
            return False
        self._num_extreme += 1
        return not self._num_extreme & (self._num_extreme - 1)

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
        return joined([(known or {}).get(id(p), sampled_gradient(p)) for p in self.chosen()])

    def parameters(self) -> list[Tensor]:
        return held_by(self._optimizer())

    def first_gradient(self) -> Tensor:
        """Return a copy of the sampled gradient of one parameter."""
        return joined([sampled_gradient(p) for p in self.chosen()[:1]])

    def weights(self) -> Tensor:
        return joined([sample_of(p) for p in self.chosen()])

    def split(self, sample: Tensor) -> list[Tensor]:
        """Return the parts of a sample, one for each chosen parameter."""
        return list(sample.split([sample_of(p).numel() for p in self.chosen()]))

    def parts(self, samples: Samples) -> list[Tensor]:
        """Return the gradients that the last backward left, one for each chosen parameter."""
        return self.split(samples.backwards[-1].after)

    def norm(self) -> Tensor | None:
        found = [dense(p.grad) for p in self.parameters()]
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
        self._look_for_tail(losses, held)
        self.detach()
        before = self.gradients()
        self._begun = Backward(before, before, self.weights(), None, again, others)
        if (factor := loss_factor(losses)) is not None:
            self._begun.loss_factor, self._begun.most = factor.value, factor.most
            self._begun.is_mean = factor.is_of_torch
            self._begun.is_scaled_apart = factor.is_scale and is_scaled_apart(
                losses[0], variables(), factor.most
            )
        self._hooks = HookStations(self.chosen(), sample_of)

    def end_backward(self, line: Line) -> None:
        hooks, computed = self._hooks, self.detach()
        if self.samples is None or self._begun is None:
            return
        begun, self._begun, self.was_read = self._begun, None, False
        ended = replace(begun, after=self.gradients(), source=source_line(line))
        if computed and hooks is not None:
            ended.computed, ended.hooks = self.gradients(computed), hooks
        self.samples.backwards.append(ended)
        self.samples.at_sink = None  # that of another optimizer, which lay in between

    def detach(self) -> dict[int, Tensor]:
        """Take the probes of a backward away, also of one that has raised."""
        hooks, self._hooks = self._hooks, None
        return hooks.detach() if hooks is not None else {}

    def num_replaced(self) -> int:
        """Return how many parameters got gradients of the last backward and are in no optimizer,
        where as many of the same shapes are held that never got one: frozen ones count where
        nothing that is held got any, as of an adapter that another one has taken over from.
        """
        wanted = Counter(p.shape for p in self._unheld or ())
        held = self.parameters()
        all_idle = all(p.grad is None for p in held)
        idle = Counter(p.shape for p in held if (p.requires_grad or all_idle) and p.grad is None)
        return sum(wanted.values()) if wanted <= idle else 0

    def num_unheld(self) -> int:
        """Return how many parameters got gradients of the last backward and are in no optimizer."""
        return sum(p.grad is not None for p in self._unheld or ())

    def given_rate(self) -> float | None:
        """Return the learning rate of all groups of the optimizer, None where they have several or
        it lies on a device.
        """
        rates = {group.get("lr") for group in getattr(self._optimizer(), "param_groups", ())}
        rate = rates.pop() if len(rates) == 1 else None
        return float(rate) if isinstance(rate, int | float) else None

    def _look_for_tail(self, losses: Sequence[Tensor], held: set[int]) -> None:
        """Know the last layer, as the first window that is looked at finds it, where no optimizer
        of this process has it. Walks all objects there are, once, where it may be so.
        """
        if self._tail is not None or self.is_own:
            return
        left = left_at_the_end(losses, held) if self._unheld else []
        if left:
            others = {id(p) for one in living(Optimizer) for p in held_by(one)}
            left = [] if any(id(p) in others for p in left) else left
        self._tail = [(ref(p), sample_of(p).clone()) for p in left]

    def num_left_at_the_end(self) -> int:
        """Return how many tensors of the last layer have a gradient, are in no optimizer and hold
        what they did in the first window; 0 if one does not. Synchronises the device where there
        are any.
        """
        known = [(held(), was) for held, was in self._tail or ()]
        still = all(
            p is not None and p.grad is not None and torch.equal(sample_of(p), was)
            for p, was in known
        )
        return len(known) if still else 0

    def passes(self) -> bool:
        """Return whether neither this update nor the next is looked at, and count it if so: there
        is nothing to close then.
        """
        is_next = not (self.num_updates + 1) & self.num_updates
        if self.samples is not None or self._num_more or is_next:
            return False
        self.num_updates += 1
        return True

    def close(self) -> Samples | None:
        """Return the samples since the last update; begin new ones if the next is looked at."""
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
                if self.is_own:  # by now cleared, or written to
                    self.samples.left = closed.consumed
        return closed
