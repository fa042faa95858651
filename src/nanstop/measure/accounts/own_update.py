"""What a script's own update does: one that it makes itself, with no optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nanstop.measure.accounts.samples import sampled_gradient
from nanstop.records import GradientAccount, SourceLine
from nanstop.tracing.places import Line, source_line
from nanstop.tracing.source.bindings import factors_given_at, target_given_at

if TYPE_CHECKING:
    from nanstop.measure.accounts.followed import Followed

_STAYS = 2
"""Windows in a row in which a kept tensor serves one parameter before it is that one's."""


class OwnStates:
    """Which parameter's gradients each tensor takes up that a script's own update keeps: a moment
    that goes over to another parameter is none of its own.
    """

    def __init__(self) -> None:
        self._present: Any = WeakIdKeyDictionary()
        self._before: Any = WeakIdKeyDictionary()
        """Of each, the parameters of its windows, the same in a row once, with their number."""
        self.line: Line = None
        """The last that has one take up a gradient."""

    def note(self, state: Tensor, parameter: int, line: Line) -> None:
        """Note that ``state`` takes up a gradient of ``parameter`` in this window; of several it
        keeps none.
        """
        self.line = line
        other = self._present.get(state, parameter)
        self._present[state] = parameter if other == parameter else None

    def close(self) -> None:
        """End a window."""
        for state, parameter in self._present.items():
            runs = self._before.setdefault(state, [])
            if runs and runs[-1][0] == parameter:
                runs[-1][1] += 1
            else:
                runs.append([parameter, 1])
        self._present = WeakIdKeyDictionary()

    @property
    def num_moved(self) -> int:
        """How many have served one parameter for windows in a row, and another one since."""
        return sum(
            len(runs) == 2 and all(num >= _STAYS and one is not None for one, num in runs)
            for runs in self._before.values()
        )


class OwnUpdate:
    """What a script's own update does to the tensors that it trains, from one backward to the next:
    there is no optimizer, ``param_groups`` are as one's.

    ``written_at``: lines that wrote to weights. ``elsewhere_at``: lines that made an update of a
    weight into another tensor.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters)}]
        self._first: Tensor | None = None
        self._latest: dict[str, Any] = {}
        self._written: set[int] = set()
        self.states = OwnStates()
        self.begin(None)

    def begin(self, weights: Tensor | None) -> None:
        """Begin anew after a backward; ``weights``: the sample as it left them."""
        self._weights = weights
        self._gradients: dict[int, Tensor] = {}
        self._asked: list[Tensor] = []
        self._is_known = True
        self.written_at: list[SourceLine] = []
        self.elsewhere_at: list[SourceLine] = []
        self.lost_squares: list[tuple[float, SourceLine]] = []

    def moving(self, weight: Tensor, given: Sequence[Tensor], factor: float | None) -> None:
        """Note the gradient that a weight has when it is written to, and the size of what is
        added to it.
        """
        self._written.add(id(weight))
        self._gradients.setdefault(id(weight), sampled_gradient(weight).clone())
        self._is_known &= factor is not None
        sizes = [one.detach().abs().amax() for one in given if one.numel()]
        self._asked += [size.float() * abs(factor or 0.0) for size in sizes]

    def is_made(self, weights: Tensor) -> bool:
        """Return whether an update was made since the last backward, or was to be."""
        if self._weights is None:
            return False
        is_told = bool(self.written_at or self.elsewhere_at)
        return is_told or not torch.equal(weights, self._weights)

    def close(self, one: Followed) -> None:
        """Note in the window's samples the gradients that the update consumed."""
        weights, samples = one.weights(), one.samples
        self.states.close()
        self._first = self._weights if self._first is None else self._first
        if samples is None or not samples.backwards or self._first is None:
            return
        known = {id(p): part for p, part in zip(one.chosen(), one.parts(samples), strict=True)}
        samples.consumed, samples.weights = one.gradients(known | self._gradients), self._weights
        moved = zip(one.split(weights), one.split(self._first), strict=True)
        are_still = [torch.equal(now, first) for now, first in moved]
        have = [bool(part.any()) for part in one.split(samples.consumed)]
        left_out = [id(p) not in self._written for p in one.chosen()]
        asked = torch.stack([size.cpu() for size in self._asked]).amax() if self._asked else None
        self._latest = {
            "is_own": True,
            "asked": float(asked) if asked is not None and self._is_known else None,
            "updated_at": _once(self.written_at),
            "elsewhere_at": _once(self.elsewhere_at),
            "num_states_moved": (moved := self.states.num_moved),
            "states_at": _lines_of_state(self.states.line) if moved else (),
            "share_squares_lost": max((share for share, _ in self.lost_squares), default=0.0),
            "squares_lost_at": _once([line for _, line in self.lost_squares]),
            "num_still": 0
            if all(are_still)
            else sum(map(all, zip(are_still, have, left_out, strict=True))),
        }

    def told(self, account: GradientAccount) -> GradientAccount:
        """Return the account of the window, completed by what the update did."""
        return replace(account, **self._latest, given_at=self._given_at(account))

    def _given_at(self, account: GradientAccount) -> tuple[SourceLine, ...]:
        """Return the lines that gave a value to what the update works with, where something is
        amiss.
        """
        if self._latest["num_still"] and self.written_at:
            return target_given_at(self.written_at[-1])
        if account.share_moved == 0.0 and self.elsewhere_at:
            return target_given_at(self.elsewhere_at[-1])
        is_nothing = self._latest["asked"] == 0.0 and bool(self.written_at)
        return factors_given_at(self.written_at[-1]) if is_nothing else ()


def _lines_of_state(line: Line) -> tuple[SourceLine, ...]:
    source = source_line(line)
    return (source, *target_given_at(source)) if source is not None else ()


def _once(lines: Sequence[SourceLine]) -> tuple[SourceLine, ...]:
    return tuple(dict.fromkeys(lines))
