"""The first rows that a model is given, counted: labels, tokens at their start, where they end.

What is counted is what comes out of the run's own collator. Rows without labels, rows that begin
twice and rows that all end in mid-sentence are finite, and teach nothing or something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.objective.fetched import FETCHES
from nanstop.detect.texts import TEXTS
from nanstop.records import DataFacts, TextFacts
from nanstop.records.vocabulary import IGNORED_LABEL
from nanstop.tracing.places import line_text, source_line
from nanstop.tracing.source.bindings import sliced_after

if TYPE_CHECKING:
    from nanstop.replay.step import Batch, ModelView, Step

NUM_ROWS = 64
"""Rows after which it is told what was counted."""
MOST_WINDOWS = 16
"""Windows that are looked at: at a row each, no more are worth the reading."""
_WHOLE = (torch.int64, torch.int32)
_MOST_LINES = 3
_LEAST_REPLACED = 4


class FirstRows:
    """Counts the rows of one run, up to ``NUM_ROWS``."""

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self._counted = DataFacts()
        self._num_windows = 0
        self._told = False
        self._asked = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to count any more."""
        return self._told

    def note(self, step: Step) -> DataFacts | None:
        """Return what was counted, once, when there are rows enough. Synchronises until then."""
        if self._told:
            return None
        text = step.facts.text or TextFacts()
        unread = _table_is_unread(self.view)
        for micro, (batch, loss) in enumerate(zip(step.batches, step.losses, strict=True)):
            if self._counted.num_rows < NUM_ROWS:
                known = float(loss.detach()) if loss is not None and loss.numel() == 1 else None
                found = counted(batch, self.view, text, loss=known, has_ids=not unread)
                self._counted = added(self._counted, found)
                if found.num_without_labels and not self._asked:
                    self._asked = True
                    self._counted = replace(self._counted, masked_at=_masked_at(step, micro))
        self._num_windows += 1
        enough = self._counted.num_rows >= NUM_ROWS or self._num_windows >= MOST_WINDOWS
        return self.finished() if enough else None

    def finished(self) -> DataFacts | None:
        """Return what was counted, if it has not been told."""
        told, self._told = self._told, True
        return self._counted if self._counted.num_rows and not told else None


def count(batches: Iterable[Batch], view: ModelView, text: TextFacts) -> DataFacts:
    """Return what the first rows of some batches hold. Synchronises the device."""
    found = DataFacts()
    for number, batch in enumerate(batches):
        found = added(found, counted(batch, view, text))
        if found.num_rows >= NUM_ROWS or number >= NUM_ROWS:
            break
    return found


def _masked_at(step: Step, micro: int) -> tuple[str, ...]:
    """Return the lines that took labels of a micro-batch out of the loss, as far as they are known.
    Undone; runs it forward once more.
    """
    makers: Any = getattr(step, "makers", None)
    with suppress(Exception):  # what cannot be run again has no line
        found = tuple(map(line_text, makers(_num_ignored, micro))) if makers is not None else ()
        return found or FETCHES.makers(_num_ignored)
    return ()


def _num_ignored(values: Tensor) -> int:
    return int(bool((values == IGNORED_LABEL).any())) if values.dtype == torch.int64 else 0


def added(first: DataFacts, second: DataFacts) -> DataFacts:
    """Return the counts of both."""
    return DataFacts(
        num_rows=first.num_rows + second.num_rows,
        num_labelled=first.num_labelled + second.num_labelled,
        num_without_labels=first.num_without_labels + second.num_without_labels,
        num_twice_begun=first.num_twice_begun + second.num_twice_begun,
        num_cut=first.num_cut + second.num_cut,
        masked_at=first.masked_at or second.masked_at,
        num_shortened=first.num_shortened + second.num_shortened,
        only_label=_same_label(first, second),
        num_ends=first.num_ends + second.num_ends,
        num_ends_ignored=first.num_ends_ignored + second.num_ends_ignored,
        tokenized_at=_both(first.tokenized_at, second.tokenized_at),
        shortened_at=_both(first.shortened_at, second.shortened_at),
    )


def _same_label(first: DataFacts, second: DataFacts) -> int | None:
    one, other = first.only_label, second.only_label
    return other if not first.num_rows else one if one == other or not second.num_rows else None


def _both(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))[:_MOST_LINES]


def counted(
    batch: Batch,
    view: ModelView,
    text: TextFacts,
    *,
    loss: float | None = None,
    has_ids: bool = True,
) -> DataFacts:
    """Return what the rows of one micro-batch hold. ``loss``: of the micro-batch, where it was
    run: a loss of rows without any label is 0 or NaN, and another one has other labels than those
    that are seen here. ``has_ids``: whether the model reads tokens.
    """
    # Beside tensors a batch holds numbers that a call was given.
    batch = {n: one for n, one in batch.items() if not getattr(one, "is_nested", False)}
    labels = _labels(batch)
    ids = _text_ids(batch, view, labels) if has_ids else None
    rows = labels[0] if labels else ids
    if rows is None:
        return DataFacts()
    num = len(rows)
    # Of sequences the first label is predicted by nothing.
    trained = [(one[:, 1:] if one.dim() > 1 else one[:, None]) != IGNORED_LABEL for one in labels]
    taught = [one.flatten(1).any(1) for one in trained if len(one) == num]
    without = int((~torch.stack(taught).any(0)).sum()) if taught else 0
    if without == num and loss is not None and math.isfinite(loss) and loss != 0.0:
        without = 0
    if ids is not None and any(_are_hidden(one, ids) for one in labels):
        without = 0  # places are drawn anew each time: another row has some the next time
    found = DataFacts(num_rows=num, num_labelled=num, num_without_labels=without)
    if ids is None:
        return found
    twice, cut = _starts_and_ends(ids, batch, text)
    of_tokens = _predicts_tokens(view)
    ends, ignored = _ends(ids, labels, batch, text) if of_tokens else (0, 0)
    known = [one for row in _unpadded(ids, batch) if (one := TEXTS.of(row)) is not None]
    short = [one for one in known if one.is_short] if of_tokens else []
    later = [one.text.line for one in short if one.is_cut_later]
    cutters = (line for made in map(source_line, later) if made for line in sliced_after(made))
    return replace(
        found,
        num_twice_begun=twice,
        num_cut=cut,
        num_ends=ends,
        num_ends_ignored=ignored,
        num_shortened=len(short),
        only_label=_only_label(labels, ids) if of_tokens else None,
        tokenized_at=_both((), tuple(line_text(one.text.line) for one in known if one.text.line)),
        shortened_at=_both((), tuple(f"{one.short}: {one.text}" for one in cutters)),
    )


def _are_hidden(labels: Tensor, ids: Tensor) -> bool:
    """Return whether labels are what tokens were before one and the same id took the place of most
    of them, as for a masked language model.
    """
    if labels.shape != ids.shape:
        return False
    replaced = ids[(labels != IGNORED_LABEL) & (labels != ids)]
    if len(replaced) < _LEAST_REPLACED:
        return False
    often = int(replaced.mode().values)
    num_here, num_elsewhere = int((replaced == often).sum()), int((ids == often).sum())
    return 2 * num_here > len(replaced) and num_here == num_elsewhere


def _ends(ids: Tensor, labels: Sequence[Tensor], batch: Batch, text: TextFacts) -> tuple[int, int]:
    """Return in how many rows an end comes right after a token that is trained on, and in how many
    of these no such end is. Without a mask an end is not told from padding.
    """
    mask = batch.get("attention_mask")
    target = next((one for one in labels if one.shape == ids.shape), None)
    if target is None or not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return 0, 0
    ends = torch.tensor(text.eos, device=ids.device, dtype=ids.dtype)
    taught = (target == ids)[:, :-1] & mask[:, :-1].bool()
    after = torch.isin(ids[:, 1:], ends) & mask[:, 1:].bool() & taught
    trained = (after & (target[:, 1:] != IGNORED_LABEL)).any(1)
    rows = after.any(1)
    return int(rows.sum()), int((rows & ~trained).sum())


def _only_label(labels: Sequence[Tensor], ids: Tensor) -> int | None:
    """Return the token that all labels of tokens are, None where they are several."""
    of_tokens = [one[:, 1:] for one in labels if one.shape == ids.shape]
    kept = [one[one != IGNORED_LABEL] for one in of_tokens]
    found = torch.cat(kept).unique() if kept else torch.empty(0)
    return int(found[0]) if found.numel() == 1 else None


def _unpadded(ids: Tensor, batch: Batch) -> list[list[int]]:
    """Return the tokens of each row, without padding where a mask tells it."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    return ids.tolist()


def _predicts_tokens(view: ModelView) -> bool:
    """Return whether a model's head gives a score to each row of its table: a text that is sorted
    into classes may well be read in part.
    """
    names = view.head(), view.embedding()
    held = [getattr(view.root.get_submodule(name), "weight", None) for name in names if name]
    sizes = {one.shape[0] for one in held if isinstance(one, Tensor)}
    return len(held) == len(names) and None not in held and len(sizes) == 1


def _labels(batch: Batch) -> list[Tensor]:
    """Return what may be labels, whatever it is called: whole numbers, one of which is the label
    that torch's losses ignore.
    """
    whole = (v for v in batch.values() if isinstance(v, Tensor) and v.dtype == torch.int64)
    return [v for v in whole if v.dim() and bool((v == IGNORED_LABEL).any())]


def _text_ids(batch: Batch, view: ModelView, labels: Sequence[Tensor]) -> Tensor | None:
    """Return the tokens of a batch, None where it brings embeddings: what else it holds of whole
    numbers, a row for each text, are labels, or a mask of 0 and 1.
    """
    ids = view.token_ids(batch)
    if ids is None or any(ids is one for one in labels):
        return None
    if ids.dim() != 2 or ids.dtype not in _WHOLE:
        return None
    return ids if bool((ids > 1).any()) else None


def _table_is_unread(view: ModelView) -> bool:
    """Return whether no gradient has come to a table of tokens that is trained: the model is given
    something else.
    """
    name = view.embedding()
    weight = getattr(view.root.get_submodule(name), "weight", None) if name else None
    return isinstance(weight, Tensor) and weight.requires_grad and weight.grad is None


def _starts_and_ends(ids: Tensor, batch: Batch, text: TextFacts) -> tuple[int, int]:
    """Return how many rows begin with the token of a beginning twice, and how many fill all the
    places that there are and do not end there.
    """
    num_rows, length = ids.shape
    mask = batch.get("attention_mask")
    masked = isinstance(mask, Tensor) and mask.shape == ids.shape
    real = mask.bool() if masked and isinstance(mask, Tensor) else torch.ones_like(ids).bool()
    twice = 0
    if length > 2 and text.bos is not None:
        first = real.int().argmax(1).clamp(max=length - 3)
        places = torch.arange(num_rows, device=ids.device)
        begin = [(ids[places, first + n] == text.bos) & real[places, first + n] for n in range(3)]
        both = begin[0] & begin[1]
        if not masked and text.bos in (text.pad, *text.eos):
            both &= ~begin[2]  # the longest row of a batch has no padding, others have more of it
        twice = int(both.sum())
    if length != text.most_tokens:
        return twice, 0
    ends = torch.tensor(text.eos, device=ids.device, dtype=ids.dtype)
    # A row that holds an end somewhere else is made of several texts.
    return twice, int((real.all(1) & ~torch.isin(ids, ends).any(1)).sum())
