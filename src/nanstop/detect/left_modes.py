"""Whether a model that began in training mode goes on in evaluation mode, in which a validation has
left it.

Told by what was called: the model was put in evaluation mode, was called without a graph then, and
the next updates are made in that mode. Who means to train so asks for it after the validation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from nanstop.detect.arrival.replaced_parts import homes
from nanstop.numerics.trained import held_by
from nanstop.records import ModeFacts, SourceLine
from nanstop.tracing.places import source_line

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanstop.replay.step import Step

LEAST_BEFORE, LEAST_SINCE = 4, 16
"""Updates in training mode before, or validations since, and updates in evaluation mode since, from
which it is told. A lone step that tries out whether the loop runs is no training; a validation that
comes again and again is what the mode was asked for, however early the first of them was.
"""


_EvalCalls = tuple[Any, bool, int]
"""See ``LoopStep.put_in_eval``."""
_NEVER: _EvalCalls = (None, False, 0)


@dataclass(slots=True)
class _Mode:
    """How often one model was trained in either mode: in training mode at all, and in evaluation
    mode since. ``acting``: its modules that act in the former alone.
    """

    num_train: int = 0
    num_eval: int = 0
    acting: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    """Those of them that have been out of it since, where a validation has left them so."""
    at: SourceLine | None = None
    before: int = 0
    """Validations that the first update in evaluation mode came after."""
    validations: int = 0
    trained_by: Any = field(default=lambda: None)

    @property
    def is_left(self) -> bool:
        is_meant_otherwise = max(self.num_train, self.validations) >= LEAST_BEFORE
        return bool(self.still) and self.num_eval >= LEAST_SINCE and is_meant_otherwise

    @property
    def facts(self) -> ModeFacts:
        return ModeFacts(
            num_train=self.num_train, num_eval=self.num_eval, modules=self.still, at=self.at
        )


class LeftModes:
    """Follows the models of one run."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[nn.Module, _Mode] = WeakKeyDictionary()
        self._all: list[_Mode] = []
        """Also those of models that are gone by the end."""
        self._is_told = False

    def note(self, step: Step, optimizer: Optimizer) -> ModeFacts | None:
        """Note an update of ``optimizer`` that is near; return, once, that most of the updates of a
        model were made in evaluation mode. Walks the modules at its updates 1, 2, 4, 8, ... and at
        the first after a change of its mode. No device work.
        """
        calls: Mapping[nn.Module, _EvalCalls] | None = getattr(step, "put_in_eval", None)
        if self._is_told or calls is None:  # a trainer sees to its modes itself
            return None
        for home in homes(step.view):
            mode = self._of.get(home)
            if mode is None:
                mode = self._of[home] = _Mode()
                self._all.append(mode)
            if home.training:
                mode.num_train, mode.num_eval, mode.still = mode.num_train + 1, 0, ()
                if not mode.num_train & (mode.num_train - 1):
                    mode.acting = tuple(n for n, m in home.named_modules() if _acts(m))
                    mode.trained_by = ref(optimizer)
                continue
            mode.num_eval += 1
            left = calls.get(home, _NEVER)
            if mode.num_eval == 1 and mode.num_train:
                _look(mode, home, optimizer, left)
            if not left[1]:  # asked for since, by nobody who validates
                mode.still = ()
            mode.validations = left[2] - mode.before
            if mode.is_left and mode.num_eval >= 2 * mode.num_train:
                self._is_told = True
                return mode.facts
        return None

    def finished(self) -> Iterator[ModeFacts]:
        """Yield, at the end of a run, what is known of a model that was never put back."""
        for mode in () if self._is_told else self._all:
            if mode.is_left:
                yield mode.facts


def _look(mode: _Mode, home: nn.Module, optimizer: Optimizer, left: _EvalCalls) -> None:
    """Note what a validation has left in evaluation mode, if it has."""
    line, was_called, num = left
    mode.before = num - was_called
    if not was_called or mode.trained_by() is not optimizer:
        return
    held = set(map(id, held_by(optimizer)))
    if any(id(p) in held for p in home.parameters()):
        now = dict(home.named_modules())
        mode.still = tuple(n for n in mode.acting if n in now and not now[n].training)
        mode.at = source_line(line)


def _acts(module: nn.Module) -> bool:
    """Return whether a module is in training mode, and does another thing in it."""
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0.0
    return isinstance(module, _BatchNorm) and module.training and module.running_mean is not None
