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
from nanstop.detect.other_weights import moved
from nanstop.numerics.tensors import tensors
from nanstop.records import ObjectiveRow
from nanstop.tracing.op_patches import LookOfSome
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops
from nanstop.tracing.source.bindings import handed_on_after

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


class States(LookOfSome):
    """Keeps the last op that gives numbers for each token, by [texts, tokens]: what is made of a
    text is often a mean of them.
    """

    def __init__(self) -> None:
        self.last: dict[torch.Size, int] = {}

    def __call__(
        self, index: int, _func: Any, _args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        def done(result: Any) -> None:
            made = tensors(result)[0].shape
            if len(made) == 3 and made[-1] > 1:
                self.last[made[:-1]] = index

        return done


def hidden_texts(
    step: Step, picks: Picks, masks: Masks, states: States
) -> tuple[ObjectiveRow, ...]:
    """Return the operation that hides the texts of the first micro-batch and shows their padding,
    where outputs hang on the padding and on no token of the texts beside their own.

    Undone bitwise; runs the micro-batch twice for each table where rows are padded, up to ten times
    where their padding is read, and not at all elsewhere. Synchronises the device.
    """
    for table, tokens in picks.tokens.items():
        padding = padding_of(tokens)
        if padding is None:
            continue
        pick = next((n for n, labels in picks.labels.items() if is_by_token(labels, tokens)), None)
        runs = _Runs(step, table, states.last.get(tokens.shape) if pick is None else pick)
        asks = (_loss_reads_it, _states_read_it) if pick is None else (_picks_read_it,)
        if any(_asked_twice(ask, runs, padding) for ask in asks):
            return (_row(step, table, padding, masks),)
    return ()


def _asked_twice(ask: Callable[[_Runs, Tensor], bool], runs: _Runs, padding: Tensor) -> bool:
    """Return whether outputs hang on the padding alone, with the weights there are and others."""
    if not ask(runs, padding):
        return False
    trained = [p for p in runs.step.view.root.parameters() if p.requires_grad]
    with moved(trained, FAR):  # what is 0 in a new model lets nothing through
        return ask(runs.anew(), padding)


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


class _Runs:
    """What the first micro-batch gives where some places of its texts have other embeddings: its
    loss, and the numbers of each token that the op ``at`` reads, or gives.
    """

    def __init__(self, step: Step, table: int, at: int | None) -> None:
        self.step, self._table, self._at = step, table, at
        self._made: dict[bytes, tuple[float, Tensor | None]] = {}

    def anew(self) -> _Runs:
        return _Runs(self.step, self._table, self._at)

    def loss_differs(self, places: Tensor) -> bool | None:
        """Return whether the loss is another one with other embeddings in some places, None where
        it is neither another one nor the same.
        """
        if not bool(places.any()):
            return None
        plain, given = (self._of(one, is_given=True)[0] for one in (places & ~places, places))
        return _told(abs(given - plain), abs(plain))

    def rows_differ(self, places: Tensor, asked: Tensor, *, is_given: bool) -> bool | None:
        """Return the same of the numbers of the tokens that are ``asked``."""
        if not bool(places.any()):
            return None
        plain, given = (self._of(one, is_given=is_given)[1] for one in (places & ~places, places))
        if plain is None or given is None or given.shape != plain.shape:
            return None
        asked = asked[:, : given.shape[1]]
        if not given[asked].numel():
            return None
        gap = float((given[asked] - plain[asked]).abs().amax())
        return _told(gap, float(plain[asked].abs().amax()))

    def _of(self, places: Tensor, *, is_given: bool) -> tuple[float, Tensor | None]:
        key = places.cpu().numpy().tobytes()
        if key not in self._made:
            run = MovedTable(self._table, self._at, places, is_given=is_given)
            loss = first_loss(self.step, run)
            rows = run.rows(len(places))
            self._made[key] = loss, rows.float() if rows is not None else None
        return self._made[key]


def _told(gap: float, size: float) -> bool | None:
    return True if gap > READ * size else False if gap <= UNREAD * size else None


def _loss_reads_it(runs: _Runs, padding: Tensor) -> bool:
    """Return whether the loss hangs on the padding, and on no more than one token of each text."""
    if not runs.loss_differs(padding):
        return False
    texts = ~padding
    first = texts.long().cumsum(-1) == 1
    last = texts.flip(-1).long().cumsum(-1).flip(-1) == 1
    # The output of a text may be that of one of its tokens.
    tried = (texts, texts & ~first, texts & ~last)
    return any(runs.loss_differs(places) is False for places in tried)


def _states_read_it(runs: _Runs, padding: Tensor) -> bool:
    """Return whether what is made for each token of a text hangs on the padding, and on no other
    token of it; what is made for padding may be left out later.
    """
    own = ~_odd(padding)
    asked = own & ~padding
    return runs.rows_differ(padding, asked, is_given=True) is True and (
        runs.rows_differ(~padding & ~own, asked, is_given=True) is False
    )


def _picks_read_it(runs: _Runs, padding: Tensor) -> bool:
    """Return the same of the rows that labels pick from."""
    odd = _odd(padding)
    return runs.rows_differ(padding & odd, ~odd, is_given=False) is True and (
        runs.rows_differ(~padding & odd, ~odd, is_given=False) is False
    )


def _odd(padding: Tensor) -> Tensor:
    """Return every second place. Each row reads its own token: others are moved."""
    odd = torch.zeros_like(padding)
    odd[:, 1::2] = True
    return odd


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
