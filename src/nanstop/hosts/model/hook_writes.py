"""Whether hooks that run when a gradient has been accumulated write to the weights: an update that
is made there cannot be held back.

That there are such hooks says nothing, for most only look. The weights say it: a sample of each is
compared from before its hooks to after them, in the backwards of one window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nanstop.numerics.tensors import spread

_MOST_WEIGHTS, _MOST_ELEMENTS = 64, 16


class HookWrites:
    """Looks at the weights of a model that have such hooks, until it is asked what it has seen.

    Without such hooks it does nothing. Copies 16 elements of 64 weights at most, twice a backward.
    """

    def __init__(self, root: nn.Module) -> None:
        hooked = [p for p in root.parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._before: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        for weight in hooked[:: 1 + len(hooked) // _MOST_WEIGHTS]:
            self._look_at(weight)

    def seen(self) -> bool:
        """Return whether a weight has moved while its hooks ran, and stop looking once gradients
        were accumulated. Synchronises the device then.
        """
        if not self._pairs:
            return False
        moved = any(not torch.equal(before, after) for before, after in self._pairs)
        self.stop()
        return moved

    def stop(self) -> None:
        """Take the own hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._pairs.clear()
        self._before.clear()

    def _look_at(self, weight: Tensor) -> None:
        def before(_: Tensor) -> None:
            self._before[id(weight)] = spread(weight, _MOST_ELEMENTS).clone()

        def after(_: Tensor) -> None:
            noted = self._before.pop(id(weight), None)
            if noted is not None:
                self._pairs.append((noted, spread(weight, _MOST_ELEMENTS).clone()))

        self._handles.append(weight.register_hook(before))
        # The last of a weight's hooks to be registered is the last to run.
        self._handles.append(weight.register_post_accumulate_grad_hook(after))
