"""Which token of each row a classifier takes its answer from:
one that the mask leaves out is the wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanstop.records import op_name
from nanstop.replay.step import Step
from nanstop.tracing.op_patches import SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops, look_again


class Pooling:
    """Called with each op of a step's first micro-batch; keeps those that read one token of each
    row at padding: how many rows.

    Padding is where its ``attention_mask`` is 0; without one, where a table of embeddings has its
    row of padding. A read at one place of all rows counts where no other place is read of the same
    tensor: a loop over the tokens reads each.
    """

    def __init__(self, step: Step) -> None:
        self.found: dict[int, int] = {}
        mask = step.batches[0].get("attention_mask") if step.batches else None
        known = isinstance(mask, Tensor) and mask.dim() == 2
        self._padding: list[Tensor] = [mask == 0] if known else []
        self._read: dict[tuple[int, torch.Size], list[tuple[int, int]]] = {}

    def __call__(self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        base = op_name(str(func))
        if base == "embedding" and len(args) > 2 and args[1].dim() == 2 and args[2] >= 0:
            self._padding.append(args[1] == args[2])
        elif base == "index":
            self._index(index, *args[:2])
        elif base == "select" and len(args) > 2 and args[1] == 1:
            self._select(index, args[0], args[2])

    def _index(self, index: int, read: Tensor, places: Any) -> None:
        padding = self._padding_of(read)
        if padding is None or len(places) < 2:
            return
        num_rows = len(padding)
        if all(p is not None and tuple(p.shape) == (num_rows,) for p in places[:2]):
            rows, tokens = (place.to(padding.device) for place in places[:2])
            self._note(index, padding[rows, tokens])

    def _select(self, index: int, read: Tensor, place: int) -> None:
        padding = self._padding_of(read)
        if padding is None:
            return
        seen = self._read.setdefault((read.data_ptr(), read.shape), [])
        seen.append((index, place % read.shape[1]))
        if len({at for _, at in seen}) > 1:
            for earlier, _ in seen:
                self.found.pop(earlier, None)
        else:
            self._note(index, padding[:, place])

    def _note(self, index: int, at_padding: Tensor) -> None:
        if num := int(at_padding.sum()):
            self.found[index] = num

    def _padding_of(self, read: Tensor) -> Tensor | None:
        """Return where the rows that a tensor [rows, tokens, ...] is of have padding."""
        if read.dim() < 3 or not read.requires_grad:
            return None
        alike = (one for one in self._padding if one.shape == read.shape[:2])
        return next(alike, None)


def pooled_rows(step: Step, look: Pooling | None = None) -> dict[str, Any]:
    """Return fields of a probe: how many rows of the first micro-batch are read at padding, where
    the loss changes with what is read there. Undone bitwise; runs it again where rows are.

    ``look``: what has seen the micro-batch, else it is run. Raises what the step raises.
    Synchronises the device at such ops.
    """
    if look is None:
        look = Pooling(step)
        _, error = look_again(step, 0, look)
        if error is not None:
            raise error
    for index, num in look.found.items():
        if first_loss(step, _Moved(-1)) != first_loss(step, _Moved(index)):
            op = first_ops(step)[index]
            return {"num_rows_pooled_at_padding": num, "pooled_at": line_text(op.line)}
    return {}


class _Moved(SecondRun):
    """Has one op give other numbers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index != self._index:
            return func(*args, **kwargs)
        read = args[0]
        return func(read + 1.0 + read.detach().abs().amax(), *args[1:], **kwargs)
