"""Whether gradients arrive at what the optimizer updates:
the model's weights, or copies that a script keeps of them.

Scripts that train in half precision by hand give their optimizer float32 copies, hand them the
gradients and write them back. That is told here by what tensors hold and are held, never by a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from nanstop.diagnose.findings.setup.ns114_no_gradient_path import is_mostly_unreached
from nanstop.living import living
from nanstop.numerics.optimizer_state import innermost
from nanstop.numerics.trained import held_by
from nanstop.records import GradientPath, RunFacts
from nanstop.tracing.module_ranges import WHOLE

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanstop.replay.step import ModelView, Step

MOST_TENSORS, MOST_COMPARED_ELEMENTS = 16, 4096
CONFIRMED = 3
"""Updates that show once more what was replaced, or what gets no gradient."""


class GradientArrival:
    """Follows the gradients of one run to what its optimizer holds."""

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.was: list[tuple[Tensor, Tensor]] | None = None
        """The starts of some weights at the first update."""
        self._compared: WeakSet[Optimizer] = WeakSet()
        self._turns: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._num_few = 0  # updates in a row in which most of what is trained had no gradient
        self._fed = False
        """Whether the script hands gradients to copies of its own, which it writes back."""
        self.untaken: GradientPath | None = None
        """What arrived, where the optimizer holds nothing of the model:
        to be told if the update uses nothing else.
        """

    def arrived(self, facts: RunFacts, step: Step) -> GradientPath | None:
        """Return how many trainable tensors have a gradient now, None where that was looked at.
        No device work.

        Where most have none, three times, a micro-batch is run again, undone: modules that it does
        not call do not count. An optimizer of other tensors alone may hold copies to which the
        script hands the gradients, after the clip at the latest: then ``unheld`` tells.
        """
        path = facts.gradient_path
        if path is None or path.num_reached is not None or self._fed or not is_whole(facts):
            return None
        held = updated_by(self.view.optimizer)
        trained = {n: p for n, p in self.view.root.named_parameters() if p.requires_grad}
        # A model that only answers (a teacher, a reference) is often left trainable.
        mine = {n: p for n, p in trained.items() if id(p) in held}
        others = bool(held) and not mine
        found = _reached(path, mine or trained)
        if (others or not found.num_reached) and self._takes_turns(trained):
            return None
        mine = mine or trained
        reached = found.num_reached
        if reached and is_mostly_unreached(found):
            self._num_few += 1
            if self._num_few < CONFIRMED:  # a model may leave out layers by chance
                return None
            found = _reached(path, _called(step, mine))
        self._fed = others and any(p.grad is not None for p in held.values())
        # Gradients that are nowhere may be summed up in tensors that torch's optimizers know
        # nothing of.
        self.untaken = found if others and reached and not self._fed else None
        return None if others else found

    def _takes_turns(self, trained: Mapping[str, Tensor]) -> bool:
        """Return whether another optimizer of this process holds some of the model's weights, or of
        what this one does: a loop may ask each for an update, whatever had gradients this time, and
        whether one never has any its accounts tell. Walks all objects there are, once for each.
        """
        mine = self.view.optimizer
        if mine is None:
            return False
        if mine not in self._turns:
            own = [*trained.values(), *held_by(mine)]
            alive = living(torch.optim.Optimizer)
            others = (one for one in alive if innermost(one) is not innermost(mine))
            held = {id(p) for one in others for p in held_by(one)}
            self._turns[mine] = any(id(p) in held for p in own)
        return self._turns[mine]

    def unheld(self) -> GradientPath | None:
        """Return, after an update, what had arrived where that update used nothing of it.
        No device work.
        """
        found, self.untaken = self.untaken, None
        if found is None:
            return None
        self._fed = any(p.grad is not None for p in updated_by(self.view.optimizer).values())
        return None if self._fed else found

    def replaced(self, view: ModelView) -> float:
        """Return by how much of their size the weights moved between the first two updates;
        0.0 where nothing asks.

        Asked before each update. An optimizer that holds nothing of the model has copies, which are
        written back: they may be copies of other weights. Synchronises the device once, of such a
        run.
        """
        was, self.was = self.was, None
        if view.optimizer is not None and view.optimizer not in self._compared:
            self._compared.add(view.optimizer)
            held = updated_by(view.optimizer)
            trained = [p for p in view.root.parameters() if p.requires_grad]
            tables = [p for p in trained if p.dim() > 1][:MOST_TENSORS]
            others = bool(held) and not any(id(p) in held for p in trained)
            self.was = [(p, start_of(p).clone()) for p in tables] if others else None
            return 0.0
        if not was:
            return 0.0
        moved = torch.stack([(start_of(p) - before).float().norm() for p, before in was])
        size = torch.stack([before.float().norm() for _, before in was])
        return float((moved / size.clamp(min=1e-12)).median())


def is_whole(facts: RunFacts) -> bool:
    """Return whether this process has the whole model, and its gradients until the update."""
    return facts.world_size == 1 and facts.veto == "yes"


def _reached(path: GradientPath, trained: Mapping[str, Tensor]) -> GradientPath:
    missing = tuple(name for name, p in trained.items() if p.grad is None)
    reached = len(trained) - len(missing)
    return replace(path, num_tensors=len(trained), num_reached=reached, unreached=missing[:8])


def _called(step: Step, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of some parameters whose module, or the one around it, is called by a
    micro-batch: run again, undone.

    All of them where it cannot be run again.
    Of a model of images and text the one half has nothing to do with text.
    """
    from nanstop.tracing.module_ranges import module_ranges

    try:
        called = module_ranges(step).keys()
    except Exception:  # what cannot be told apart is told
        return dict(trained)
    return {
        name: p
        for name, p in trained.items()
        if not called.isdisjoint(_around(name)) or p.grad is not None
    }


def _around(name: str) -> set[str]:
    """Return the names of the module that holds a parameter and of the one around that, but not
    the model's own.
    """
    owner = name.rpartition(".")[0]
    return {owner or WHOLE, owner.rpartition(".")[0]}


def updated_by(optimizer: Optimizer | None) -> dict[int, Tensor]:
    """Return what an optimizer updates, by identity."""
    return {id(p): p for p in held_by(optimizer)}


def start_of(weight: Tensor) -> Tensor:
    """Return the start of a weight, which is compared for all of it."""
    return weight.detach().reshape(-1)[:MOST_COMPARED_ELEMENTS]
