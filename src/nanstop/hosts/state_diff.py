"""What running a step changes on the object that hosts it.

Noted, undone, and done again in a different order.

A note holds each attribute by reference, the contents of plain containers (a few levels deep) and
copies of small tensors. Nothing here knows which attributes a trainer class has: what changed is
found by comparing two notes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nanstop.replay.untouched import versions_kept

_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
_SEQUENCES = (list, deque)
_DEPTH = 4
_MAX_ITEMS = 2048
_MAX_NUMEL = 4096

Notes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Mapping:
    ref: Any
    items: dict[Any, Any]


@dataclass(frozen=True, slots=True)
class _Sequence:
    ref: Any
    items: list[Any]


@dataclass(frozen=True, slots=True)
class _Set:
    ref: set[Any]
    items: frozenset[Any]


@dataclass(frozen=True, slots=True)
class _Long:
    """A list too long to copy: only what was appended can be undone."""

    ref: list[Any]
    length: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    ref: torch.Tensor
    version: int
    copy: torch.Tensor


def note(host: object) -> Notes:
    """Return the present attributes of ``host``.

    Small tensors are copied on their device, nothing synchronises.
    """
    return {name: _note(value, 0) for name, value in vars(host).items()}


def tensors(notes: Notes) -> Iterator[torch.Tensor]:
    """Return the tensors that were copied."""
    return (noted.ref for noted in notes.values() if isinstance(noted, _Tensor))


def changed(before: Notes, after: Notes) -> set[str]:
    """Return names of attributes that differ between two notes of one object."""
    names = before.keys() | after.keys()
    return {n for n in names if not _same(before.get(n, _ABSENT), after.get(n, _ABSENT))}


def restore(host: object, notes: Notes, names: Iterable[str]) -> None:
    """Put the named attributes back, containers and tensors in place."""
    attributes = vars(host)
    for name in names:
        if name in notes:
            attributes[name] = _put(notes[name])
        else:
            attributes.pop(name, None)


@contextmanager
def kept(hosts: Iterable[object], *, but: Collection[str] = ()) -> Iterator[None]:
    """Undo on exit what changes on the hosts inside, versions of their tensors included.

    Not the attributes ``but``.
    """
    notes = [(host, note(host)) for host in hosts]
    with versions_kept(t for _, before in notes for t in tensors(before)):
        try:
            yield
        finally:
            for host, before in notes:
                names = changed(before, note(host)).difference(but)
                restore(host, before, names)


def advance(host: object, before: Notes, after: Notes, names: Iterable[str]) -> None:
    """Do to the named attributes what happened to them between two notes, starting from what they
    are now.

    Items appended to a list are appended, keys are merged, anything else takes the later value.
    """
    attributes = vars(host)
    for name in names:
        old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if _same(old, new):
            continue
        if new is _ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = _advance(attributes.get(name, _ABSENT), old, new)


_ABSENT = object()


def _note(value: Any, depth: int) -> Any:
    kind = type(value)
    if depth < _DEPTH:
        if kind in _MAPPINGS and len(value) <= _MAX_ITEMS:
            return _Mapping(value, {k: _note(v, depth + 1) for k, v in value.items()})
        if kind in _SEQUENCES and len(value) <= _MAX_ITEMS:
            return _Sequence(value, [_note(v, depth + 1) for v in value])
        if kind is set and len(value) <= _MAX_ITEMS:
            return _Set(value, frozenset(value))
    if kind is list:
        return _Long(value, len(value))
    if depth == 0 and kind is torch.Tensor and value.numel() <= _MAX_NUMEL:
        return _Tensor(value, value._version, value.detach().clone())
    return value


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or getattr(a, "ref", None) is not getattr(b, "ref", None):
        return False
    if isinstance(a, _Mapping):
        return a.items.keys() == b.items.keys() and all(
            _same(v, b.items[k]) for k, v in a.items.items()
        )
    if isinstance(a, _Sequence):
        return len(a.items) == len(b.items) and all(map(_same, a.items, b.items))
    if isinstance(a, _Set):
        return a.items == b.items
    if isinstance(a, _Long):
        return a.length == b.length
    if isinstance(a, _Tensor):
        return a.version == b.version
    return False


def _put(noted: Any) -> Any:
    if isinstance(noted, _Mapping):
        noted.ref.clear()
        noted.ref.update({k: _put(v) for k, v in noted.items.items()})
        return noted.ref
    if isinstance(noted, _Sequence):
        items = [_put(v) for v in noted.items]
        noted.ref.clear()
        noted.ref.extend(items)
        return noted.ref
    if isinstance(noted, _Set):
        noted.ref.clear()
        noted.ref.update(noted.items)
        return noted.ref
    if isinstance(noted, _Long):
        del noted.ref[noted.length :]
        return noted.ref
    if isinstance(noted, _Tensor):
        if noted.ref._version != noted.version:
            with torch.no_grad():
                noted.ref.copy_(noted.copy)
        return noted.ref
    return noted


def _advance(present: Any, old: Any, new: Any) -> Any:
    if isinstance(new, _Sequence) and type(present) in _SEQUENCES:
        start = old.items if isinstance(old, _Sequence) else []
        if len(start) <= len(new.items) and all(map(_same, start, new.items)):
            present.extend(_put(v) for v in new.items[len(start) :])
            return present
    if isinstance(new, _Mapping) and isinstance(old, _Mapping) and isinstance(present, Mapping):
        return _advance_mapping(present, old, new)
    return _put(new)


def _advance_mapping(present: Any, old: _Mapping, new: _Mapping) -> Any:
    for key in old.items.keys() - new.items.keys():
        present.pop(key, None)
    for key, value in new.items.items():
        earlier = old.items.get(key, _ABSENT)
        if not _same(earlier, value):
            present[key] = _advance(present.get(key, _ABSENT), earlier, value)
    return present
