"""Lightning's trainers in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The names that Lightning's trainer is installed under."""


def trainer_classes() -> Iterator[type]:
    """Yield the classes of Lightning's trainers that this process has imported."""
    for package in PACKAGES:
        module = sys.modules.get(f"{package}.trainer.trainer")
        if module is not None and hasattr(module, "Trainer"):
            yield module.Trainer
