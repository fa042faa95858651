"""A fill with a number beyond the format: with the farthest that the format holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanstop.remedies.forms.calls import Call
from nanstop.rewrite.operations import FILLS


def answer(call: Call, at_line: Callable[[], bool]) -> Any:
    """Return what a call returns, with a number that its format holds where the line is meant."""
    read, mask, value = call.read, call.argument(1, "mask"), call.argument(2, "value")
    if call.spelled not in FILLS or read is None or not read.is_floating_point():
        return call.run()
    number = float(value) if isinstance(value, Tensor) and not value.dim() else value
    if not isinstance(number, int | float) or not math.isfinite(number) or not at_line():
        return call.run()
    ends = torch.finfo(read.dtype)
    if ends.min <= number <= ends.max:
        return call.run()
    held = ends.min if number < 0 else ends.max
    return getattr(read, call.spelled)(mask, held)
