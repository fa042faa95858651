"""What an optimizer holds and no update has a gradient of, though the loss hangs on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

from nanstop.detect.other_weights import moved
from nanstop.detect.zero_gradients.flat_steps import FlatSteps, passed_by
from nanstop.detect.zero_gradients.stuck import stuck
from nanstop.numerics.tensors import version
from nanstop.numerics.trained import held_by
from nanstop.records import GradientPath
from nanstop.tracing.places import line_text

if TYPE_CHECKING:
    from nanstop.replay.step import Step

UPDATES = 8
"""Updates without a gradient after which a parameter is asked about: some take turns."""
MOST_UPDATES = 33
"""Updates of an optimizer that are looked at."""
_SAME = 1e-6


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
        zeros = stuck(step, flat) if flat and found is None else ()
        self._told = bool(found or zeros)
        if found is None:
            return replace(path, stuck=zeros) if zeros else None
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
    if not parameters:
        return False
    with step.isolated():
        plain = float(step.run(0).detach())
    with step.isolated(), moved(parameters):
        other = float(step.run(0).detach())
    return abs(other - plain) > _SAME * abs(plain)
