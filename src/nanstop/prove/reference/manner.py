"""In which manner an exact run computes what fails in the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanstop.frozen import frozen
from nanstop.numerics.tensors import HALF
from nanstop.tracing.in_float64 import Lifted


@frozen
class Manner:
    """Whether choices of the run are taken over, fused attention is computed in its parts, casts of
    the script to half precision are left out, and in float64 those to float32.
    """

    takes_choices: bool = True
    is_opened: bool = False
    leaves_half: bool = False
    is_lifted: bool = False

    @contextmanager
    def within(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute so inside, in a run that ``dtype`` is the format of."""
        narrow = frozenset(HALF if self.leaves_half else ())
        if self.is_lifted and dtype is torch.float64:
            narrow |= {torch.float32}
        parts = sdpa_kernel(SDPBackend.MATH) if self.is_opened else nullcontext()
        with parts, Lifted(dtype, narrow) if narrow else nullcontext():
            yield
