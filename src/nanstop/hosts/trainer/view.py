"""What remedies and the tracer must know of a transformers model.

The ``ModelView`` of this host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.hosts import compat
from nanstop.hosts.model.optimizer_facts import optimizer_facts
from nanstop.hosts.model.view import StructureView
from nanstop.replay.step import Batch


class HfView(StructureView):
    """See ``replay.step.ModelView``.

    Reads the trainer each time: ``train()`` makes its optimizer and may wrap its model.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._met: list[nn.Module] = []
        self._kind: type | None = None
        self._unwrapped: Callable[[], Optimizer | None] = lambda: None
        """The optimizer that was found last, under a wrapper of this kind."""

    @property
    def beside(self) -> list[nn.Module]:
        """Return the trainer's own further models, and what its loss was seen to call."""
        root, own = self.root, vars(self._trainer).values()
        found = [m for m in own if isinstance(m, nn.Module)]
        known = {id(module) for module in root.modules()}
        others = [m for m in (*found, *self._met) if not any(p is root for p in m.modules())]
        return list({id(m): m for m in others if id(m) not in known}.values())

    def met(self, module: nn.Module) -> None:
        self._met.append(module)

    @property
    def root(self) -> nn.Module:  # pyright: ignore[reportIncompatibleVariableOverride] - looked up
        return compat.unwrapped(self._trainer.model)

    def about_optimizer(self) -> dict[str, Any]:
        return {"optimizer": optimizer_facts(self.optimizer, self.root)}

    @property
    def optimizer(self) -> Optimizer | None:
        present, found = self._trainer.optimizer, self._unwrapped()
        if found is None or type(present) is not self._kind or present.optimizer is not found:
            found, wrapped = compat.unwrapped_optimizer(present), present is not None
            self._kind = type(present) if found is not present and wrapped else None
            self._unwrapped = ref(found) if found is not None else lambda: None
        return found

    @property
    def scaler(self) -> Any:
        return compat.run_scaler(self._trainer)

    @property
    def model(self) -> nn.Module:
        """Return the transformers model itself, under PEFT's wrapper where there is one."""
        return compat.base_model(self.root)

    def token_ids(self, batch: Batch) -> Tensor | None:
        """Return the ids that the model gets.

        ``input_ids`` (SFT, DPO, KTO, Reward: chosen rows before rejected), or prompt and
        completion (GRPO).
        """
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor):
            return ids if ids.dim() == 2 else None
        prompt, completion = batch.get("prompt_ids"), batch.get("completion_ids")
        if isinstance(prompt, Tensor) and isinstance(completion, Tensor):
            return torch.cat([prompt, completion], dim=1)
        return None

    def computing(self) -> AbstractContextManager[Any]:
        return self._trainer.compute_loss_context_manager()
