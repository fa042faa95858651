"""Which token of each row a classifier takes its answer from:
one that the mask leaves out is the wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import ramp
from nanstop.records import op_name
from nanstop.replay.step import Step
from nanstop.tracing.op_patches import LookOfSome, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops, look_again


class Pooling(LookOfSome):
    """Of a step's first micro-batch, keeps ops that read one token of each
    row at padding: how many rows.

    Padding is where its ``attention_mask`` is 0; without one, where a table of embeddings has its
    row of padding. A table that is looked up once more has begun another pass: of other texts, and
    the mask may be that of the first. A read at one place of all rows is a view, seen in the
    backward alone, with the gradient of what was read: of which pass is not known there, and all
    have to have padding. It counts where no other place is read of a tensor of that shape: a loop
    over the tokens reads each.
    """

    ops, in_backward = frozenset({"select_backward", "embedding", "index"}), None

    def __init__(self, step: Step) -> None:
        self.found: dict[int, int] = {}
        self.learned: set[int] = set()
        """Of those, the ones by which a gradient has come to padding."""
        mask = step.batches[0].get("attention_mask") if step.batches else None
        known = isinstance(mask, Tensor) and mask.dim() == 2
        self._passes: list[list[Tensor]] = [[mask == 0] if known else []]
        self._looked_up: set[int] = set()
        self._read: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def __call__(self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]) -> None:
        base = op_name(str(func))
        if torch._C._current_graph_task_id() != -1:
            if base == "select_backward" and args[2] == 1:
                self._select(index, args[0], tuple(args[1]), args[3])
        elif base == "embedding" and len(args) > 2 and args[1].dim() == 2 and args[2] >= 0:
            self._look_up(args[0], _padding(args[1] == args[2]))
        elif base == "index":
            self._index(index, *args[:2])

    def _look_up(self, table: Tensor, padding: Tensor) -> None:
        if table.data_ptr() in self._looked_up:
            self._looked_up.clear()
            self._passes.append([])
        self._looked_up.add(table.data_ptr())
        self._passes[-1].append(padding)

    def _index(self, index: int, read: Tensor, places: Any) -> None:
        padding = _alike(self._passes[-1], read.shape) if read.requires_grad else None
        if padding is None or len(places) < 2:
            return
        num_rows = len(padding)
        if all(p is not None and tuple(p.shape) == (num_rows,) for p in places[:2]):
            rows, tokens = (place.to(padding.device) for place in places[:2])
            self._note(index, padding[rows, tokens])

    def _select(self, index: int, gradient: Tensor, shape: tuple[int, ...], place: int) -> None:
        found = [one for each in self._passes if (one := _alike(each, shape)) is not None]
        if not found:
            return
        padding = torch.stack(found).all(0)
        seen = self._read.setdefault(shape, [])
        seen.append((index, place % shape[1]))
        if len({at for _, at in seen}) > 1:
            for earlier, _ in seen:
                self.found.pop(earlier, None)
        else:
            self.learned.add(index)
            self._note(index, padding[:, place] & gradient.flatten(1).any(1))

    def _note(self, index: int, at_padding: Tensor) -> None:
        if num := int(at_padding.sum()):
            self.found[index] = num


def _alike(paddings: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """Return where the rows that a tensor [rows, tokens, ...] is of have padding."""
    alike = (one for one in paddings if one.shape == tuple(shape[:2]))
    return next(alike, None) if len(shape) > 2 else None


def _padding(left_out: Tensor) -> Tensor:
    """Return which tokens [rows, tokens] are padding, without the one next to the text, which may
    be the end of it; none where some stand within a text: fields that a table leaves out, say.
    """
    leads = left_out.long().cumprod(1).bool()
    trails = left_out.flip(1).long().cumprod(1).flip(1).bool()
    if bool((left_out & ~leads & ~trails).any()):
        return torch.zeros_like(left_out)
    before, after = torch.zeros_like(left_out), torch.zeros_like(left_out)
    before[:, 1:], after[:, :-1] = left_out[:, :-1], left_out[:, 1:]
    return left_out & before.where(~leads, after)


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
        if index in look.learned or first_loss(step, _Moved(-1)) != first_loss(step, _Moved(index)):
            op = first_ops(step)[index]
            return {"num_rows_pooled_at_padding": num, "pooled_at": line_text(op.line)}
    return {}


class _Moved(SecondRun):
    """Has one op read other numbers, each moved by another length: differences of scores, as in
    preference losses and softmax, do not see a common one.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index != self._index:
            return func(*args, **kwargs)
        read = args[0]
        return func(read + ramp(read) * (1.0 + read.detach().abs().amax()), *args[1:], **kwargs)
