"""What Lightning's Fabric wraps around a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nanstop.replay.undo import attributes_kept

_PACKAGES = ("lightning.fabric", "lightning_fabric")


def inside_fabric(module: nn.Module) -> nn.Module:
    """Return the module that the script gave to ``Fabric.setup``, or the module itself."""
    wrapped: Any = module
    is_wrapper = any(isinstance(module, kind) for kind in _wrappers())
    return wrapped._original_module if is_wrapper else module


@contextmanager
def without_fabrics_hooks() -> Iterator[None]:
    """Have outputs of models that are called inside take any backward: where a precision or a
    strategy has one of its own, Fabric's hook on them raises in each that it is not asked for.
    """
    kinds = list(_wrappers())
    with attributes_kept([(kind, "_register_backward_hook") for kind in kinds]):
        for kind in kinds:
            kind._register_backward_hook = _as_it_is
        yield


def _as_it_is(_wrapper: Any, output: Any) -> Any:
    return output


def _wrappers() -> Iterator[Any]:
    """Yield the classes of wrapped models that this process has imported."""
    for package in _PACKAGES:
        kind = getattr(sys.modules.get(f"{package}.wrappers"), "_FabricModule", None)
        if kind is not None:
            yield kind
