"""Which step and micro-batch it is, told to peers that do not count by themselves. Looks at no
value: it costs next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Clock:
    """``before_step``, ``after_step``: called around each optimizer step.
    ``ends``: when each step ended, in seconds.
    """

    def __init__(self) -> None:
        self.step = self.micro = 0
        self.backward = self.optimizer = False
        self.stack: list[str] = []
        self.names: dict[int, str] = {}
        self.ends: list[float] = []
        self.before_step: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []

    @property
    def phase(self) -> str:
        if self.optimizer:
            return "optimizer"
        return "backward" if self.backward else "forward"

    def enter(self, module: nn.Module, _: Any) -> None:
        if not self.stack:
            self.names |= {id(one): name for name, one in module.named_modules()}
        self.stack.append(self.names.get(id(module), type(module).__name__))

    def leave(self, *_: Any) -> None:
        if self.stack:
            self.stack.pop()


@contextmanager
def following(clock: Clock) -> Iterator[None]:
    """Have ``clock`` follow backward calls and optimizer steps inside."""
    backward = Tensor.backward

    def counted(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        clock.backward = True
        try:
            backward(loss, *args, **kwargs)
        finally:
            clock.backward = False
        clock.micro += 1

    def before(*_: Any) -> None:
        clock.micro = max(0, clock.micro - 1)
        clock.optimizer = True
        for call in clock.before_step:
            call()

    def after(*_: Any) -> None:
        clock.optimizer = False
        for call in clock.after_step:
            call()
        clock.step, clock.micro = clock.step + 1, 0
        clock.ends.append(time.perf_counter())

    Tensor.backward = counted  # type: ignore[method-assign]
    handles = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
    try:
        yield
    finally:
        Tensor.backward = backward  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


@contextmanager
def knowing_modules(clock: Clock) -> Iterator[None]:
    """Have ``clock`` know which module runs: two hooks on every module."""
    enter = nn.modules.module.register_module_forward_pre_hook(clock.enter)
    leave = nn.modules.module.register_module_forward_hook(clock.leave, always_call=True)
    try:
        yield
    finally:
        enter.remove()
        leave.remove()
