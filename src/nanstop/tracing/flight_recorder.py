"""Notes every operation before it runs, so that a process that dies inside one has left its name
behind.

Unlike ``Recorder`` it measures nothing and keeps nothing: what it notes goes to ``write`` at
once. It is entered for a whole run, whose models it does not know beforehand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nanstop.records.values import FlightOperand
from nanstop.tracing import operators
from nanstop.tracing.places import Place, Places
from nanstop.tracing.recorder import Recorder, is_counted

Write = Callable[[str, str, str, str, Sequence[FlightOperand]], int]
"""Called with (phase, op, module, "file:line function", operands) before an op runs;
returns its place.
"""

MAX_PLACES = 50_000
"""Autograd nodes whose origin is remembered: more than one step of a large model has."""


class FlightRecorder(Recorder):
    """Notes ops with ``write`` before they run and with ``done`` once they have returned.

    Ops that other threads start in forward are not seen.
    Compiled code runs eagerly while this is entered. No synchronisation.
    """

    def __init__(self, write: Write, done: Callable[[int], None]) -> None:
        super().__init__(nn.Module(), {})
        self._places = _RunPlaces()
        self._write = write
        self._done = done
        self._hooks: list[Any] = []

    def __enter__(self) -> FlightRecorder:
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._enter_phase("optimizer")),
            register_optimizer_step_post_hook(lambda *_: self._enter_phase("forward")),
        ]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)

    def _enter_phase(self, phase: Any) -> None:
        self._phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counted = is_counted(func, types)
        if counted is None:
            return NotImplemented
        place = 0
        try:
            op = self._place(operators.traits(func).name)
            if counted:
                operands = [(str(t.dtype)[6:], tuple(t.shape)) for t in _operands(args, kwargs)]
                place = self._write(op.phase, op.name, op.module, _line(op.line), operands)
        except Exception:  # an op of a kind not foreseen must not end the run
            place = 0
        result = func(*args, **kwargs)
        self._done(place)
        return result

    def _owner(self, parameter: Tensor) -> str:  # noqa: ARG002  tensors have no names here
        return ""


class _RunPlaces(Places):
    """Places of a run without a known root:
    the first model met has the plain names, others those of their class.
    """

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self._has_model = False
        self._first: dict[int, str] = {}

    def _adopt(self, module: nn.Module) -> None:
        if self._has_model or next(module.children(), None) is None:
            if len(self._names) > MAX_PLACES:  # a script that makes modules in every step
                self._names = dict(self._first)
            super()._adopt(module)
            return
        self._has_model = True
        for name, part in module.named_modules():
            self._names.setdefault(id(part), name)
        self._first = dict(self._names)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._left(module, args, output)
        self.left_root = self.left_root or not self._stack

    def forward(self, op: str, line: Any, index: int | None = None) -> Place:
        """Return the place of an op, and forget the oldest ones once there are too many."""
        place = super().forward(op, line, index)
        for held in (self._made, self._parent):
            if len(held) > 2 * MAX_PLACES:
                for key in list(itertools.islice(held, MAX_PLACES)):
                    del held[key]  # type: ignore[arg-type]
        return place


def _operands(args: Any, kwargs: Any) -> list[Tensor]:
    return [tensor for _, _, tensor in operators.tensors(args, kwargs)]


def _line(line: Any) -> str:
    return f"{line[0].co_filename}:{line[1]} {line[0].co_name}" if line else ""
