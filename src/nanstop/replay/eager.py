"""Compiled modules run eagerly, for instruments that see operations."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules eagerly inside: a dispatch mode would disable their compiled code for the rest of the run."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        # The recorder's module hooks see a compiled module and its original: both have the name of one place.
        warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
        yield
