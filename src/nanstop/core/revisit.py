"""Second runs: the same ops counted the same way, some looked at closely, some bad elements put right.

Counting is that of the recorder, without its ranges: such a run costs little more than a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.core.closeup import outputs_of
from nanstop.core.numerics import bad_mask, is_measurable
from nanstop.core.trace import is_counted

Look = Callable[[int, Any, Any, Mapping[str, Any]], "Callable[[Any], None] | None"]


class Revisit(TorchDispatchMode):
    """Calls each of ``looks`` with every counted op of a run, and then what it returned with the op's result.

    A look that fails (out of memory, an operand of a kind not foreseen) is given up; the run goes on.
    """

    def __init__(self, *looks: Look) -> None:
        super().__init__()
        self._looks = looks
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counted = is_counted(func, types)
        if counted is None:
            return NotImplemented
        if not counted:
            return func(*args, **kwargs)
        index = self._count
        self._count += 1
        afterwards: list[Callable[[Any], None]] = []
        for look in self._looks:
            with suppress(Exception):
                done = look(index, func, args, kwargs)
                if done is not None:
                    afterwards.append(done)
        result = func(*args, **kwargs)
        for done in afterwards:
            with suppress(Exception):
                done(result)
        return result


class Patch:
    """Makes chosen elements of chosen ops' outputs finite, as if the op had not failed there.

    ``masks``: op index -> (op name, mask of the bad elements for each output). Only elements that are bad are replaced,
    by numbers of the size of their finite neighbours that differ from each other (no norm or deviation of 0).
    """

    def __init__(self, masks: Mapping[int, tuple[str, tuple[Tensor | None, ...]]]) -> None:
        self.missed = False
        self._masks = masks

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        name, masks = self._masks.get(index, ("", ()))
        if not name:
            return None
        if name != str(func):
            self.missed = True  # the run took another path: what follows proves nothing
            return None

        def done(result: Any) -> None:
            for output, mask in zip(outputs_of(func, args, kwargs, result), masks, strict=False):
                if mask is not None and is_measurable(output) and output.shape == mask.shape:
                    _mend(output, mask)

        return done


@torch.no_grad()
def _mend(output: Tensor, mask: Tensor) -> None:
    bad = bad_mask(output)
    healthy = output[~bad].abs().float()
    scale = healthy.median() if healthy.numel() else torch.ones((), device=output.device)
    steps = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    spread = 0.5 + (steps * 0.618034) % 1.0
    output.copy_(
        torch.where(mask & bad, (scale * spread).view(output.shape).to(output.dtype), output)
    )
