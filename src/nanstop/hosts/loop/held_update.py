"""An update that is left out: what is kept from the optimizer that a script asks for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CellType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


class HeldUpdate:
    """Gradients that an optimizer's step is not to see, or the step itself.

    Torch's own optimizers leave out what has no gradient. One that a script has written may read
    it unasked, or count its steps: it is not called at all.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._held: list[tuple[Tensor, Tensor | None]] = []
        self._step: tuple[CellType, Any] | None = None

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Take them away.

        Those of None are the only ones that every optimizer of torch's leaves out, moments and step
        counts too.
        """
        self._held += [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in self._held:
            parameter.grad = None

    def hold_step(self) -> None:
        """Have torch's wrapper of the step, which has called the hooks before it, call nothing and
        go on to those after it: a hook itself cannot end a step.
        """
        cell = _called_by(type(self._optimizer).step)
        if cell is None or self._step is not None:
            return
        self._step = cell, cell.cell_contents
        cell.cell_contents = self._left_out

    @property
    def is_any(self) -> bool:
        """Whether anything is kept from it."""
        return bool(self._held) or self.holds_step

    @property
    def holds_step(self) -> bool:
        """Whether torch's wrapper of the step calls nothing."""
        return self._step is not None

    def give_back(self) -> None:
        """Put gradients where the script left them, and the step."""
        self.give_back_step()
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held.clear()

    def forget(self) -> None:
        """Let go of gradients that nobody is to see any more."""
        self._held.clear()

    def give_back_step(self) -> None:
        if self._step is not None:
            cell, step = self._step
            cell.cell_contents = step
            self._step = None

    def _left_out(self, *_args: Any, **_kwargs: Any) -> None:
        self.give_back_step()


def is_called_by_its_own(optimizer: Optimizer) -> bool:
    """Return whether torch's wrapper of an optimizer's step, which is on the stack and about to
    make one, is called by such a wrapper of the same optimizer.
    """
    wrapper = Optimizer.profile_hook_step(_no_step).__code__
    frame, num = sys._getframe(), 0
    while frame is not None:
        num += frame.f_code is wrapper and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return num > 1


def _no_step(*_args: Any) -> None:
    pass


def _called_by(wrapper: Any) -> CellType | None:
    """Return where ``Optimizer.profile_hook_step`` holds a step that is not torch's own."""
    code, cells = getattr(wrapper, "__code__", None), getattr(wrapper, "__closure__", None)
    if code is None or not cells or "func" not in code.co_freevars:
        return None
    cell = cells[code.co_freevars.index("func")]
    module = getattr(cell.cell_contents, "__module__", None) or ""
    return None if module.split(".")[0] == "torch" else cell
