"""Units of a layer that are copies of each other: rows of a weight that begin alike and get the
same gradient are one row for ever.

Numbers that are drawn never are alike. Both are looked at: rows that are alike because updates of
half a format are rounded away get gradients of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nanstop.detect.zero_gradients.flat_steps import UPDATES, is_plain
from nanstop.numerics.trained import held_by

_LEAST = 3
"""Rows that have to be alike."""
_NEAR = 1e-4
"""Share of their size by which rows may differ: a product may round its last rows otherwise."""


class CopiedUnits:
    """Follows the weights of each optimizer of which all rows are alike."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, list[Tensor]] = WeakKeyDictionary()

    def note(self, optimizer: Any, number: int) -> list[Tensor]:
        """Return, before the last of the updates that are looked at, the weights whose rows hold
        the same numbers in each of them, and get the same gradient, which is not 0. Synchronises
        the device in them, and reads two rows of each weight in the first.
        """
        if number not in UPDATES:
            return []
        if number == UPDATES[0]:
            held = [p for p in held_by(optimizer) if p.dim() > 1 and len(p) >= _LEAST]
            self._known[optimizer] = _chosen([p for p in held if is_plain(p.grad)], 2)
        known = [p for p in self._known.get(optimizer, []) if is_plain(p.grad)]
        if not known:
            return []
        self._known[optimizer] = _chosen(known, None)
        return self._known[optimizer] if number == UPDATES[-1] else []


@torch.no_grad()
def names_of_copied(found: list[Tensor], named: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of weights, but of those whose layer has another one that tells its units
    apart: scales that begin alike, beside means that are drawn.
    """
    names = {id(p): name for name, p in named.items()}
    layers: dict[str, list[Tensor]] = {}
    for name, p in named.items():
        layers.setdefault(name.rpartition(".")[0], []).append(p)
    known = [(p, names.get(id(p), "?")) for p in found]
    return tuple(
        name
        for p, name in known
        if all(
            _is_one(other)
            for other in layers.get(name.rpartition(".")[0], ())
            if other.dim() > 1 and other.shape == p.shape
        )
    )


@torch.no_grad()
def _chosen(weights: list[Tensor], num_rows: int | None) -> list[Tensor]:
    """Return those of some weights whose first rows, or all, are alike, and their gradients'."""
    alike = [_are_alike(p[:num_rows], p.grad[:num_rows]) for p in weights if p.grad is not None]
    told = torch.stack([one.to(alike[0].device) for one in alike]).tolist() if alike else []
    return [p for p, is_alike in zip(weights, told, strict=True) if is_alike]


def _are_alike(rows: Tensor, gradients: Tensor) -> Tensor:
    return _is_one(rows) & _is_one(gradients) & gradients.any()


def _is_one(rows: Tensor) -> Tensor:
    first = rows[:1]
    return (rows - first).abs().amax() <= _NEAR * first.abs().amax()
