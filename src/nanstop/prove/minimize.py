"""The smallest part of a set that still passes, in few trials."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def minimize(atoms: Sequence[Item], passes: Callable[[tuple[Item, ...]], bool]) -> tuple[Item, ...]:
    """Return a subset of ``atoms``, in their order, that passes and fails without any one of its
    members.

    ``atoms`` must pass as a whole. Earlier atoms are preferred. Each subset is asked for once. When
    a superset of what passes always passes, about ``2k log2(n/k)`` questions find ``k`` of ``n``
    atoms (QuickXplain); where it does not (casts between formats make islands so), the answer is
    still verified by removing each member in turn.

    Source: U. Junker, "QuickXplain", AAAI 2004.
    """
    known: dict[frozenset[Item], bool] = {}
    order = {atom: place for place, atom in enumerate(dict.fromkeys(atoms))}

    def ask(subset: Sequence[Item]) -> bool:
        key = frozenset(subset)
        if key not in known:
            known[key] = passes(tuple(sorted(key, key=order.__getitem__)))
        return known[key]

    def needed(
        background: tuple[Item, ...], items: tuple[Item, ...], *, new: bool
    ) -> tuple[Item, ...]:
        """The part of ``items`` that ``background`` needs to pass;
        ``new``: it has grown since it was last asked for.
        """
        if new and ask(background):
            return ()
        if len(items) == 1:
            return items
        left, right = items[: len(items) // 2], items[len(items) // 2 :]
        from_right = needed(background + left, right, new=True)
        from_left = needed(background + from_right, left, new=bool(from_right))
        return from_left + from_right

    everything = tuple(order)
    if not everything or ask(()):
        return ()
    known[frozenset(everything)] = True
    found = needed((), everything, new=False)
    if not ask(found):
        found = everything
    return tuple(sorted(_verified(found, ask), key=order.__getitem__))


def _verified(found: tuple[Item, ...], ask: Callable[[Sequence[Item]], bool]) -> tuple[Item, ...]:
    """Drop members, the last first, until no single one can be dropped."""
    candidate = next(
        (
            rest
            for place in reversed(range(len(found)))
            if ask(rest := found[:place] + found[place + 1 :])
        ),
        None,
    )
    return found if candidate is None else _verified(candidate, ask)
