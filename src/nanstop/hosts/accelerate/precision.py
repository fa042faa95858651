"""What an Accelerator of this process asks for."""

from __future__ import annotations

import sys

from nanstop.records import PrecisionFacts
from nanstop.records.formats import BY_SHORT_NAME

FORMATS = {**BY_SHORT_NAME, "fp8": "float8"}
"""Formats as options name them."""


def precision_of_accelerate() -> PrecisionFacts | None:
    """Return what a loop asks accelerate for, where there is an ``Accelerator``."""
    state = sys.modules.get("accelerate.state")
    asked = state.AcceleratorState._shared_state.get("_mixed_precision") if state else None
    if asked not in FORMATS:
        return None
    return PrecisionFacts(requested=FORMATS[asked], option=f'mixed_precision="{asked}"')
