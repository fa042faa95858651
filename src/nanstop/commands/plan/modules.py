"""A model as the plan sees it.

Which modules compute, which only hold others, and in what order they run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from nanstop.commands.plan.regions import ModuleGroups
from nanstop.hosts.model.view import is_inside
from nanstop.numerics.modules import repeated_blocks
from nanstop.remedies.forward import is_callable

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Layout:
    """``order``: modules in the order of their first operation.

    ``blocks``: the repeated ones. ``units``: the outermost modules that are no containers: what a
    region is made of.
    """

    order: tuple[str, ...]
    blocks: frozenset[str]
    containers: frozenset[str]
    units: tuple[str, ...]
    groups: ModuleGroups[str]

    def is_container(self, name: str) -> bool:
        """Return whether a module is a block, or holds blocks.

        In float32 it would take most of the model along.
        """
        return name in self.containers

    def in_block(self, name: str) -> bool:
        """Return whether a module is part of a block; of a model without blocks every module is."""
        return not self.blocks or any(is_inside(name, block) for block in self.blocks)

    def covered(self, name: str, items: Iterable[str]) -> bool:
        return any(is_inside(name, item) for item in items)

    def runs(self, items: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return items as contiguous runs: between those of one run no other module computes."""
        found: list[list[str]] = []
        last: str | None = None
        placed: set[str] = set()
        for name in self.order:
            if name in self.containers and name not in items:
                continue
            owner = next((item for item in items if is_inside(name, item)), None)
            if owner is not None and owner not in placed:
                placed.add(owner)
                if last is None:
                    found.append([])
                found[-1].append(owner)
            last = owner
        found += [[item] for item in items if item not in placed]
        return tuple(map(tuple, found))


def layout_of(root: nn.Module, order: Sequence[str]) -> Layout:
    """Return the layout of a model whose modules ran in this order."""
    blocks = repeated_blocks(root)
    containers = {name for name, _ in root.named_modules() if _holds(name, blocks)} | {""}
    if not blocks:
        containers |= {name for name in order if _is_most(root, name)}
    callable_names = {name for name, module in root.named_modules() if is_callable(module)}
    candidates = callable_names - containers
    order = tuple(name for name in order if name in callable_names)
    found = (_outermost(name, candidates) for name in order)
    units = tuple(dict.fromkeys(name for name in found if name))
    kinds: dict[str, list[str]] = {}
    for unit in units:
        kinds.setdefault(_NUMBER.sub("*", unit), []).append(unit)

    def parts(item: str) -> tuple[str, ...]:
        below = {name for name in candidates if name != item and is_inside(name, item)}
        inner = (_outermost(name, below) for name in order)
        return tuple(dict.fromkeys(name for name in inner if name))

    groups = ModuleGroups(
        groups=tuple(map(tuple, kinds.values())),
        inside=is_inside,
        parts=parts,
    )
    return Layout(tuple(order), frozenset(blocks), frozenset(containers), units, groups)


def _holds(name: str, blocks: Sequence[str]) -> bool:
    return any(is_inside(block, name) for block in blocks)


def _is_most(root: nn.Module, name: str) -> bool:
    module = root.get_submodule(name)
    if not any(True for _ in module.children()):
        return False
    own = sum(parameter.numel() for parameter in module.parameters())
    return 2 * own > sum(parameter.numel() for parameter in root.parameters())


def _outermost(name: str, candidates: set[str]) -> str:
    """Return the outermost of the candidates that ``name`` is a part of, "" where there is none."""
    words = name.split(".")
    paths = (".".join(words[: end + 1]) for end in range(len(words)))
    return next((path for path in paths if path in candidates), "")
