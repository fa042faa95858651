"""Whether texts that a CTC loss is to spell hold its blank, which stands for no letter.

Labels that are padded with the blank's number, and whose padding nobody has taken out, are the
usual way there: a path has to leave a blank and come to the next, and the loss has a minimum that
no recording has. torch computes something for them, and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.objective.operands.numbers import ALIGNMENTS
from nanstop.records import ObjectiveRow
from nanstop.tracing.op_patches import LookOfSome
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step


class Blanks(LookOfSome):
    """Keeps of each CTC loss, by the op's index, how many of its labels are its blank."""

    ops = ALIGNMENTS

    def __init__(self) -> None:
        self.found: dict[int, int] = {}

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
        blank = int((named | dict(kwargs)).get("blank", 0))
        texts = _within(named["targets"], named["target_lengths"])
        num = int((texts == blank).sum())
        if named["log_probs"].requires_grad and num:
            self.found[index] = num
        return None


def _within(targets: Tensor, lengths: Any) -> Tensor:
    """Return the labels that are asked for: of rows that are filled up, those before their end."""
    if targets.dim() < 2:
        return targets
    ends = torch.as_tensor(lengths, device=targets.device).reshape(-1, 1)
    return targets[torch.arange(targets.shape[1], device=targets.device) < ends]


def blank_rows(step: Step, blanks: Blanks) -> tuple[ObjectiveRow, ...]:
    """Return the CTC losses of the first micro-batch whose texts hold their blank.

    Undone bitwise; runs the micro-batch once more where there are any, and not at all elsewhere.
    """
    ops = first_ops(step) if blanks.found else ()
    return tuple(
        ObjectiveRow(
            op=ops[index].name,
            module=ops[index].module,
            given="blanks",
            width=num,
            line=line_text(ops[index].line),
        )
        for index, num in blanks.found.items()
    )
