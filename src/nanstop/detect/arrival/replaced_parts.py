"""Parameters that an optimizer holds and a model has replaced by others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from nanstop.living import living
from nanstop.numerics.trained import held_by
from nanstop.records import GradientPath, RunFacts

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanstop.replay.step import ModelView, Step

from nanstop.detect.arrival.gradient_arrival import CONFIRMED, is_whole, start_of, updated_by


class ReplacedParts:
    """Follows which parameters a model has under each name, and tells when those that an optimizer
    holds were replaced by others, which are trained and in no optimizer.

    Looked at before updates 0, 1, 2, 4, 8, ... of an optimizer. What has taken the place is looked
    at in each of the next updates too: it gets gradients, and keeps the values that it has.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[int, dict[str, ref[Tensor]]]] = (
            WeakKeyDictionary()
        )
        """The update of the last look at each model, and its parameters then, by name."""
        self.suspects: list[_Suspect] = []
        self._of: ref[Optimizer] | None = None
        self._since = self._times = 0
        self._is_over = False

    def note(
        self, facts: RunFacts, step: Step, optimizer: Optimizer, number: int
    ) -> GradientPath | None:
        """Return what was replaced, once, before update ``number`` of an optimizer, from 0 on.
        Walks the names of all parameters at updates that are looked at; synchronises the device
        where something was replaced.
        """
        path = facts.gradient_path
        if path is None or self._is_over or not is_whole(facts):
            return None
        if self.suspects and self._of is not None and self._of() is optimizer:
            return self._confirmed(path, step.view)
        if number & (number - 1) == 0:
            self.suspects, self._times, self._of = [], 0, ref(optimizer)
            self._look(step.view, number)
            if self.suspects and not self._are_free():
                self.suspects = []
        return None

    def _confirmed(self, path: GradientPath, view: ModelView) -> GradientPath | None:
        there = homes(view)
        if not all(one.stays(there) for one in self.suspects) or not self._are_free():
            self.suspects = []
            return None
        self._times += 1
        if self._times < CONFIRMED:
            return None
        names = tuple(one.name for one in self.suspects)
        self.suspects, self._is_over = [], True
        return replace(path, replaced=names, replaced_after=self._since)

    def _look(self, view: ModelView, update: int) -> None:
        held = updated_by(view.optimizer)
        for home in homes(view):
            now = dict(home.named_parameters())
            mine = set(map(id, now.values()))
            since, was = self._known.get(home, (0, {}))
            for name, parameter in now.items():
                before = was[name]() if name in was else None
                if before is None or before is parameter or id(before) in mine:
                    continue
                if id(before) in held and id(parameter) not in held and _is_trained(parameter):
                    self.suspects.append(_Suspect(home, name, parameter))
                    self._since = since
            self._known[home] = update, {name: ref(parameter) for name, parameter in now.items()}

    def _are_free(self) -> bool:
        """Return whether what has taken a place is in no optimizer of this process. Walks all
        objects there are.
        """
        held = {id(p) for one in living(torch.optim.Optimizer) for p in held_by(one)}
        return not any(id(one.parameter()) in held for one in self.suspects)


class _Suspect:
    """A parameter of the module ``home`` that has taken the place of another."""

    def __init__(self, home: Any, name: str, parameter: Tensor) -> None:
        self._home, self.name, self.parameter = ref(home), name, ref(parameter)
        self._values = start_of(parameter).clone()

    def stays(self, there: Sequence[Any]) -> bool:
        """Return whether it is still there, trained, and as it was."""
        home, parameter = self._home(), self.parameter()
        if home is None or parameter is None or not any(home is one for one in there):
            return False
        is_there = dict(home.named_parameters()).get(self.name) is parameter
        is_same = is_there and _is_trained(parameter)
        return is_same and torch.equal(start_of(parameter), self._values)


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None


def homes(view: ModelView) -> list[Any]:
    """Return the models of a step: the root, or what a plain holder of several has."""
    root = view.root
    return [*root.children()] if type(root) is torch.nn.Module else [root]
