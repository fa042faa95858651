"""What was there is there again:
attributes and entries of dicts, put back as the objects that they are now.

What a run writes *into* tensors takes more: ``untouched`` puts back values and versions,
``snapshot`` what an update changes, ``borrowed`` what is not known beforehand, ``rng`` random
states. ``held`` lends a tensor another format: what becomes of it meanwhile is to stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

NOTHING = object()
"""Stands for an entry that is not there."""


@contextmanager
def attributes_kept(places: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """Have the attributes, (object, name) each, on exit as they are now."""
    noted = [(holder, name, getattr(holder, name)) for holder, name in places]
    try:
        yield
    finally:
        for holder, name, value in noted:
            setattr(holder, name, value)


@contextmanager
def exchanged(table: dict[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """Have ``entries`` in a dict, the own attributes of an object perhaps;
    what was there, or nothing, is back on exit.
    """
    before = {name: table.get(name, NOTHING) for name in entries}
    put(table, entries)
    try:
        yield
    finally:
        put(table, before)


def put(table: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Put entries into a dict, and take those out that are ``NOTHING``."""
    for name, value in entries.items():
        if value is NOTHING:
            table.pop(name, None)
        else:
            table[name] = value


@contextmanager
def without_gradients(leaves: Iterable[Any]) -> Iterator[None]:
    """Have no gradient at the tensors on entry, and those that they have now on exit."""
    places = [(leaf, "grad") for leaf in leaves]
    with attributes_kept(places):
        for leaf, _ in places:
            leaf.grad = None
        yield
