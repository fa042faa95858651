"""The smallest region that has to be left out of a narrow format, by trial.

Nothing here knows what an item is: a module, a layer. Whether a region works is not monotone (casts
at its edge can break what a smaller region had mended), so that whatever is returned was tried as
it is, and without each of its items.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nanstop.prove.bench import Budget
from nanstop.prove.minimize import minimize

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RegionTrial(Generic[Item]):
    """What a trial of a region showed.

    ``suspects``: items that would have to join it, as far as that can be told.
    """

    passes: bool
    suspects: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Found(Generic[Item]):
    """``items``: a region that passes.

    ``minimal``: and was seen to fail without any one of its items.
    """

    items: tuple[Item, ...]
    minimal: bool
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroups(Generic[Item]):
    """Where to search.

    ``groups``: all items, alike ones together, each group in the order of the run.

    ``inside``: whether the first item is a part of the second.
    ``parts``: the items that make one up, in order.
    """

    groups: Sequence[tuple[Item, ...]]
    inside: Callable[[Item, Item], bool]
    parts: Callable[[Item], tuple[Item, ...]]


class _SpentError(Exception):
    """The budget does not allow another trial."""


@dataclass(slots=True)
class _RegionTrials(Generic[Item]):
    """Runs each trial once, within the budget, and remembers the smallest region that passed."""

    run: Callable[[tuple[Item, ...]], RegionTrial[Item]]
    budget: Budget
    done: dict[frozenset[Item], RegionTrial[Item]] = field(default_factory=dict)
    best: tuple[Item, ...] | None = None
    start: float = 0.0

    def look(self, items: tuple[Item, ...]) -> RegionTrial[Item]:
        """Return what a trial of these items gave, run at most once.

        Errors: ``_SpentError`` where the budget of trials or seconds is spent.
        """
        key = frozenset(items)
        if key not in self.done:
            spent = self.budget.clock() - self.start >= self.budget.seconds
            if self.done and (spent or len(self.done) >= self.budget.trials):
                raise _SpentError
            self.done[key] = self.run(items)
            smaller = self.best is None or len(items) < len(self.best)
            if self.done[key].passes and smaller:
                self.best = items
        return self.done[key]

    def passes(self, items: tuple[Item, ...]) -> bool:
        return self.look(items).passes


def smallest_region(
    run: Callable[[tuple[Item, ...]], RegionTrial[Item]],
    modules: ModuleGroups[Item],
    *,
    budget: Budget | None = None,
) -> Found[Item] | None:
    """Return the smallest region that passes, or None where not even all items do.

    Grows by what each trial suspects until it passes; where nothing is suspected, it looks for the
    kinds of items that matter and then for those among them. Then every item is taken away in turn,
    and large ones give way to a run of their parts. When the budget ends, the smallest region that
    passed is returned as it is.
    """
    limits = budget or Budget()
    trials = _RegionTrials(run, limits, start=limits.clock())
    try:
        grown, passing = _grown(trials, modules)
        region = grown if passing else _among_kinds(trials, modules, grown)
        if region is None:
            return None
        region = minimize(region, trials.passes)
        region = _narrowed(trials, modules, region, kept=frozenset(grown))
    except _SpentError:
        return (
            Found(trials.best, minimal=False, trials=len(trials.done))
            if trials.best is not None
            else None
        )
    return Found(region, minimal=True, trials=len(trials.done))


def _grown(
    trials: _RegionTrials[Item], modules: ModuleGroups[Item]
) -> tuple[tuple[Item, ...], bool]:
    """Return the region that suspicion leads to, and whether it passes."""
    region: tuple[Item, ...] = ()
    look = trials.look(region)
    while not look.passes:
        larger = _outermost((*region, *look.suspects), modules)
        if frozenset(larger) == frozenset(region):
            break
        region = larger
        look = trials.look(region)
    return region, look.passes


def _among_kinds(
    trials: _RegionTrials[Item], modules: ModuleGroups[Item], grown: tuple[Item, ...]
) -> tuple[Item, ...] | None:
    groups = ((grown,) if grown else ()) + tuple(modules.groups)

    def union(chosen: Sequence[tuple[Item, ...]]) -> tuple[Item, ...]:
        return _outermost(tuple(item for group in chosen for item in group), modules)

    if not trials.passes(union(groups)):
        return None
    return union(minimize(groups, lambda chosen: trials.passes(union(chosen))))


def _outermost(items: tuple[Item, ...], modules: ModuleGroups[Item]) -> tuple[Item, ...]:
    """Return the items, each once, without those that are part of another."""
    unique = tuple(dict.fromkeys(items))
    return tuple(
        item
        for item in unique
        if not any(item != other and modules.inside(item, other) for other in unique)
    )


def _narrowed(
    trials: _RegionTrials[Item],
    modules: ModuleGroups[Item],
    region: tuple[Item, ...],
    *,
    kept: frozenset[Item],
) -> tuple[Item, ...]:
    """Let items give way to a run of their parts where that passes.

    ``kept``: what was itself seen to go wrong.
    """
    for item in region:
        parts = modules.parts(item) if item not in kept else ()
        rest = tuple(other for other in region if other != item)
        if len(parts) < 2 or not trials.passes((*rest, *parts)):
            continue
        needed = minimize(parts, lambda some, rest=rest: trials.passes((*rest, *some)))
        places = [parts.index(one) for one in needed]
        contiguous = not places or places[-1] - places[0] + 1 == len(places)
        if contiguous and len(needed) < len(parts):
            smaller = minimize((*rest, *needed), trials.passes)
            return _narrowed(trials, modules, smaller, kept=kept)
    return region
