"""What is left on a device: what it has free, what torch keeps, what a script allows itself."""

from types import SimpleNamespace

import pytest
import torch

from nanstop.numerics import room

GIB = 2**30


def device(monkeypatch, *, free, used, reserved, share=None):
    """Have a device of 80 GiB stand in for torch's module of one."""
    module = SimpleNamespace(
        mem_get_info=lambda: (free * GIB, 80 * GIB),
        memory_allocated=lambda: used * GIB,
        memory_reserved=lambda: reserved * GIB,
        max_memory_allocated=lambda: used * GIB,
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
