"""Remedies of computation: the same mathematics by other kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from torch.backends import cuda

from nanstop.errors import NanstopError
from nanstop.records import Atom
from nanstop.replay import conditions
from nanstop.replay.step import ModelView

_SWITCHES: Mapping[str, tuple[Callable[[], bool], Callable[[bool], None]]] = MappingProxyType(
    {
        "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "mem_efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    }
)
"""Whether a kernel of ``scaled_dot_product_attention`` may be chosen, on CPUs too, by torch's name
for it.
"""


@contextmanager
def attention(view: ModelView, atom: Atom) -> Iterator[None]:
    """Have every layer compute attention with the kernel that the value names inside.

    Errors: ``NanstopError`` where the model has no such switch, or not this kernel.
    """
    before = view.attention()
    if before is None:
        raise NanstopError(f"{atom}: this model has no switch for its attention kernel")
    if atom.value not in (before, *view.attention_choices()):
        raise NanstopError(
            f"{atom}: no such attention kernel here",
            hint=f"one of: {', '.join(view.attention_choices())}",
        )
    view.set_attention(atom.value)
    try:
        yield
    finally:
        view.set_attention(before)


@contextmanager
def sdpa_kernel(_view: ModelView, atom: Atom) -> Iterator[None]:
    """Have ``scaled_dot_product_attention`` choose among its other kernels inside, in the whole
    process.

    Errors: ``NanstopError`` for a kernel that it does not have.
    """
    if atom.value not in _SWITCHES:
        raise NanstopError(f"{atom}: no such attention kernel here")
    is_on, switch = _SWITCHES[atom.value]
    before = is_on()
    switch(False)
    try:
        yield
    finally:
        switch(before)


@contextmanager
def eager(_view: ModelView, _atom: Atom) -> Iterator[None]:
    """Have compiled code of this process run as it was written inside: the model's, and every
    other's.
    """
    with conditions.eager():
        yield
