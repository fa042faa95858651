"""Which rows of its data set a micro-batch was made of.

What a loader's sampler drew for each batch is noted as it draws it, and a failing micro-batch is
found among the last batches by the bytes of its tensors. Nothing else draws, reads or waits: the
random streams are as ever.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from nanstop.detect.objective.fetched import FETCHES
from nanstop.frozen import frozen
from nanstop.hosts.patching import Patches
from nanstop.numerics.tensors import tensors
from nanstop.own_code import is_of_library
from nanstop.records import BatchRows, SourceLine
from nanstop.replay.step import Batch
from nanstop.session.shown_text import ids_as_text

_MOST_BYTES = 1 << 20
"""Larger tensors of a batch are not kept: something small tells it from the others."""
_MOST_KEPT = 32 << 20
_MOST_BATCHES = 512
_LEAST_BYTES = 16
"""Tensors that are smaller tell no batch from another, unless they are the same object."""


@frozen
class Delivery:
    """A batch as its loader gave it: its rows, of which data set, and those of its tensors that
    are small.
    """

    rows: tuple[int, ...]
    dataset: Callable[[], Any]
    makers: Callable[[], tuple[Any, Callable[[Any], Any]] | None]
    tensors: tuple[Tensor, ...]
    in_order: bool
    streamed: bool
    num_bytes: int

    def held_in(self, given: list[Tensor]) -> Tensor | None:
        """Return a tensor of it that is among those of a micro-batch, None for none."""
        return next((t for t in self.tensors if any(_is_same(t, other) for other in given)), None)

    def copied_in(self, given: list[Tensor]) -> Tensor | None:
        """Return its largest tensor if a micro-batch has one of the same bytes."""
        largest = max(self.tensors, key=attrgetter("nbytes"), default=None)
        if largest is None or largest.nbytes < _LEAST_BYTES:
            return None
        alike = (t for t in given if t.shape == largest.shape and t.dtype == largest.dtype)
        return largest if any(_same_bytes(largest, other) for other in alike) else None


class BatchTape(Protocol):
    """What records the operations of a loop: ``fetch`` is entered while a batch is made, and
    ``delivered`` is told of its tensors.
    """

    @property
    def fetch(self) -> AbstractContextManager[None]: ...

    def delivered(self, batch: Iterable[Tensor]) -> None: ...


class DataRows:
    """The last batches of the loaders that are followed. ``data``: what rows are said to be of.

    ``tape_now``: gives what records a loop just now, where one is recorded.
    """

    def __init__(self, data: str) -> None:
        self.data = data
        self.tape_now: Callable[[], BatchTape | None] | None = None
        self._last: deque[Delivery] = deque()
        self._num_bytes = 0
        self._followed: list[weakref.ref[Any]] = []

    def made_iterator(self, original: Callable[[Any], Any], loader: Any) -> Any:
        """Stand in for ``DataLoader._get_iterator``: what it returns is followed where its batches
        come in the order of its draws.
        """
        if not _is_followed(loader):
            return original(loader)
        own, drawn = vars(loader), _Drawn(loader.batch_sampler)
        own["batch_sampler"] = drawn
        try:
            iterator = original(loader)
        finally:
            own["batch_sampler"] = drawn.sampler
        reads, itself = type(iterator)._next_data, weakref.ref(iterator)
        in_order = _keeps_order(loader.collate_fn)
        streamed = isinstance(loader.dataset, IterableDataset)
        dataset, makers = _reference(loader.dataset), _makers(weakref.ref(loader), itself)
        is_first = [True]

        def next_data() -> Any:
            tape = self.tape_now() if self.tape_now is not None else None
            # Rows of a stream are not made again: what makes them is recorded whole.
            fetch = nullcontext() if tape is None or streamed else tape.fetch
            with fetch, FETCHES.first() if is_first and is_first.pop() else nullcontext():
                found = reads(itself())
            if drawn.pending:
                given = tensors(found)
                if tape is not None:
                    tape.delivered(given)
                in_rows = [t for t in given if t.dim() and t.layout is torch.strided]
                small = tuple([t.detach() for t in in_rows if t.nbytes <= _MOST_BYTES])
                rows, num_bytes = drawn.pending.popleft(), sum(map(attrgetter("nbytes"), small))
                self._add(Delivery(rows, dataset, makers, small, in_order, streamed, num_bytes))
            return found

        iterator._next_data = next_data
        return iterator

    def follow(self, loader: Any) -> None:
        """Follow one loader, by an attribute of its own."""
        if isinstance(loader, DataLoader) and "_get_iterator" not in vars(loader):
            original = type(loader)._get_iterator
            itself = weakref.ref(loader)
            vars(loader)["_get_iterator"] = lambda: self.made_iterator(original, itself())
            self._followed.append(itself)

    def end(self) -> None:
        """Leave the loaders as they were, and let go of their batches."""
        for loader in filter(lambda one: one is not None, (one() for one in self._followed)):
            vars(loader).pop("_get_iterator", None)
        self._followed.clear()
        self._last.clear()
        self._num_bytes = 0

    def rows_of(self, batch: Batch) -> BatchRows | None:
        """Return the rows of a micro-batch, None where they are not known. Synchronises the device
        where the batch is not on the CPU.
        """
        given = [value.detach() for value in batch.values() if isinstance(value, Tensor)]
        held = [(one, met) for one in self._last if (met := one.held_in(given)) is not None]
        found = held or [
            (one, met) for one in self._last if (met := one.copied_in(given)) is not None
        ]
        if len({one.rows for one, _ in found}) != 1:
            return None
        (delivery, met), starts = found[-1], ()
        if not delivery.rows:
            return None
        num_rows, in_order, by_row = len(delivery.rows), delivery.in_order, False
        if met.shape[0] == 1 and num_rows > 1:
            starts = _starts(batch)
            if len(starts) != num_rows:
                starts = _starts_of_packed(starts, delivery)
            if not starts:
                return None
        elif met.shape[0] != num_rows:
            in_order, by_row = False, in_order  # a preference has two, in whatever order
        data = "the stream" if delivery.streamed else self.data
        line, mended = _made_again(delivery, given)
        return BatchRows(
            data=data,
            rows=delivery.rows,
            in_order=in_order,
            starts=starts,
            by_row=by_row,
            unmade_at=line,
            mended_as=mended,
        )

    def _add(self, one: Delivery) -> None:
        self._last.append(one)
        self._num_bytes += one.num_bytes
        while self._num_bytes > _MOST_KEPT or len(self._last) > _MOST_BATCHES:
            self._num_bytes -= self._last.popleft().num_bytes


def _made_again(delivery: Delivery, given: list[Tensor]) -> tuple[SourceLine | None, str]:
    """See ``rows_again.unmade_at``; nothing is made again where no number of a row is bad. NaN in
    what has no rows, as the mask of packed ones, may be of any.
    """
    num, makers = len(delivery.rows), delivery.makers()
    floats = [t for t in given if t.is_floating_point() and t.numel()]
    by_row = [t.isfinite().reshape(num, -1).all(-1) for t in floats if t.shape[:1] == (num,)]
    whole = [~t.isnan().any().expand(num) for t in floats if t.shape[:1] != (num,)]
    bad = [~one.cpu() for one in (*by_row, *whole)]
    if delivery.streamed or makers is None or not any(map(torch.any, bad)):
        return None, ""
    from nanstop.hosts.rows_again import unmade_at

    is_bad = torch.stack(bad).any(0).tolist()
    return unmade_at(*makers, delivery.rows, is_bad)


def _makers(
    loader: Callable[[], Any], iterator: Callable[[], Any]
) -> Callable[[], tuple[Any, Callable[[Any], Any]] | None]:
    """Return what gives data set and collator as long as a loader lives, or its iterator: that
    outlives a loader that has no name.
    """

    def found() -> tuple[Any, Callable[[Any], Any]] | None:
        whole, itself = loader(), iterator()
        if whole is not None:
            return whole.dataset, whole.collate_fn
        return (itself._dataset, itself._collate_fn) if itself is not None else None

    return found


class TrainerRows:
    """Follows the loader that a trainer makes for a training."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rows = DataRows("train")

    def install(self, patches: Patches) -> None:
        """Have the trainer's loader followed from the next one on."""
        make = self._trainer.get_train_dataloader

        def made(*args: Any, **kwargs: Any) -> Any:
            loader = make(*args, **kwargs)
            self._rows.data = self._name()
            self._rows.follow(getattr(loader, "base_dataloader", loader))
            return loader

        patches.set(self._trainer, "get_train_dataloader", made)

    def rows_of(self, batch: Batch) -> BatchRows | None:
        """See ``session.watched_run.WatchedRun``."""
        return self._rows.rows_of(batch)

    def decode(self, ids: Sequence[int]) -> str:
        """See ``session.watched_run.WatchedRun``."""
        processor = getattr(self._trainer, "processing_class", None)
        tokenizer: Any = getattr(processor, "tokenizer", processor)
        return tokenizer.decode(ids) if hasattr(tokenizer, "decode") else ids_as_text(ids)

    def end(self) -> None:
        """Let go of the loader: a training is over."""
        self._rows.end()

    def _name(self) -> str:
        trainer = self._trainer
        packed = getattr(trainer.args, "packing", False)
        return "train as it was packed" if packed else "train"


class _Drawn:
    """A sampler of batches whose draws are noted until their batch is delivered."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.pending: deque[tuple[int, ...]] = deque()
        self._num_streamed = 0

    def __iter__(self) -> Iterator[Any]:
        self.pending.clear()
        self._num_streamed = 0
        return _Noted(iter(self.sampler), self._note)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def _note(self, drawn: Any) -> None:
        rows = list(drawn)
        kinds = set(map(type, rows))
        if kinds <= {type(None)}:  # a stream: whatever comes next
            rows = list(range(self._num_streamed, self._num_streamed + len(rows)))
            self._num_streamed, kinds = self._num_streamed + len(rows), {int}
        known = all(issubclass(kind, int) for kind in kinds)
        self.pending.append(tuple(rows) if known else ())


class _Noted:
    """An iterator whose values are noted; it is begun when it is made, as without it."""

    def __init__(self, inner: Iterator[Any], note: Callable[[Any], None]) -> None:
        self._inner, self._note = inner, note

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        drawn = next(self._inner)
        if isinstance(drawn, list | tuple):
            self._note(drawn)
        else:
            self._note((object(),))
        return drawn


def _is_followed(loader: Any) -> bool:
    """Return whether batches come in the order of the draws: one by one from torch's own loader,
    a stream without workers.
    """
    home = next(one for one in type(loader).__mro__ if "_get_iterator" in vars(one))
    if home is not DataLoader or loader.batch_sampler is None:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return loader.num_workers == 0
    return getattr(loader, "in_order", True)  # from torch 2.6 on


def _keeps_order(collate: Any) -> bool:
    """Return whether samples stand in the order of their rows: a script's own function may sort."""
    collate = getattr(collate, "data_collator", collate)  # transformers wraps it
    calls = collate if hasattr(collate, "__code__") else type(collate).__call__
    return is_of_library(calls)


def _is_same(kept: Tensor, other: Tensor) -> bool:
    return (
        kept.device == other.device
        and kept.data_ptr() == other.data_ptr()
        and kept.shape == other.shape
        and kept.numel() > 0
    )


def _same_bytes(kept: Tensor, other: Tensor) -> bool:
    first, second = kept.cpu().contiguous(), other.cpu().contiguous()
    return bool(torch.equal(first.view(torch.uint8), second.view(torch.uint8)))


def _starts(batch: Batch) -> tuple[int, ...]:
    """Return where the samples begin that were joined into one row, () where none says so."""
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[0] != 1:
        return ()
    return tuple(int(place) for place in (positions[0] == 0).nonzero().flatten())


def _starts_of_packed(found: tuple[int, ...], delivery: Delivery) -> tuple[int, ...]:
    """Return where the rows begin that were joined into one, each of which was packed of several
    sequences, () where the data set does not say what of.

    ``found``: where sequences begin, by the batch: what the data set says has to agree with it.
    """
    lengths = [_packed_lengths(delivery.dataset(), row) for row in delivery.rows]
    if not all(lengths):
        return ()
    ends = list(accumulate(length for row in lengths for length in row))
    padding = found[len(ends) :]  # positions of padding are 0, each
    if found[: len(ends)] != (0, *ends[:-1]) or any(place < ends[-1] for place in padding):
        return ()
    return (0, *accumulate(map(sum, lengths[:-1])))


def _packed_lengths(dataset: Any, row: int) -> tuple[int, ...]:
    """Return the lengths of the sequences that TRL packed into a row, () where that is not said.

    Nothing of a user's own is called: neither a data set of another kind nor a transform.
    """
    plain = getattr(dataset, "with_format", None)
    if plain is None or "seq_lengths" not in (getattr(dataset, "column_names", None) or ()):
        return ()
    if not is_of_library(type(dataset).__getitem__):
        return ()
    return tuple(int(length) for length in plain(None)[row]["seq_lengths"])


def _reference(dataset: Any) -> Callable[[], Any]:
    """Return what gives a data set as long as it lives, None where it cannot be followed so."""
    try:
        return weakref.ref(dataset)
    except TypeError:
        return lambda: None
