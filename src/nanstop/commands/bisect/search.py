"""Which differences between two configurations make one of them fail.

Few trials, and every claim has its own trial.

A configuration is the set of keys that it takes from the bad one; what it does not take is as in
the good one. A trial fails (the same failure), passes, or is unresolved: it could not run, or
failed in another way. Unresolved counts neither as failing nor as passing, so a key that another
one needs in order to be valid is found as part of the answer and leaves it again by ablation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

Judgement = Literal["fails", "passes", "unresolved"]
Status = Literal["found", "flaky", "swapped", "bad_passes", "good_fails", "limit"]
Keys = frozenset[str]

_ROUNDS = 3
"""Searches over the same trials: what turns out to be flaky decides nothing in the next one."""

_DOUBTS = 3
"""Contradictions between trials that are looked into;
with more of them the keys do mask each other.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """A trial to run.

    The keys it takes from the bad configuration, and which repetition of it this is, from 0.
    """

    keys: Keys
    attempt: int = 0


Run = Callable[[Sequence[Request]], Sequence[Judgement]]
"""Runs several trials, side by side if it can, and returns their judgements in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """What a search established.

    ``minimal``: from the good configuration plus these it fails, and with any of them left out it
    does not. ``sufficient_fix``: the bad configuration without these passes, and with any of them
    back it does not. ``inseparable``: members of ``minimal`` without which, each alone, a trial is
    unresolved instead of passing: the others need it to be valid. With status "swapped" the bad
    configuration passes and the good one fails. ``flaky``: configurations that ended differently
    when they were run again. With status "limit" ``minimal`` is the smallest set known to fail.
    """

    status: Status
    minimal: tuple[str, ...] = ()
    sufficient_fix: tuple[str, ...] = ()
    inseparable: tuple[str, ...] = ()
    flaky: tuple[tuple[str, ...], ...] = ()
    num_trials: int = 0


class _LimitReachedError(Exception):
    """No further trial may be run."""


@dataclass(slots=True)
class _Oracle:
    """Answers questions about configurations.

    Runs each once, and again where answers contradict each other.
    """

    run: Run
    limit: int | None
    seen: dict[Keys, list[Judgement]] = field(default_factory=dict)
    doubts: int = 0
    num_trials: int = 0

    def ask(self, wanted: Sequence[Keys]) -> list[Judgement]:
        """Return the judgements on these configurations. Errors: ``_LimitReachedError``."""
        new = [keys for keys in dict.fromkeys(wanted) if keys not in self.seen]
        self._try(new)
        for keys in new:
            self._doubt(keys)
        return [self.judgement(keys) for keys in wanted]

    def again(self, wanted: Sequence[Keys]) -> None:
        """Run each of these configurations a second time, if it was run only once."""
        self._try([keys for keys in dict.fromkeys(wanted) if len(self.seen[keys]) == 1])

    def judgement(self, keys: Keys) -> Judgement:
        """Return what all runs of a configuration agree on; a flaky one is unresolved."""
        agreed = set(self.seen[keys])
        return agreed.pop() if len(agreed) == 1 else "unresolved"

    def flaky(self) -> list[Keys]:
        """Return the key sets whose runs did not all give the same judgement."""
        return [keys for keys, judgements in self.seen.items() if len(set(judgements)) > 1]

    def _try(self, wanted: Sequence[Keys]) -> None:
        left = len(wanted) if self.limit is None else max(self.limit - self.num_trials, 0)
        batch = [Request(keys, len(self.seen.get(keys, ()))) for keys in wanted[:left]]
        self.num_trials += len(batch)
        for request, judgement in zip(batch, self.run(batch) if batch else (), strict=True):
            self.seen.setdefault(request.keys, []).append(judgement)
        if left < len(wanted):
            raise _LimitReachedError

    def _doubt(self, keys: Keys) -> None:
        """Run a configuration again that passes though a part of it fails, or the other way
        round, and that part too.
        """
        judgement = self.judgement(keys)
        against = [
            other
            for other in self.seen
            if (judgement == "passes" and other < keys and self.judgement(other) == "fails")
            or (judgement == "fails" and other > keys and self.judgement(other) == "passes")
        ]
        if against and self.doubts < _DOUBTS:
            self.doubts += 1
            self.again([keys])
            if self.judgement(keys) == judgement:
                self.again(against[:1])


def bisect(keys: Sequence[str], run: Run, *, width: int = 1, limit: int | None = None) -> Bisection:
    """Return the smallest parts of ``keys`` that make a configuration fail, and that cure it when
    taken back.

    ``width`` trials are asked for at a time, which shortens the search and costs trials. With one
    at a time, ``k`` of ``n`` keys that act together take about ``k log2(n) + 2k + 4`` trials, the
    confirmations included; ``limit`` bounds them. Both answers are confirmed by leaving out each
    member, and by a second run.

    Source: the search for one failing member after the other is that of U. Junker, "QuickXplain",
    AAAI 2004; the third judgement is from A. Zeller, "Yesterday, my program worked. Today, it does
    not. Why?", ESEC/FSE 1999.
    """
    return _Bisect(tuple(dict.fromkeys(keys)), _Oracle(run, limit), max(width, 1)).result()


class _Bisect:
    """One search over ``keys``."""

    def __init__(self, keys: tuple[str, ...], oracle: _Oracle, width: int) -> None:
        self.keys, self.oracle, self.width = keys, oracle, width
        self.everything = frozenset(keys)
        self.minimal: tuple[str, ...] = ()
        self.fix: tuple[str, ...] = ()

    def result(self) -> Bisection:
        try:
            return self._outcome(self._search())
        except _LimitReachedError:
            seen = self.oracle.seen
            failing = [keys for keys in seen if self.oracle.judgement(keys) == "fails"]
            self.minimal = self._ordered(min(failing, key=len, default=frozenset()))
            return self._outcome("limit")

    def _search(self) -> Status:
        status = self._ends()
        if status != "found":
            return status
        for _ in range(_ROUNDS):
            self._answer()
            if self._confirmed():
                return "found"
        return "flaky"

    def _answer(self) -> None:
        """Find both answers in what the trials say by now."""
        failing = _Question(self, self._as_is, "fails")
        self.minimal = failing.minimal(self.keys, guesses=())
        passing = _Question(self, self._without, "passes")
        others = (key for key in self.keys if key not in self.minimal)
        causes = (*self.minimal, *others)
        self.fix = passing.minimal(causes, guesses=(1, len(self.minimal)))

    def _confirmed(self) -> bool:
        """Return whether both answers end the same when they are run again.

        All that they rest on, if any trial did not.
        """
        failing, passing = self._as_is(self.minimal), self._without(self.fix)
        self.oracle.again([failing, passing])
        claims = [failing, passing]
        if self.oracle.flaky():
            claims += [failing - {key} for key in self.minimal]
            claims += [passing | {key} for key in self.fix]
            claims += [frozenset(), self.everything]
            self.oracle.again([keys for keys in claims if keys in self.oracle.seen])
        return frozenset(claims).isdisjoint(self.oracle.flaky())

    def _ends(self) -> Status:
        """Return "found" if the bad configuration fails and the good one passes, each run again
        if it does not.
        """
        bad, good = self.everything, frozenset[str]()
        if self.width > 1:
            self.oracle.ask([bad, good])
        if self.oracle.ask([bad]) == ["fails"]:
            if self.oracle.ask([good]) == ["passes"]:
                return "found"
            status, doubtful = "good_fails", [good]
        elif self.oracle.ask([good]) == ["fails"]:
            status, doubtful = "swapped", [bad, good]
        else:
            status, doubtful = "bad_passes", [bad]
        self.oracle.again(doubtful)
        return status if self.oracle.flaky() == [] else "flaky"

    def _outcome(self, status: Status) -> Bisection:
        return Bisection(
            status=status,
            minimal=self.minimal,
            sufficient_fix=self.fix,
            inseparable=self._inseparable(),
            flaky=tuple(self._ordered(keys) for keys in self.oracle.flaky()),
            num_trials=self.oracle.num_trials,
        )

    def _inseparable(self) -> tuple[str, ...]:
        without = {key: frozenset(self.minimal) - {key} for key in self.minimal}
        flaky = self.oracle.flaky()
        return tuple(
            key
            for key, rest in without.items()
            if rest in self.oracle.seen
            and rest not in flaky
            and self.oracle.judgement(rest) == "unresolved"
        )

    def _ordered(self, keys: Keys) -> tuple[str, ...]:
        return tuple(key for key in self.keys if key in keys)

    def _as_is(self, keys: Sequence[str]) -> Keys:
        return frozenset(keys)

    def _without(self, keys: Sequence[str]) -> Keys:
        return self.everything.difference(keys)


@dataclass(frozen=True, slots=True)
class _Question:
    """Whether the configuration made of some keys has the judgement asked for.

    With all keys it has, with none not.
    """

    search: _Bisect
    configuration: Callable[[Sequence[str]], Keys]
    wanted: Judgement

    def minimal(self, items: tuple[str, ...], *, guesses: tuple[int, ...]) -> tuple[str, ...]:
        """Return a part of ``items`` that has the judgement and loses it without any one member.

        Earlier ones preferred.

        The last item of the shortest prefix that has the judgement is needed; with it set, shorter
        prefixes do. ``guesses``: lengths to try first.
        """
        found: tuple[str, ...] = ()
        low = 0
        while (size := self._shortest(found, items, low, guesses)) > 0:
            found, items = (items[size - 1], *found), items[: size - 1]
            low, guesses = -1, (0,)
        return self.search._ordered(frozenset(self._ablated(found)))

    def _holds(self, candidates: Sequence[tuple[str, ...]]) -> list[bool]:
        asked = [self.configuration(one) for one in candidates]
        return [judgement == self.wanted for judgement in self.search.oracle.ask(asked)]

    def _shortest(
        self, found: tuple[str, ...], items: tuple[str, ...], low: int, guesses: tuple[int, ...]
    ) -> int:
        """Return the length of a prefix of ``items`` that, with ``found``, has the judgement, and
        one shorter has not.
        """
        high = len(items)
        while high - low > 1:
            inside = [guess for guess in guesses if low < guess < high][: self.search.width]
            points = inside or _between(low, high, self.search.width)
            answers = self._holds([(*found, *items[:point]) for point in points])
            high = min([point for point, yes in zip(points, answers, strict=True) if yes] + [high])
            low = max([point for point in points if point < high] + [low])
        return high

    def _ablated(self, found: tuple[str, ...]) -> tuple[str, ...]:
        """Return ``found`` without what it does not need, single members first, then those that
        go only together.
        """
        for rests in (self._singles(found), self._joint(found)):
            smaller = next(rests, None)
            if smaller is not None:
                return self._ablated(smaller)
        return found

    def _singles(self, found: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        rests = [tuple(one for one in found if one != key) for key in reversed(found)]
        for start in range(0, len(rests), self.search.width):
            batch = rests[start : start + self.search.width]
            yield from (
                rest for rest, yes in zip(batch, self._holds(batch), strict=True) if yes and rest
            )

    def _joint(self, found: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Yield what has the judgement without several members of which none can be left out
        alone.
        """
        judgements = self.search.oracle.ask(
            [self.configuration(tuple(one for one in found if one != key)) for key in found]
        )
        bound = [key for key, v in zip(found, judgements, strict=True) if v == "unresolved"]
        groups = [tuple(bound), *combinations(bound, 2)] if len(bound) > 1 else []
        for group in dict.fromkeys(groups):
            rest = tuple(one for one in found if one not in group)
            if rest and self._holds([rest]) == [True]:
                yield rest


def _between(low: int, high: int, width: int) -> list[int]:
    """Return up to ``width`` different points that divide what lies between ``low`` and ``high``
    evenly.
    """
    spread = (low + (high - low) * part // (width + 1) for part in range(1, width + 1))
    return sorted({point for point in spread if low < point < high})
