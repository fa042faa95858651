"""Which token of each row a classifier takes its answer from:
one that the mask leaves out is the wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nanstop.records import op_name
from nanstop.replay.step import Step
from nanstop.tracing.record_step import look_again


def num_rows_pooled_at_padding(step: Step, micro: int = 0) -> int:
    """Return how many rows of a micro-batch are read at a token whose ``attention_mask`` is 0.
    Undone bitwise.

    Reading is indexing [rows, tokens, ...] with one token for each row.
    Synchronises the device at such ops.
    """
    mask = step.batches[micro].get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return 0
    look = _Pooling(mask)
    _, error = look_again(step, micro, look)
    if error is not None:
        raise error
    return look.num_bad


class _Pooling:
    """Called with each op; keeps the largest number of rows that one read at padding."""

    def __init__(self, mask: Tensor) -> None:
        self.num_bad = 0
        self._mask = mask

    def __call__(self, _index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]) -> None:
        if op_name(str(func)) != "index" or tuple(args[0].shape[:2]) != tuple(self._mask.shape):
            return
        places = args[1]
        num_rows = self._mask.shape[0]
        if len(places) < 2 or any(p is None or tuple(p.shape) != (num_rows,) for p in places[:2]):
            return
        rows, tokens = (place.to(self._mask.device) for place in places[:2])
        self.num_bad = max(self.num_bad, int((self._mask[rows, tokens] == 0).sum()))
