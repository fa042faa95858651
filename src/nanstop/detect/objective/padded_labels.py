"""Whether an objective asks for the padding behind texts: labels that nobody has taken out.

Which labels are padding is seen in their numbers: the token that pads, filling the end of rows, or
their beginning, and standing nowhere else. That they count, by an experiment: the micro-batch run
again, undone, without them. Losses that are multiplied by a mask later stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.objective.labels import Picks
from nanstop.detect.objective.padding import FAR, is_by_token, padding_of
from nanstop.detect.other_weights import moved
from nanstop.records import ObjectiveRow
from nanstop.records.vocabulary import IGNORED_LABEL
from nanstop.tracing.op_patches import SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

LEAST_SHARE = 0.2
"""Of the labels, from which the loss is another one: one end too many a row is none of it."""
COUNTS = 1e-3
"""Of the loss, by which it changes at least."""


def padded_labels(step: Step, picks: Picks) -> tuple[ObjectiveRow, ...]:
    """Return the operation that takes the likelihood of padding in the first micro-batch.

    Undone bitwise; runs the micro-batch two to five times where labels are padded so, and not at
    all elsewhere. Synchronises the device.
    """
    pad = step.facts.text.pad if step.facts.text is not None else None
    if pad is None:
        return ()
    for pick in sorted(picks.likelihoods):
        places = _padded(picks.labels[pick], picks, pad)
        if places is None:
            continue
        counts = _counts(step, pick, places)
        if not counts:  # all tokens are alike to a fresh model
            trained = [p for p in step.view.root.parameters() if p.requires_grad]
            with moved(trained, FAR):
                counts = _counts(step, pick, places)
        if counts:
            op, num = first_ops(step)[pick], int(places.sum())
            line = line_text(op.line)
            return (
                ObjectiveRow(
                    op=op.name, module=op.module, given="padded_labels", width=num, line=line
                ),
            )
    return ()


def _counts(step: Step, pick: int, places: Tensor) -> bool:
    """Return whether the loss of the first micro-batch is another one without some labels."""
    plain, without = (first_loss(step, one) for one in (SecondRun(), _Without(pick, places)))
    return abs(without - plain) > COUNTS * abs(plain)


def _padded(labels: Tensor, picks: Picks, pad: int) -> Tensor | None:
    """Return which labels are padding, in their own shape, None where few or none are."""
    texts = next((one for one in picks.tokens.values() if is_by_token(labels, one)), None)
    if texts is None or not bool((labels == pad).any()):
        return None
    rows = labels.reshape(len(texts), -1)
    asked = (rows != IGNORED_LABEL).any(0)  # a shift leaves a column that asks for nothing
    padding = padding_of(rows[:, asked])
    if padding is None or not bool((rows[:, asked][padding] == pad).all()):
        return None
    found = torch.zeros_like(rows, dtype=torch.bool)
    found[:, asked] = padding
    share = float(found.sum()) / float((rows != IGNORED_LABEL).sum())
    return found.reshape(labels.shape) if share >= LEAST_SHARE else None


class _Without(SecondRun):
    """Has one op ignore some labels."""

    def __init__(self, pick: int, places: Tensor) -> None:
        super().__init__()
        self._pick, self._places = pick, places

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index == self._pick:
            args = (args[0], args[1].masked_fill(self._places, IGNORED_LABEL), *args[2:])
        return func(*args, **kwargs)
