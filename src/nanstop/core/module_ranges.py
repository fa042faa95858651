"""How large what each module puts out is, in one run of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from nanstop.core.localize import eager
from nanstop.core.numerics import floats
from nanstop.core.step import Step


def module_ranges(step: Step, micro: int = 0) -> dict[str, Tensor]:
    """Return the largest magnitude of each module's floating outputs by its name, in the order in which they end.

    Values are 0-dim tensors on the module's device: NaN where an output has one, the largest of all calls of a module
    in the forward, its recomputation and any in the loss. Runs without the recorder; undone bitwise. No synchronisation
    but the step's own. Raises what the step raises.
    """
    names = {id(module): name for name, module in step.view.root.named_modules()}
    found: dict[str, Tensor] = {}

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is None:
            return
        for part in (each for tensor in _tensors(output) for each in floats(tensor)):
            largest = part.abs().amax()
            known = found.get(name)
            found[name] = largest if known is None else torch.maximum(known, largest.to(known))

    with step.isolated(), eager():
        handle = register_module_forward_hook(note)
        try:
            step.run(micro)
        finally:
            handle.remove()
    return found


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's output, as deep as modules nest them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from (tensor for value in output.values() for tensor in _tensors(value))
    elif isinstance(output, list | tuple):
        yield from (tensor for value in output for tensor in _tensors(value))
