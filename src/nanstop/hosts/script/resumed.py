"""Notes what a loop restores of an earlier training: an optimizer's state, a loss scaler's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from nanstop.hosts.loop.facts import facts_of_loop
from nanstop.hosts.model.view import PlainView
from nanstop.hosts.patch_table import Table
from nanstop.numerics.optimizer_state import moments_of_others
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import Line, source_line, user_line

__tracebackhide__ = passes_through

SCALER = "scaler"


class Restored:
    """Stands in for ``load_state_dict`` of optimizers and scalers, which it calls and remembers."""

    def __init__(self) -> None:
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._optimizers_at: WeakKeyDictionary[Optimizer, Line] = WeakKeyDictionary()
        self._scalers: WeakSet[Any] = WeakSet()

    def install(self, table: Table) -> None:
        table.replace(Optimizer, "load_state_dict", self._optimizer)
        table.replace(torch.amp.GradScaler, "load_state_dict", self._scaler)

    def take(self, view: PlainView) -> dict[str, Any]:
        """Return the fields of ``RunFacts`` that restoring the optimizer of ``view`` has changed;
        {} where it was not restored since this was last asked.

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
        if resume is not None:
            num, others = moments_of_others(optimizer, view.root.named_parameters())
            at = source_line(self._optimizers_at.get(optimizer))
            resume = replace(resume, num_compared=num, others=others, at=at)
        return {"optimizer": facts.optimizer, "resume": resume}

    def _optimizer(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        self._optimizers.add(optimizer)
        self._optimizers_at[optimizer] = user_line()
        return result

    def _scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        self._scalers.add(scaler)
        return result
