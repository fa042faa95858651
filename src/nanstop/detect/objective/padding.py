"""Whether a model reads the padding of its texts, and not the texts: a mask that says the opposite.

Such a loss is finite and falls to what is known without the texts. Which tokens are padding is seen
in the ids: one that fills the end of rows, or their beginning, and stands nowhere else. What is
read of them, by an experiment: the micro-batch run again, undone, with other embeddings in some
places. How the mask is made, and of which kind it is, plays no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.objective.fetched import FETCHES
from nanstop.detect.objective.labels import MovedTable, Picks
from nanstop.detect.standstill import moved
from nanstop.records import ObjectiveRow
from nanstop.tracing.bindings import handed_on_after
from nanstop.tracing.op_patches import LookOfSome
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

LEAST = 2
"""Places of a row that padding fills: one is a word."""
FAR = 1.0
"""Weights are moved by as much as they are."""
READ, UNREAD = 1e-3, 1e-5
"""Of the size of what a loss or a row is: by more and by less it changes."""


class Masks(LookOfSome):
    """Keeps what is asked for number by number: bool operands of values, by
    the op's index.
    """

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def __call__(
        self, index: int, _func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        tensors = [one for one in args if isinstance(one, Tensor)]
        masks = [one for one in tensors if one.dtype == torch.bool and one.dim() > 1]
        if masks and any(one.is_floating_point() for one in tensors):
            self.found[index] = masks[0].detach().clone()
        return None


def hidden_texts(step: Step, picks: Picks, masks: Masks) -> tuple[ObjectiveRow, ...]:
    """Return the operation that hides the texts of the first micro-batch and shows their padding,
    where outputs hang on the padding and on no token of the texts beside their own.

    Undone bitwise; runs the micro-batch four times where rows are padded, up to twelve times where
    their padding is read, and not at all elsewhere. Synchronises the device.
    """
    for table, tokens in picks.tokens.items():
        padding = padding_of(tokens)
        if padding is None:
            continue
        pick = next((n for n, labels in picks.labels.items() if is_by_token(labels, tokens)), None)
        if _reads_padding_alone(_Outputs(step, table, pick), padding):
            return (_row(step, table, padding, masks),)
        states = _last_states(step, tokens) if pick is None else None
        if states is not None and _reads_padding_alone(_States(step, table, states), padding):
            return (_row(step, table, padding, masks),)
    return ()


def _reads_padding_alone(look: _Outputs, padding: Tensor) -> bool:
    """Return whether outputs hang on the padding alone, with the weights there are and others."""
    if not look.reads_padding_alone(padding):
        return False
    trained = [p for p in look.step.view.root.parameters() if p.requires_grad]
    with moved(trained, FAR):  # what is 0 in a new model lets nothing through
        return look.reads_padding_alone(padding)


def _last_states(step: Step, tokens: Tensor) -> int | None:
    """Return the last op that gives numbers for each token, None where there is none: what is made
    of a text is often a mean of them.
    """
    shape = tuple(tokens.shape)
    made = [
        op.index
        for op in first_ops(step)
        if op.phase in ("forward", "loss")
        and op.outputs
        and op.outputs[0].shape[:-1] == shape
        and op.outputs[0].shape[-1] > 1
    ]
    return made[-1] if made else None


def padding_of(tokens: Tensor) -> Tensor | None:
    """Return where tokens [rows, places] are padding, None where none is known to be."""
    sides = (_run_at_end(tokens), _run_at_end(tokens.flip(-1)).flip(-1))
    run = max(sides, key=lambda side: int(side.sum()))
    if not bool(run.any()) or bool(run.all(-1).any()):
        return None
    elsewhere = (tokens == tokens[run][0]) & ~run
    return None if bool(elsewhere.any()) else run


def _run_at_end(tokens: Tensor) -> Tensor:
    """Return the places at which rows end in the one token that most of them repeat there."""
    last = tokens[:, -1:]
    run = (tokens == last).flip(-1).long().cumprod(-1).flip(-1).bool()
    repeated = run & (run.sum(-1, keepdim=True) >= LEAST)
    if not bool(repeated.any()):
        return repeated
    return run & (last == tokens[repeated].mode().values)


def is_by_token(labels: Tensor, tokens: Tensor) -> bool:
    """Return whether there is a label for each token, or for each but one of each text."""
    num_rows, remainder = divmod(labels.numel(), len(tokens))
    return not remainder and 0 <= tokens.shape[1] - num_rows <= 1 < num_rows


class _Outputs:
    """What the first micro-batch gives where some places of its texts have other embeddings.

    ``pick``: the op that reads a row for each token; where there is none, the loss is what counts.
    """

    is_given = False
    """Whether it is what ``pick`` gives that counts."""

    def __init__(self, step: Step, table: int, pick: int | None) -> None:
        self.step, self._table, self._pick = step, table, pick

    def reads_padding_alone(self, padding: Tensor) -> bool:
        """Return whether outputs hang on the padding, and on no token of a text."""
        plain = self._given(torch.zeros_like(padding))
        odd = torch.zeros_like(padding)
        odd[:, 1::2] = True
        if self._pick is not None:
            # Each row reads its own token: those of even places are asked about odd ones.
            asked = self._asked(padding, ~odd)
            return self._differs(plain, padding & odd, asked) is True and (
                self._differs(plain, ~padding & odd, asked) is False
            )
        if not self._differs(plain, padding, odd):
            return False
        texts = ~padding
        first = texts.long().cumsum(-1) == 1
        last = texts.flip(-1).long().cumsum(-1).flip(-1) == 1
        # The output of a text may be that of one of its tokens.
        tried = (texts, texts & ~first, texts & ~last)
        return any(self._differs(plain, places, odd) is False for places in tried)

    def _asked(self, _padding: Tensor, others: Tensor) -> Tensor:
        """Return the rows that are asked, of ``others``, whose own tokens are not moved."""
        return others

    def _differs(self, plain: Tensor, places: Tensor, asked: Tensor) -> bool | None:
        """Return whether other embeddings in some places change what is asked for, None where it is
        neither changed nor the same.
        """
        if not bool(places.any()):
            return None
        given = self._given(places)
        if given.shape != plain.shape or not given.numel():
            return None
        if self._pick is not None:
            asked = asked[:, : given.shape[1]]
            given, plain = given[asked], plain[asked]
        gap, size = (given - plain).abs().amax(), plain.abs().amax()
        return True if bool(gap > READ * size) else False if bool(gap <= UNREAD * size) else None

    def _given(self, places: Tensor) -> Tensor:
        run = MovedTable(self._table, self._pick, places, is_given=self.is_given)
        if self._pick is None:
            return run.loss(self.step)
        rows = run.rows(self.step, len(places))
        return rows.float() if rows is not None else torch.zeros(0)


class _States(_Outputs):
    """What an op gives for each token; those of the padding may be left out of what is made of
    them.
    """

    is_given = True

    def _asked(self, padding: Tensor, others: Tensor) -> Tensor:
        return others & ~padding


def _row(step: Step, table: int, padding: Tensor, masks: Masks) -> ObjectiveRow:
    """Return the row of the first op that is given the mask, of the table where none is known."""
    ops = first_ops(step)
    masked = next((n for n, mask in masks.found.items() if _tells(mask, padding)), None)
    op = ops[table if masked is None else masked]
    line = line_text(op.line) if masked is not None else ""
    return ObjectiveRow(
        op=op.name,
        module=op.module,
        given="padding",
        width=padding.shape[1],
        line=line,
        made_at=FETCHES.makers(partial(_is_of, padding), behind=handed_on_after),
    )


def _is_of(padding: Tensor, values: Tensor) -> int:
    """Return 1 for a mask of the padding, 0 for anything else."""
    is_mask = values.shape == padding.shape and not values.is_floating_point()
    return int(is_mask and torch.equal(values, padding.to("cpu", values.dtype)))


def _tells(mask: Tensor, padding: Tensor) -> bool:
    """Return whether a mask, of [rows, ..., places], tells padding from the rest."""
    if mask.shape[0] != len(padding) or mask.shape[-1] != padding.shape[1]:
        return False
    kinds = (one.flatten(1, -2).any(1) if one.dim() > 2 else one for one in (mask, ~mask))
    return any(torch.equal(one, other) for one in kinds for other in (padding, ~padding))
