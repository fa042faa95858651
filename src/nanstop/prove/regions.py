"""What is tried next where a region in float32 is too small: the step fails in another module under
it, or passes with other numbers than float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from torch import nn

from nanstop.numerics.modules import repeated_blocks
from nanstop.records import Atom, FailureKey

_MOST_REGIONS = 8


def with_module(held: tuple[Atom, ...], key: FailureKey) -> tuple[Atom, ...] | None:
    """Return the regions with the module where the step fails under them; None where they are
    many.
    """
    regions = _regions(held)
    if not regions or len(regions) >= _MOST_REGIONS or not key.module:
        return None
    return (*held, Atom(remedy="island", target=key.module, value=regions[0].value))


def is_within(held: tuple[Atom, ...], key: FailureKey) -> bool:
    """Return whether a step fails in one of the regions: where its input or output is cast, say."""
    return any(atom.target == key.module for atom in _regions(held))


def around(held: tuple[Atom, ...], root: nn.Module) -> tuple[Atom, ...] | None:
    """Return the least module around all regions in their place, within one repeated block; None
    where there is none.

    What a region gives in float32 is rounded again by what reads it: what is left of a difference
    of large numbers is lost there.
    """
    regions = _regions(held)
    if not regions:
        return None
    blocks = repeated_blocks(root)
    for name in _parents(regions[0].target):
        is_around = all(_lies_in(atom.target, name) for atom in regions)
        if is_around and _is_called(root, name) and any(_lies_in(name, one) for one in blocks):
            rest = tuple(atom for atom in held if atom.remedy != "island")
            return (Atom(remedy="island", target=name, value=regions[0].value), *rest)
    return None


def _regions(held: tuple[Atom, ...]) -> list[Atom]:
    return [atom for atom in held if atom.remedy == "island"]


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _lies_in(name: str, outer: str) -> bool:
    return f"{name}.".startswith(f"{outer}.")


def _is_called(root: nn.Module, name: str) -> bool:
    """Return whether a module computes something: a list of layers is only held."""
    with suppress(AttributeError):
        return not isinstance(root.get_submodule(name), (nn.ModuleList, nn.ModuleDict))
    return False
