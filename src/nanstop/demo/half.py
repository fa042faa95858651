"""Mixed float16 on a CPU: accelerate ignores ``fp16=True`` there and silently trains in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from nanstop.demo.scenario import Setup


def trainer_of(setup: Setup, trainer_class: type[Any]) -> type[Any]:
    """Return the class to train with: in mixed float16, but for the reference run."""
    return trainer_class if setup.float32 else in_float16(trainer_class)


def in_float16(trainer_class: type[Any]) -> type[Any]:
    """Return a subclass whose loss is computed under float16 autocast, as ``fp16=True`` does on a
    GPU.

    Weights stay float32. There is no loss scaler: nothing underflows in these models, and it could
    not help values that overflow in the forward.
    """

    class InFloat16(trainer_class):
        def autocast_smart_context_manager(
            self, cache_enabled: bool | None = True
        ) -> AbstractContextManager[Any]:
            return torch.autocast("cpu", dtype=torch.float16, cache_enabled=bool(cache_enabled))

    InFloat16.__name__ = InFloat16.__qualname__ = trainer_class.__name__
    return InFloat16


def quiet_arguments(setup: Setup, **settings: Any) -> dict[str, Any]:
    """Return trainer arguments that every scenario shares, and its own ``settings``.

    They are trained on the CPU from a fixed seed; nothing is reported or saved on the way.
    """
    return {
        "output_dir": str(setup.out),
        "max_steps": setup.steps,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 0,
    } | settings
