"""What is left on a device: what it has free, what torch keeps, what a script allows itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanstop.numerics import host_memory, room

GIB = 2**30


def device(monkeypatch, *, free, used, reserved, share=None, most=None):
    """Have a device of 80 GiB stand in for torch's module of one."""
    module = SimpleNamespace(
        mem_get_info=lambda: (free * GIB, 80 * GIB),
        memory_allocated=lambda: used * GIB,
        memory_reserved=lambda: reserved * GIB,
        max_memory_allocated=lambda: (used if most is None else most) * GIB,
        current_device=lambda: 0,
    )
    if share is not None:
        module.get_per_process_memory_fraction = lambda: share
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


@pytest.mark.parametrize(
    ("share", "left"),
    [
        (None, 48),
        (1.0, 48),
        (0.5, 8 + 8),  # 40 GiB allowed, 32 reserved, 8 of them unused
        (0.25, 8),  # more is reserved than is allowed: what is kept is still to be had
    ],
)
def test_a_share_that_the_script_allows_itself_bounds_what_is_left(monkeypatch, share, left):
    device(monkeypatch, free=40, used=24, reserved=32, share=share)
    assert room.left_on("cuda") == left * GIB


def test_what_others_use_of_a_device_is_not_left(monkeypatch):
    device(monkeypatch, free=3, used=24, reserved=32, share=0.9)
    assert room.left_on("cuda") == (3 + 8) * GIB


def test_an_allocator_that_knows_no_share_bounds_nothing(monkeypatch):
    def unknown():
        raise NotImplementedError

    device(monkeypatch, free=40, used=24, reserved=32)
    torch.get_device_module("cuda").get_per_process_memory_fraction = unknown
    assert room.left_on("cuda") == 48 * GIB


def on(place, gib, count=2**28) -> Any:
    """A tensor of so many GiB on a device stands in for one."""
    return SimpleNamespace(device=torch.device(place), nbytes=int(gib * GIB), numel=lambda: count)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"free": 70, "used": 8, "reserved": 8}, None),
        ({"free": 70, "used": 8, "reserved": 8, "most": 30}, None),
        ({"free": 70, "used": 8, "reserved": 8, "most": 39}, "cpu"),  # two runs more would not fit
        ({"free": 38, "used": 8, "reserved": 40}, "cpu"),  # 32 that were in use: two times 64
        ({"free": 70, "used": 8, "reserved": 8, "share": 0.2}, "cpu"),
        ({"free": 47, "used": 8, "reserved": 8}, "cpu"),  # what waits is more than an eighth
        ({"free": 49, "used": 8, "reserved": 8}, None),
    ],
)
def test_copies_wait_on_a_device_with_ample_room(monkeypatch, state, place):
    """8 GiB are what the widest run of 2^28 parameters takes, 6 what waits."""
    device(monkeypatch, **state)
    state_of_optimizer, counter = on("cuda:0", 6), on("cpu", 0)
    assert room.place_for([state_of_optimizer, counter], [on("cuda:0", 1)]) == place


def test_what_is_there_already_takes_no_more(monkeypatch):
    device(monkeypatch, free=9, used=8, reserved=8)
    copied, parameters = [on("cuda:0", 1)], [on("cuda:0", 1)]
    assert room.place_for(copied, parameters) == "cpu"
    assert room.place_for(copied, parameters, is_there=True) is None


@pytest.mark.parametrize(
    "copied", [[], [on("cpu", 1)], [on("cuda:1", 1)], [on("cuda:0", 1), on("cuda:1", 1)]]
)
def test_copies_wait_in_host_memory_where_no_one_device_is_known(monkeypatch, copied):
    device(monkeypatch, free=70, used=8, reserved=8)
    assert room.place_for(copied, []) == "cpu"


def test_an_allocator_that_keeps_no_account_has_no_ample_room(monkeypatch):
    device(monkeypatch, free=70, used=8, reserved=8)
    del torch.get_device_module("cuda").memory_reserved
    assert room.place_for([on("cuda:0", 1)], []) == "cpu"


@pytest.mark.parametrize(
    ("place", "count", "times"), [("cuda:0", 101, 1), ("cuda:0", 100, 0), ("cpu", 101, 0)]
)
def test_what_large_tensors_leave_behind_is_given_back(monkeypatch, place, count, times):
    device(monkeypatch, free=70, used=8, reserved=8)
    given_back = []
    torch.get_device_module("cuda").empty_cache = lambda: given_back.append(1)
    room.give_back_after([on(place, 1, count), on("cuda:0", 1, 3)], 100)
    assert len(given_back) == times


@pytest.mark.parametrize(
    ("message", "short"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", False),
    ],
)
def test_a_library_that_has_no_room_is_short_of_memory(message, short):
    assert host_memory.lacks_memory(RuntimeError(message)) is short
