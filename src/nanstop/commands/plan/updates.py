"""A few updates under a plan against the same in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanstop.commands.plan.outcome import LOSS_TOLERANCE, MIN_COSINE, loss_gap
from nanstop.errors import NanstopError
from nanstop.numerics.tensors import in_float64
from nanstop.replay.conditions import Under, eager
from nanstop.replay.step import Step

MIN_SHARE = 0.9
MAX_UPDATE_TOLERANCE = 1e-2
"""However much updates amplify: a run that is further off than this is another run."""


@dataclass(frozen=True, slots=True)
class UpdateTrial:
    """What ``updates`` under a plan gave; see ``records.Agreement``.

    ``bound``: how far losses along them may be.
    """

    loss_gap: float
    share: float
    updates: int = 0
    error: str = ""
    bound: float = LOSS_TOLERANCE

    @property
    def why(self) -> str:
        """Return why the update fails, "" where it does not."""
        if self.error:
            return self.error
        if not self.loss_gap <= self.bound:
            return f"the loss along the updates is {self.loss_gap:.1e} away from float32"
        if not self.share >= MIN_SHARE:
            return f"{self.updates} updates go {self.share:.0%} of the way that they go in float32"
        return ""


@dataclass(frozen=True, slots=True)
class _Way:
    """Losses of the updates, and how far each trainable parameter went."""

    losses: tuple[float, ...]
    moved: Mapping[str, Tensor]


class UpdateTrials:
    """Makes updates from the same weights again and again.

    ``exact``: the context of float32;
    ``grads``: the gradients that the micro-batches in question, the keys, have in it.
    """

    def __init__(
        self, step: Step, updates: int, *, exact: Under, grads: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        self._step = step
        self._micros = tuple(grads)
        self._updates = updates
        self._exact_context = exact
        self._gradients = tuple(grads.values())
        try:
            self._exact = self._updated(exact)
        except (
            Exception
        ) as error:  # the optimizer's own, or the model's, on weights it has just moved
            said = f"{type(error).__name__}: {error}"
            raise NanstopError(f"an update in float32 fails: {said}") from error
        self._exact_descent = self._descent(self._exact.moved)
        self._permitted: float | None = None

    def along_updates(self, under: Under) -> UpdateTrial:
        """Return how a few updates in a context, not recorded, compare with float32.

        Everything is undone.
        """
        try:
            way = self._updated(under)
        except Exception as error:  # the model's own code under a plan: an outcome like any other
            return UpdateTrial(math.inf, 0.0, self._updates, f"{type(error).__name__}: {error}")
        gap = self._gap(way)
        mine, exact = self._descent(way.moved), self._exact_descent
        bound = LOSS_TOLERANCE if gap <= LOSS_TOLERANCE else self._bound()
        return UpdateTrial(gap, mine / exact if exact else 1.0, self._updates, bound=bound)

    def _bound(self) -> float:
        """Return how far the loss may be along the updates.

        As far as what the first step is allowed leads.

        Float32 makes the updates once more with gradients turned at random by the angle that
        ``MIN_COSINE`` permits. Updates carry that on, the further the larger the learning rate and
        the more of them there are (Adam most of all, whose steps are as long for small gradients as
        for large ones): at 1e-3 three of them alone pass 1e-3 on a tiny Gemma3, at 1e-5 eight stay
        at 5e-5. What a plan may not do in one step, it may not do in several either.
        """
        if self._permitted is None:
            gap = self._gap(self._updated(self._exact_context, turned=True))
            self._permitted = min(max(LOSS_TOLERANCE, gap), MAX_UPDATE_TOLERANCE)
        return self._permitted

    def _gap(self, way: _Way) -> float:
        pairs = zip(way.losses, self._exact.losses, strict=True)
        return max((loss_gap(mine, exact) for mine, exact in pairs), default=0.0)

    def _updated(self, under: Under, *, turned: bool = False) -> _Way:
        step, losses = self._step, list[float]()
        # Compiled code would be compiled anew for each plan.
        with step.isolated(with_update=True), under(), eager():
            held = {n: p for n, p in step.view.root.named_parameters() if p.requires_grad}
            start = {name: p.detach().float().clone() for name, p in held.items()}
            chance = torch.Generator().manual_seed(0)
            for place in range(self._updates):
                for parameter in step.view.root.parameters():
                    parameter.grad = None
                losses.append(float(step.run(self._micros[place % len(self._micros)])))
                for parameter in held.values() if turned else ():
                    _turn(parameter, chance)
                step.update()
            moved = {name: p.detach().float() - start[name] for name, p in held.items()}
        return _Way(tuple(losses), moved)

    def _descent(self, moved: Mapping[str, Tensor]) -> float:
        """Return how far parameters went along float32's gradients, which tell steps that matter
        from Adam's noise.
        """
        return sum(
            _product(moved[name], gradient)
            for exact in self._gradients
            for name, gradient in exact.items()
        )


def _product(first: Tensor, second: Tensor) -> float:
    wide = in_float64(first)
    return float((wide * in_float64(second).to(wide.device)).sum())


def _turn(parameter: nn.Parameter, chance: torch.Generator) -> None:
    """Turn a parameter's gradient by the angle whose cosine is ``MIN_COSINE``, in a random
    direction.
    """
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse:
        return
    share = math.sqrt(1.0 / MIN_COSINE**2 - 1.0)
    noise = torch.randn(gradient.shape, generator=chance).to(gradient)
    gradient.add_(noise * gradient.square().mean().sqrt() * share)
