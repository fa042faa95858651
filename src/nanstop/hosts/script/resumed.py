"""Notes what a loop restores of an earlier training: an optimizer's state, a loss scaler's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from nanstop.hosts.loop.facts import facts_of_loop
from nanstop.hosts.model.view import PlainView
from nanstop.hosts.patch_table import Table
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

SCALER = "scaler"


class Restored:
    """Stands in for ``load_state_dict`` of optimizers and scalers, which it calls and remembers."""

    def __init__(self) -> None:
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._scalers: WeakSet[Any] = WeakSet()

    def install(self, table: Table) -> None:
        table.replace(Optimizer, "load_state_dict", self._optimizer)
        table.replace(torch.amp.GradScaler, "load_state_dict", self._scaler)

    def take(self, view: PlainView) -> dict[str, Any]:
        """Return, once after its optimizer was restored, the facts of a run that this changes.

        Else nothing.

        Reads the optimizer's moments and synchronises the device.
        """
        optimizer = view.optimizer
        if optimizer is None or optimizer not in self._optimizers:
            return {}
        self._optimizers.discard(optimizer)
        facts = facts_of_loop(view)
        resume, scaler = facts.resume, view.scaler
        forgotten = scaler is not None and scaler.is_enabled() and scaler not in self._scalers
        if resume is not None and forgotten:
            resume = replace(resume, missing=(SCALER,))
        return {"optimizer": facts.optimizer, "resume": resume}

    def _optimizer(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        self._optimizers.add(optimizer)
        return result

    def _scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        self._scalers.add(scaler)
        return result
