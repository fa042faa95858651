"""The accelerator of this process, whatever its kind: CUDA, MPS, XPU, NPU.
None is initialised by asking.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def kind() -> str | None:
    """Return the type of the accelerator of this machine ("cuda", "mps", ...);
    None where there is none to be had.
    """
    found = _built_for()
    return found.type if found is not None and torch.accelerator.is_available() else None


def _built_for() -> torch.device | None:
    """Return the kind of accelerator that torch was built for, or None.

    Where the machine has none, torch 2.6 raises; later ones return what they were built for.
    """
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        return None


def in_use() -> Any:
    """Return torch's module of the accelerator that this process computes on (``torch.cuda``,
    ``torch.mps``), or None.
    """
    if torch.cuda.is_initialized():
        return torch.cuda
    found = _built_for()
    if found is None or found.type == "cuda":
        return None
    module = torch.get_device_module(found)
    # MPS has nothing to initialise: it is there or not.
    begun = getattr(module, "is_initialized", module.device_count)
    return module if begun() else None


def device_name() -> str:
    """Return what this process computes on: the device and what it is called, "cpu" without one."""
    module = in_use()
    if module is None:
        return "cpu"
    number = module.current_device() if hasattr(module, "current_device") else 0
    called = f" ({module.get_device_name()})" if hasattr(module, "get_device_name") else ""
    return f"{torch.get_device_module().__name__.rpartition('.')[2]}:{number}{called}"


def random_states() -> tuple[Tensor, ...]:
    """Return the state of the generator of each device in use. Generators live on the host:
    no synchronisation.
    """
    module = in_use()
    if module is None:
        return ()
    if hasattr(module, "get_rng_state_all"):
        return tuple(module.get_rng_state_all())
    return (module.get_rng_state(),)


def set_random_states(states: tuple[Tensor, ...]) -> None:
    """Put back what ``random_states`` returned."""
    module = in_use() if states else None
    if module is None:
        return
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(list(states))
    else:
        module.set_rng_state(states[0])
