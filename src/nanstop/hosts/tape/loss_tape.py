"""Records what a loss function of the script's own computes inside a trainer, from the inputs of a
micro-batch to its backward, so that a look can repeat it without calling that function again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nanstop.hosts.tape.tape import Tape
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.hosts.tape.weight_marks import WeightMarks
from nanstop.numerics.tensors import by_torch_alone
from nanstop.replay.rng import RngState, note_rng
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import Line, user_line

__tracebackhide__ = passes_through

MOST_WINDOWS = 16
"""Windows from the first on that are recorded; later ones where looks are due."""


def is_recorded(step: int) -> bool:
    """Return whether the micro-batches of a window are recorded."""
    return step <= MOST_WINDOWS or step & (step - 1) == 0


class LossTape:
    """Records one micro-batch at a time, in the thread that begins it.

    ``without_graph``: see ``hosts.loop.step.LoopStep``.
    """

    def __init__(self) -> None:
        self.without_graph: WeakKeyDictionary[nn.Module, tuple[int, Line]] = WeakKeyDictionary()
        self._marks = WeightMarks()
        self._micro: TapedMicro | None = None
        self._thread = 0
        self._plain: Callable[..., Any] | None = None
        """``nn.Module.__call__`` as it was found, while another one stands in for it."""

    def begin(self, device: str, rng: RngState) -> TapedMicro | None:
        """Record from here on; None where the script has a function mode of its own."""
        tape = Tape(device, lambda _: None)
        if not tape.start():
            return None
        self._micro, self._thread = TapedMicro(tape, rng, self._marks), get_ident()
        self._stand_in()
        return self._micro

    def backward(
        self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what a backward of ``loss`` returns, which ends the micro-batch."""
        micro = self._micro
        if micro is None:
            return original(loss, *args, **kwargs)
        self.end()
        result = micro.tape.call(original, (loss, *args), kwargs, keep=True)
        with by_torch_alone():
            micro.closed([loss])
        return result

    def end(self) -> None:
        """Record no longer, also where the loss has raised."""
        micro, self._micro = self._micro, None
        self._give_back()
        if micro is not None:
            micro.tape.stop()

    def _stand_in(self) -> None:
        original: Any = nn.Module.__call__
        self._plain = original
        called = partial(self._called, original)

        def stand_in(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return called(module, *args, **kwargs)

        self._other = stand_in
        nn.Module.__call__ = stand_in

    def _give_back(self) -> None:
        plain, self._plain = self._plain, None
        if plain is not None and nn.Module.__call__ is self._other:
            nn.Module.__call__ = plain

    def _called(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        micro = self._micro
        if micro is None or get_ident() != self._thread:
            return original(module, *args, **kwargs)
        if next(iter(module.parameters()), None) is None or not micro.tape.stop():
            return original(module, *args, **kwargs)
        if not torch.is_grad_enabled():
            num, line = self.without_graph.get(module, (0, user_line()))
            self.without_graph[module] = num + 1, line
        self._give_back()
        try:
            function = partial(original, module)
            return micro.tape.call(function, args, kwargs, recorded=module, rng=note_rng())
        finally:
            if micro is self._micro:
                self._stand_in()
                micro.tape.start()
