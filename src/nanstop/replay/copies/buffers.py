"""Copies of a model's buffers that follow those that a forward moves, and of what its parameters
carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from nanstop.frozen import frozen
from nanstop.numerics.tensors import bad_mask, is_inexact
from nanstop.replay import state_diff
from nanstop.replay.conditions import unrecorded
from nanstop.replay.untouched import TensorMemory, copy_of, holds, versions_kept, write

_UNSEEN = frozenset({"running_mean", "running_var"})
"""Buffers that a kernel writes without moving the version counter (``torch.native_batch_norm``)."""

_COMPARED = 4
"""Notes that find out which others are written so."""


class Buffers(Protocol):
    """Buffers that can be put back: those of a model, or of several."""

    def note(self) -> Any:
        """Return the buffers as they are now."""
        ...

    def restore(self, notes: Any, /) -> None:
        """Put back every buffer; ``kept`` and ``rewritten`` say what becomes of versions."""
        ...

    def tensors(self) -> list[Tensor]:
        """Return the buffers that there are now."""
        ...

    def spoilt(self, notes: Any, /) -> bool:
        """Return whether anything in a buffer is not finite that was finite when it was noted.
        Synchronises the device.
        """
        ...

    def kept(self, *notes: Any) -> AbstractContextManager[None]:
        """Undo on exit what is done inside to the buffers, and to tensors of earlier notes."""
        ...

    def rewritten(self, *notes: Any) -> AbstractContextManager[None]:
        """Let last what is done to the buffers inside, as if the script's own run had left it."""
        ...


class BufferNotes:
    """Copies of a model's buffers that follow those a forward moves, at the cost of a version read
    each.

    Returns to an earlier note put back values that a bad forward left behind (running statistics).
    The first notes compare values as well, which synchronises the device: what is written through
    ``data`` is always copied from then on.

    Parameters that have attributes of their own when they are met have what hooks leave there
    (gradients of each sample, counts of calls): these are noted as well. Marks are not: each
    parameter that transformers has loaded has one.
    """

    def __init__(self, root: nn.Module) -> None:
        self._places = [
            (module._buffers, name)
            for module in root.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        self._unseen = {i for i, (_, name) in enumerate(self._places) if name in _UNSEEN}
        self._num_compared = 0
        self._seen = [_BufferNote.of(holder[name]) for holder, name in self._places]
        self._carried = [own for own in map(_carried_by, root.parameters()) if own]
        self._carried_last = [state_diff.NOTHING] * len(self._carried)

    def note(self) -> _Noted:
        """Return the buffers, and what parameters carry, as they are now;
        only those buffers that moved since the last note are copied.
        """
        if self._num_compared < _COMPARED:
            self._num_compared += 1
            self._compare()
        for index, (holder, name) in enumerate(self._places):
            if index in self._unseen or self._seen[index].moved(holder[name]):
                self._seen[index] = _BufferNote.of(holder[name])
        if self._carried:
            self._carried_last = self._note_carried(self._carried_last)
        return _Noted(tuple(self._seen), self._carried_last)

    def _note_carried(self, since: Sequence[state_diff.Notes]) -> list[state_diff.Notes]:
        with unrecorded():
            return [*map(state_diff.note, self._carried, since)]

    def restore(self, notes: _Noted) -> None:
        """Put back every buffer that is not as it was; ``kept`` and ``rewritten`` say what becomes
        of versions. One that did not move keeps its own: a tensor of the script's may be a buffer
        as well (``CrossEntropyLoss(weight=...)``). No recorder hears of it: what is bad in a buffer
        is no operation's of the run that follows. Synchronises the device.
        """
        places = zip(self._places, notes.buffers, strict=True)
        with unrecorded():
            for index, ((holder, name), note) in enumerate(places):
                holder[name] = note.tensor
                if note.moved(note.tensor) or not holds(note.tensor, note.copy):
                    write(note.tensor, note.copy)
                self._seen[index] = _BufferNote(note.tensor, note.tensor._version, note.copy)
            for own, before in zip(self._carried, notes.carried, strict=True):
                now = state_diff.note(own, before)
                state_diff.restore(own, before, state_diff.changed(before, now))

    def tensors(self) -> list[Tensor]:
        """Return the buffers that there are now."""
        return [one for one in (holder[name] for holder, name in self._places) if one is not None]

    def spoilt(self, notes: _Noted) -> bool:
        """Return whether a buffer has what is not finite where its note is finite: a mask of -Inf
        that it came with is none of a step's doing.
        """
        return any(
            note.spoilt(holder[name])
            for (holder, name), note in zip(self._places, notes.buffers, strict=True)
        )

    @contextmanager
    def kept(self, *notes: _Noted) -> Iterator[None]:
        """Undo on exit what is done to the buffers inside, and to tensors of earlier ``notes``
        that take their place, and to what parameters carry.
        """
        present, seen = [holder[name] for holder, name in self._places], list(self._seen)
        tensors = self._tensors(*notes)
        held = [TensorMemory.of(tensor) for tensor in tensors]
        try:
            with versions_kept(tensors), state_diff.kept(self._carried):
                yield
        finally:
            for (holder, name), tensor in zip(self._places, present, strict=True):
                holder[name] = tensor
            for one in held:
                one.put_back()
            self._seen = seen

    @contextmanager
    def rewritten(self, *notes: _Noted) -> Iterator[None]:
        """Let last what is done to the buffers inside, as if the script's own run had left it:
        at their versions now. What parameters carry stays what that run has left.
        """
        with versions_kept(self._tensors(*notes)), state_diff.kept(self._carried):
            yield
        # Versions say no more what has moved.
        self._seen = [_BufferNote.of(holder[name]) for holder, name in self._places]

    def _tensors(self, *notes: _Noted) -> list[Tensor]:
        present = [holder[name] for holder, name in self._places]
        earlier = [note.tensor for each in notes for note in each.buffers]
        return list({id(t): t for t in (*present, *earlier) if t is not None}.values())

    def _compare(self) -> None:
        for index, (holder, name) in enumerate(self._places):
            seen, present = self._seen[index], holder[name]
            if not seen.moved(present) and not holds(seen.tensor, seen.copy):
                self._unseen.add(index)


def _carried_by(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that may be more than marks; those of a subclass are its own."""
    own = vars(parameter)
    is_marked = all(isinstance(value, (bool, str)) for value in own.values())
    return own if type(parameter) is nn.Parameter and not is_marked else {}


@frozen
class _Noted:
    """``carried``: what each parameter carries that carries anything."""

    buffers: tuple[_BufferNote, ...]
    carried: Sequence[state_diff.Notes]


@frozen
class _BufferNote:
    tensor: Tensor
    version: int
    copy: Tensor

    @classmethod
    def of(cls, tensor: Tensor | None) -> _BufferNote:
        """Return a note of a buffer as it is now; the copy is on its device."""
        assert tensor is not None
        return cls(tensor, tensor._version, copy_of(tensor))

    def moved(self, present: Tensor | None) -> bool:
        """Return whether the buffer was replaced or written to since.

        Reads its version, not its values.
        """
        return present is not self.tensor or self.tensor._version != self.version

    def spoilt(self, present: Tensor | None) -> bool:
        """Return whether the buffer is not finite now where the copy is."""
        if present is None or not is_inexact(present):
            return False
        if present.shape != self.copy.shape:
            return bool(bad_mask(present).any())
        return bool((bad_mask(present) & ~bad_mask(self.copy)).any())
