"""Whether gradients arrive at what the optimizer updates:
the model's weights, or copies that a script keeps of them.

Scripts that train in half precision by hand give their optimizer float32 copies, hand them the
gradients and write them back. That is told here by what tensors hold and are held, never by a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from nanstop.detect.zero_gradients.flat_steps import FlatSteps, passed_by
from nanstop.diagnose.findings.setup.ns114_no_gradient_path import is_mostly_unreached
from nanstop.living import living
from nanstop.numerics.optimizer_state import innermost
from nanstop.numerics.tensors import version
from nanstop.numerics.trained import held_by
from nanstop.records import GradientPath, RunFacts
from nanstop.tracing.module_ranges import WHOLE
from nanstop.tracing.places import line_text

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanstop.replay.step import ModelView, Step

MOST_TENSORS, MOST_COMPARED_ELEMENTS = 16, 4096
UPDATES = 8
"""Updates without a gradient after which a parameter is asked about: some take turns."""
MOST_UPDATES = 33
"""Updates of an optimizer that are looked at."""
CONFIRMED = 3
"""Updates that show once more what was replaced, or what gets no gradient."""
_SAME = 1e-6


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
        held = _held(self.view)
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
        self._fed = any(p.grad is not None for p in _held(self.view).values())
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
            held = _held(view)
            trained = [p for p in view.root.parameters() if p.requires_grad]
            tables = [p for p in trained if p.dim() > 1][:MOST_TENSORS]
            others = bool(held) and not any(id(p) in held for p in trained)
            self.was = [(p, _start(p).clone()) for p in tables] if others else None
            return 0.0
        if not was:
            return 0.0
        moved = torch.stack([(_start(p) - before).float().norm() for p, before in was])
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


def _held(view: ModelView) -> dict[int, Tensor]:
    """Return what the optimizer updates."""
    return {id(p): p for p in held_by(view.optimizer)}


def _start(weight: Tensor) -> Tensor:
    return weight.detach().reshape(-1)[:MOST_COMPARED_ELEMENTS]


class NeverReached:
    """Follows what an optimizer holds and no update so far has had a gradient of.

    That is usual where nothing hangs on it: a pooler, experts that are not asked. It is told where
    the loss is another one with other values of it, in a micro-batch that is run again, undone, or
    where its module is run without a graph, update after update. What changes all the same is
    somebody else's: an average of other weights.
    """

    def __init__(self) -> None:
        self._waiting: WeakKeyDictionary[Any, list[tuple[Tensor, int]]] = WeakKeyDictionary()
        self._held: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.due: list[Tensor] = []
        """What the present window should be run again for."""
        self.flat: list[Tensor] = []
        """What has had gradients of zeros alone, which it should be run again for, too."""
        self._flat_steps = FlatSteps()
        self._told = False

    @property
    def is_due(self) -> bool:
        """Whether the present window should be run again."""
        return bool(self.due or self.flat)

    def note(self, step: Step, number: int) -> None:
        """Note that update ``number``, from 0 on, of the step's optimizer, or of a script that has
        none, is near: not for those after ``MOST_UPDATES``. No device work but that of
        ``FlatSteps``; after the first none for what has had a gradient.
        """
        self.due, self.flat = [], []
        if self._told:
            return
        optimizer: Any = step.view.optimizer or step.view.root
        if step.view.optimizer is not None and not step.calls_script:
            self.flat = self._flat_steps.note(optimizer, number)
        known = self._waiting.get(optimizer)
        if known is None:
            held = held_by(step.view.optimizer) or [*step.view.root.parameters()]
            known = [(p, version(p)) for p in held]
            self._held[optimizer] = len(held)
        if not known:
            return
        waiting = [
            (p, was) for p, was in known if p.requires_grad and p.grad is None and version(p) == was
        ]
        self._waiting[optimizer] = waiting if number < MOST_UPDATES else []
        is_time = number >= UPDATES and number & (number - 1) == 0
        if is_time and 0 < len(waiting) < self._held[optimizer] and not step.calls_script:
            self.due = [p for p, _ in waiting]

    def take(self, step: Step, path: GradientPath) -> GradientPath | None:
        """Return with ``path`` what is cut off, None where nothing is.

        Undone bitwise; raises what the step raises. Synchronises the device.
        """
        cut, line, lost = self._cut_off(step)
        if cut:
            return replace(path, cut=cut, cut_at=line, lost_at=lost)
        flat, self.flat = self.flat, []
        found = passed_by(step, flat, partial(_matters, step)) if flat else None
        if found is None:
            return None
        self._told = True
        names = {id(p): name for name, p in step.view.root.named_parameters()}
        behind = tuple(names.get(id(p), "?") for p in found.parameters)
        return replace(path, behind=behind, flat_at=found.line, is_own=found.is_own)

    def _cut_off(self, step: Step) -> tuple[tuple[str, ...], str, str]:
        """Return the names of what is cut off, the line that runs it without a graph, and the one
        at which the loss leaves its graph; "" where that is not known.
        """
        names = {id(p): name for name, p in step.view.root.named_parameters()}
        if step.view.optimizer is None:  # of bare tensors: the places of a holder are no names
            names = {id(p): str(list(p.shape)) for p in step.view.root.parameters()}
        due, line = self.due, ""
        found: list[Tensor] = []
        without: Any = getattr(step, "without_graph", {})
        often = {module: at for module, (num, at) in without.items() if num >= UPDATES}
        for module in often:
            own = list(module.parameters())
            if own and all(_is_among(p, due) for p in own):
                found += [p for p in own if not _is_among(p, found)]
                names = {id(p): name for name, p in module.named_parameters()} | names
        mine = [p for p in due if id(p) in names and not _is_among(p, found)]
        found += [p for p in mine if _matters(step, [p])] if _matters(step, mine) else []
        for module, at in often.items():
            own = [_is_among(p, found) for p in module.parameters()]
            if 2 * sum(own) > len(own):  # others of it, tied to a head, may have a gradient
                line = line_text(at)
        cuts: Any = getattr(step, "cuts", list)() if found and not line else []
        lost = line_text(cuts[0]) if len(cuts) == 1 else ""
        self._told |= bool(found)
        return tuple(names.get(id(p), "?") for p in found), line, lost


def _is_among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is one for one in others)


def _matters(step: Step, parameters: Sequence[Tensor]) -> bool:
    """Return whether other values of some parameters change the loss of a micro-batch."""
    from nanstop.detect.other_weights import moved

    if not parameters:
        return False
    with step.isolated():
        plain = float(step.run(0).detach())
    with step.isolated(), moved(parameters):
        other = float(step.run(0).detach())
    return abs(other - plain) > _SAME * abs(plain)


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
        held = _held(view)
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
        self._values = _start(parameter).clone()

    def stays(self, there: Sequence[Any]) -> bool:
        """Return whether it is still there, trained, and as it was."""
        home, parameter = self._home(), self.parameter()
        if home is None or parameter is None or not any(home is one for one in there):
            return False
        is_there = dict(home.named_parameters()).get(self.name) is parameter
        is_same = is_there and _is_trained(parameter)
        return is_same and torch.equal(_start(parameter), self._values)


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None


def homes(view: ModelView) -> list[Any]:
    """Return the models of a step: the root, or what a plain holder of several has."""
    root = view.root
    return [*root.children()] if type(root) is torch.nn.Module else [root]
