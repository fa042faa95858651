"""What running a step changes on the object that hosts it, and in what the script holds.

Noted, undone, and done again in a different order.

A note holds each attribute by reference, the contents of plain containers (a few levels deep) and
copies of small tensors. Nothing here knows which attributes a trainer class has: what changed is
found by comparing two notes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import compress
from operator import is_, is_not
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from nanstop.frozen import frozen
from nanstop.replay.conditions import unrecorded
from nanstop.replay.untouched import versions_kept

_MAPPINGS = frozenset({dict, defaultdict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, deque})
_CONTAINERS = frozenset({*_MAPPINGS, *_SEQUENCES, set})
_NOTED = frozenset({*_CONTAINERS, torch.Tensor})
_DEPTH = 4
_MAX_ITEMS = 2048
_MAX_NAMED, _MAX_LISTED = 256, 32
"""Containers within a mapping, or within a list, that are looked into: what holds more of them is
data, not books that are kept.
"""
_MAX_NUMEL = 4096

Attributes = MutableMapping[str, Any]


@frozen
class _Mapping:
    """``items`` as they were; ``inner``: notes of those that are containers themselves."""

    ref: Any
    items: dict[Any, Any]
    inner: dict[Any, Any]

    def is_now(self) -> bool:
        now, items = self.ref, self.items
        if len(now) != len(items) or not all(map(is_, now, items)):
            return False
        same = all(map(is_, now.values(), items.values()))
        return same and (not self.inner or _are_now(self.inner))


@frozen
class _Sequence:
    """As ``_Mapping``; ``inner`` by place."""

    ref: Any
    items: list[Any]
    inner: dict[int, Any]

    def is_now(self) -> bool:
        now, items = self.ref, self.items
        same = len(now) == len(items) and all(map(is_, now, items))
        return same and (not self.inner or _are_now(self.inner))


@frozen
class _Set:
    ref: set[Any]
    items: frozenset[Any]

    def is_now(self) -> bool:
        return self.ref == self.items


@frozen
class _Long:
    """A list too long to copy: only what was appended can be undone."""

    ref: list[Any]
    length: int

    def is_now(self) -> bool:
        return len(self.ref) == self.length


@frozen
class _Tensor:
    ref: torch.Tensor
    version: int
    copy: torch.Tensor

    def is_now(self) -> bool:
        return self.ref._version == self.version


_KINDS = (_Mapping, _Sequence, _Set, _Long, _Tensor)


@frozen
class Notes:
    """``values``: entries as they were; ``inner``: notes of those that are more than a reference.

    Tables of a trainer have dozens of entries and are noted in every step: what most of them are,
    unchanged, is asked of all at once.
    """

    values: dict[str, Any]
    inner: dict[str, Any]

    def entry(self, name: str) -> Any:
        """Return an entry, as a note where it is more than a reference."""
        return self.inner.get(name, self.values.get(name, _ABSENT))

    def only(self, names: Iterable[str]) -> Notes:
        """Return the notes of some entries, as far as they were there."""
        values = {name: self.values[name] for name in names if name in self.values}
        return Notes(values, {name: self.inner[name] for name in values if name in self.inner})


NOTHING = Notes({}, {})


def note(table: Attributes, since: Notes = NOTHING) -> Notes:
    """Return the present entries of ``table``, the attributes of an object mostly.

    Small tensors are copied on their device, nothing synchronises. ``since``: an earlier note, of
    which what has not changed is taken over: it costs no copy, and is the same in both.
    """
    values = dict(table)
    others = _replaced(values, since.values)
    inner = {
        name: noted
        for name, noted in since.inner.items()
        if noted.is_now() and values.get(name) is noted.ref
    }
    if len(inner) < len(since.inner):
        others += since.inner.keys() - inner.keys()
    for name in others:
        if type(values.get(name)) in _NOTED and name not in inner:
            noted = _note(values[name], 0)
            if isinstance(noted, _KINDS):
                inner[name] = noted
    return Notes(values, inner)


def _replaced(values: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """Return the names of entries that are other objects than earlier."""
    if list(values) == list(earlier):
        return list(compress(values, map(is_not, values.values(), earlier.values())))
    return [name for name, value in values.items() if earlier.get(name, _ABSENT) is not value]


def tensors(notes: Notes) -> Iterator[torch.Tensor]:
    """Return the tensors that were copied."""
    return (noted.ref for noted in notes.inner.values() if isinstance(noted, _Tensor))


def changed(before: Notes, after: Notes) -> set[str]:
    """Return names of entries that differ between two notes of one table."""
    names = {*_replaced(after.values, before.values), *(before.values.keys() - after.values.keys())}
    old, new = before.inner, after.inner
    names |= {name for name in old.keys() | new.keys() if old.get(name) is not new.get(name)}
    return {name for name in names if not _same(before.entry(name), after.entry(name))}


def restore(table: Attributes, notes: Notes, names: Iterable[str]) -> None:
    """Put the named entries back, containers and tensors in place."""
    for name in names:
        if name in notes.values:
            table[name] = _put(notes.entry(name))
        else:
            table.pop(name, None)


@contextmanager
def kept(tables: Iterable[Attributes], *, but: Collection[str] = ()) -> Iterator[None]:
    """Undo on exit what changes in the tables inside, versions of their tensors included.

    Not the entries ``but``. What is copied for that is no part of a run that is recorded around it.
    """
    with unrecorded():
        notes = [(table, note(table)) for table in tables]
    with versions_kept(t for _, before in notes for t in tensors(before)):
        try:
            yield
        finally:
            with unrecorded():
                for table, before in notes:
                    names = changed(before, note(table, before)).difference(but)
                    restore(table, before, names)


def advance(table: Attributes, before: Notes, after: Notes, names: Iterable[str]) -> None:
    """Do to the named entries what happened to them between two notes, starting from what they
    are now.

    Items appended to a list are appended, keys are merged, anything else takes the later value.
    """
    for name in names:
        old, new = before.entry(name), after.entry(name)
        if _same(old, new):
            continue
        if new is _ABSENT:
            table.pop(name, None)
        else:
            table[name] = _advance(table.get(name, _ABSENT), old, new)


_ABSENT = object()


def _are_now(inner: dict[Any, Any]) -> bool:
    return all(noted.is_now() for noted in inner.values())


def _note(value: Any, depth: int) -> Any:
    kind = type(value)
    if depth < _DEPTH and kind in _CONTAINERS and len(value) <= _MAX_ITEMS:
        if kind in _MAPPINGS:  # most of a module's hold nothing
            inner = _inner(value.values(), value, depth, _MAX_NAMED) if value else {}
            return _Mapping(value, dict(value), inner)
        if kind in _SEQUENCES:
            return _Sequence(
                value, list(value), _inner(value, range(len(value)), depth, _MAX_LISTED)
            )
        return _Set(value, frozenset(value))
    if kind is list:
        return _Long(value, len(value))
    if kind is torch.Tensor and depth == 0 and _is_small(value):
        return _Tensor(value, value._version, value.detach().clone())
    return value


def _is_small(tensor: torch.Tensor) -> bool:
    """What ``vmap`` or ``grad`` has wrapped can be copied only as long as these run."""
    if tensor.is_inference() or is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.numel() <= _MAX_NUMEL


def _inner(values: Iterable[Any], keys: Iterable[Any], depth: int, most: int) -> dict[Any, Any]:
    """Return notes of the containers among the entries of one, by key; of more than ``most``,
    none.
    """
    kinds = list(map(type, values))
    if _CONTAINERS.isdisjoint(kinds) or sum(map(kinds.count, _CONTAINERS)) > most:
        return {}
    entries = zip(keys, values, kinds, strict=True)
    found = {key: _note(value, depth + 1) for key, value, kind in entries if kind in _CONTAINERS}
    return {key: noted for key, noted in found.items() if isinstance(noted, _KINDS)}


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or getattr(a, "ref", None) is not getattr(b, "ref", None):
        return False
    if isinstance(a, _Mapping):
        return a.items.keys() == b.items.keys() and all(
            _same(_entry(a, key), _entry(b, key)) for key in a.items
        )
    if isinstance(a, _Sequence):
        return len(a.items) == len(b.items) and all(map(_same, _entries(a), _entries(b)))
    if isinstance(a, _Set):
        return a.items == b.items
    if isinstance(a, _Long):
        return a.length == b.length
    if isinstance(a, _Tensor):
        return a.version == b.version
    return False


def _entry(noted: _Mapping, key: Any) -> Any:
    """Return an entry, as a note where it is a container that was looked into."""
    return noted.inner.get(key, noted.items[key])


def _entries(noted: _Sequence) -> list[Any]:
    return [noted.inner.get(place, value) for place, value in enumerate(noted.items)]


def _put(noted: Any) -> Any:
    if isinstance(noted, _Mapping):
        noted.ref.clear()
        noted.ref.update({key: _put(_entry(noted, key)) for key in noted.items})
        return noted.ref
    if isinstance(noted, _Sequence):
        items = [_put(value) for value in _entries(noted)]
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
        start = _entries(old) if isinstance(old, _Sequence) else []
        now = _entries(new)
        if len(start) <= len(now) and all(map(_same, start, now)):
            present.extend(_put(v) for v in now[len(start) :])
            return present
    if isinstance(new, _Mapping) and isinstance(old, _Mapping) and isinstance(present, Mapping):
        return _advance_mapping(present, old, new)
    return _put(new)


def _advance_mapping(present: Any, old: _Mapping, new: _Mapping) -> Any:
    for key in old.items.keys() - new.items.keys():
        present.pop(key, None)
    for key in new.items:
        earlier = _entry(old, key) if key in old.items else _ABSENT
        value = _entry(new, key)
        if not _same(earlier, value):
            present[key] = _advance(present.get(key, _ABSENT), earlier, value)
    return present
