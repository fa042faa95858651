"""The memory that is left where a model computes: on its device, or in the host's memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable
from contextlib import suppress
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor

from nanstop.errors import ShortOfMemoryError
from nanstop.numerics import accelerator, host_memory

MOST_IN_FLOAT64 = 2**28
"""Parameters up to which a step is run in float64: 2 GiB of copies."""
_RUNS, _AMPLE = 2, 2**28
"""Of a run that is yet to come: how much more than those before it may take; bytes beside."""
_TIMES = 8
"""How many times what waits is left at least."""


def left_on(device_type: str) -> int | None:
    """Return the bytes that can still be had on a device, what torch keeps for itself and does not
    use among them, and nothing beyond the share that the script allows itself; None where it does
    not say. No synchronisation.
    """
    if device_type == "cpu":
        return host_memory.free_bytes() or None
    module = torch.get_device_module(device_type)
    if not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info()
    if not hasattr(module, "memory_reserved"):
        return free
    reserved, used = module.memory_reserved(), module.memory_allocated()
    free = min(free, max(0, int(_share(module) * total) - reserved))
    return free + reserved - used


def _share(module: Any) -> float:
    """Return the share of a device that the script allows itself: 1.0 where it has not said, or
    torch, its version or its allocator, does not.
    """
    with suppress(RuntimeError):
        if hasattr(module, "get_per_process_memory_fraction"):
            return module.get_per_process_memory_fraction()
    return 1.0


def most_beyond_now(device_type: str) -> int:
    """Return how many bytes more than now were in use on a device at the most; 0 where it does not
    say. On a CPU the whole process counts, from its start on.
    """
    if device_type == "cpu":
        held, most = host_memory.held_bytes()
        return max(0, most - held)
    module = torch.get_device_module(device_type)
    if not hasattr(module, "max_memory_allocated"):
        return 0
    return max(0, module.max_memory_allocated() - module.memory_allocated())


def place_for(
    copied: Iterable[Tensor], parameters: Iterable[Tensor], *, is_there: bool = False
) -> str | None:
    """Return where copies of tensors wait: "cpu", or None, where each is, on a device with ample
    room. No synchronisation.

    The way to the host is slow. Ample is what leaves room, beside the copies (none where they are
    there already), for a model of these parameters with gradients and two moments in an exact
    format, and for twice what runs before have taken; and what waits is a small share of it, for
    the frozen part of a model may be all of it.
    """
    away = [tensor for tensor in copied if tensor.device.type != "cpu"]
    devices = {tensor.device for tensor in away}
    if len(devices) != 1:
        return "cpu"
    device = devices.pop()
    module = torch.get_device_module(device.type)
    left = left_on(device.type)
    if left is None or not hasattr(module, "memory_reserved"):
        return "cpu"
    if device.index not in (None, module.current_device()):
        return "cpu"
    num, size = sum(p.numel() for p in parameters), sum(t.nbytes for t in away)
    taken = max(most_beyond_now(device.type), module.memory_reserved() - module.memory_allocated())
    needed = (0 if is_there else size) + _widest(num) + _RUNS * taken + _AMPLE
    return None if left > max(needed, _TIMES * size) else "cpu"


def _widest(num_elements: int) -> int:
    """Return the bytes of weights, gradients and two moments in the format of exact runs."""
    return 4 * num_elements * (8 if num_elements <= MOST_IN_FLOAT64 else 4)


def require(device_type: str, num_bytes: int) -> None:
    """Raise ``ShortOfMemoryError`` where host memory has no room for so much. Kernels of a CPU do
    not all survive an allocation that fails; on a device it is an error like any other.
    """
    if device_type != "cpu" or not num_bytes:
        return
    left = left_on(device_type)
    if left is not None and left < num_bytes:
        give_back(device_type)
        left = left_on(device_type)
    if left is not None and left < num_bytes:
        raise ShortOfMemoryError


def let_go(error: BaseException) -> None:
    """Free what an exception that says that memory was short keeps alive: its frames hold what the
    run had made until then, in circles that nobody looks for soon.
    """
    if not (isinstance(error, ShortOfMemoryError) or host_memory.lacks_memory(error)):
        return
    for one in (error, error.__cause__, error.__context__):
        if one is not None:
            clear_frames(one.__traceback__)
    give_back("cpu")
    if accelerator.in_use() is not None:
        give_back(accelerator.kind() or "cpu")


def give_back_after(tensors: Iterable[Tensor], least: int) -> None:
    """Give back what allocators of devices keep after work on tensors of more than ``least``
    elements: what comes next would have a piece of it, and the rest would be of no use to anybody.
    Synchronises the device.
    """
    for kind in {t.device.type for t in tensors if t.numel() > least} - {"cpu", "meta"}:
        module = torch.get_device_module(kind)
        if hasattr(module, "empty_cache"):
            module.empty_cache()


def give_back(device_type: str) -> None:
    """Give back what nobody uses: objects in circles, and what allocators keep for later."""
    gc.collect()
    if device_type != "cpu":
        module = torch.get_device_module(device_type)
        if hasattr(module, "empty_cache"):
            module.empty_cache()
    elif sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library than GNU's has no such call
            ctypes.CDLL(None).malloc_trim(0)
