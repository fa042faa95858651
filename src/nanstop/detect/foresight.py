"""Which updates of half-precision weights are rehearsed before they are applied:
the first ones, then two at a time.

An update that float32 would not make does its damage at once and says nothing of it: weights that
move a thousand times too far stay finite. So the first ``FIRST`` updates that a run makes are
rehearsed on a sample of 16 x 1024 weights, and of the later ones those numbered 2^k and the next,
because a state that vanishes shows in the second of two. A run without half-precision trainables
pays for a look at its optimizer's formats at those steps; any other a rehearsal for each of them:
39 to 44 ms where forward and backward take 0.9 to 1.6 s (6 layers of 384).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from nanstop.measure.rehearsal import CannotRehearseError, Moved, Rehearsal
from nanstop.numerics.tensors import HALF
from nanstop.numerics.trained import held_by
from nanstop.records import StateFault, StateRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from nanstop.replay.step import Step

FIRST = 10


@dataclass(slots=True)
class _Followed:
    num_updates: int = 0
    rehearsal: Rehearsal | None = None


class Foresight:
    """The rehearsals of one run, an optimizer each."""

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[Optimizer, _Followed] = WeakKeyDictionary()
        self._present: Rehearsal | None = None
        self._suspected: frozenset[str] = frozenset()
        self.over = False
        self.obstacle = ""
        """Why updates are followed no further."""
        self.lost_moments: tuple[StateRow, ...] = ()
        """Second moments that the update which was last said to be ruinous has lost."""

    def suspect(self, faults: Sequence[StateFault]) -> None:
        """Expect ruin of updates that go on from state which no update can have made."""
        ruin = (fault for fault in faults if fault.kind in ("nonfinite", "negative"))
        self._suspected = frozenset(fault.name.rpartition(":")[0] for fault in ruin)

    def ruinous(self, step: Step) -> tuple[Moved, ...]:
        """Return the sampled parameters that an update is about to ruin;
        () where it is not looked at.

        Asked once an update; gradients must be those that it will use. Synchronises the device once
        where it looks. What cannot be run on copies is followed no further. A learning rate of NaN
        is no matter of formats: all that have a gradient are about to be ruined. Nor is state that
        is ``suspect``: the parameters that it is of.
        """
        self._present, optimizer = None, step.view.optimizer
        if optimizer is None or (self.over and not self._suspected):
            return ()
        lost = self._suspect_in(step) if self._suspected else ()
        if self.over or lost:
            return lost
        lost = _at_no_rate(optimizer)
        if lost:
            names = {id(one): name for name, one in step.view.root.named_parameters()}
            return tuple(Moved(names.get(id(one), ""), math.nan, math.nan) for one in lost)
        followed = self._followed.setdefault(optimizer, _Followed())
        number, followed.num_updates = followed.num_updates, followed.num_updates + 1
        if not _is_time(number):
            followed.rehearsal = None
            return ()
        if not any(p.dtype in HALF for p in held_by(optimizer)):
            return ()
        try:
            if followed.rehearsal is None:
                followed.rehearsal = Rehearsal(optimizer, step.view.root)
            self._present = followed.rehearsal
            ruined = tuple(filter(_by_its_format, followed.rehearsal.rehearse()))
            self.lost_moments = followed.rehearsal.lost_moments() if ruined else ()
            return ruined
        except CannotRehearseError as error:
            self.over, self.obstacle = True, str(error)
        except Exception as error:  # the optimizer's own code, on tensors that it did not expect
            self.over, self.obstacle = True, f"{type(error).__name__}: {error}"
        return ()

    def looks(self, optimizer: Optimizer | None) -> bool:
        """Return whether the next update of an optimizer may be looked at. No device work."""
        if optimizer is None or self.over:
            return optimizer is not None and bool(self._suspected)
        followed = self._followed.get(optimizer)
        number = followed.num_updates if followed is not None else 0
        return bool(self._suspected) or _is_time(number) or bool(_at_no_rate(optimizer))

    def settled(self) -> None:
        """Ask no more of what was asked last: it is cured, or ruins nothing."""
        if self._suspected:
            self._suspected = frozenset()
        else:
            self.over = True

    def left_out(self) -> None:
        """Forget the last rehearsal: its update was left out."""
        if self._present is not None:
            self._present.take_back()

    def _suspect_in(self, step: Step) -> tuple[Moved, ...]:
        held = {id(p) for p in held_by(step.view.optimizer) if p.grad is not None}
        named = step.view.root.named_parameters()
        found = (name for name, p in named if name in self._suspected and id(p) in held)
        return tuple(Moved(name, math.nan, math.nan) for name in found)


def _at_no_rate(optimizer: Optimizer) -> list[Tensor]:
    """Return what an update would multiply by a rate that is no finite number, which a schedule may
    come to. One that a tensor holds is not read.
    """
    groups = optimizer.param_groups
    lost = (g for g in groups if isinstance(g.get("lr"), float) and not math.isfinite(g["lr"]))
    return [one for group in lost for one in group["params"] if one.grad is not None]


def _is_time(number: int) -> bool:
    return number < FIRST or number & (number - 1) == 0 or (number - 1) & (number - 2) == 0


def _by_its_format(moved: Moved) -> bool:
    """Return whether an update is ruinous as float32 would not make it:
    what runs away in both diverges by itself.
    """
    return moved.is_ruinous and math.isfinite(moved.in_float32)
