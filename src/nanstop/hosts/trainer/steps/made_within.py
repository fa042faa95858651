"""What a trainer makes inside its own training step: texts that it generates, and what functions of
the script think of them (online DPO, XPO, Nash-MD).

A run of the step again is given what the first run made: to generate takes longer than to train,
and a function may ask a service.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanstop.frozen import frozen
from nanstop.hosts import compat
from nanstop.numerics.nested import mapped
from nanstop.replay.rng import RngState, restore_rng
from nanstop.tracebacks import passes_through

if TYPE_CHECKING:
    from nanstop.hosts.patching import Patches

__tracebackhide__ = passes_through

_TEXTS = ("_generate", "_generate_vllm", "_generate_completions")
_SCORES = ("_calculate_rewards_from_functions", "_compute_rewards", "_compute_judge")


class GeneratedError(Exception):
    """A trainer asks what its texts are worth, in a run that is to end there."""


@frozen
class Held:
    """What one call has made, and the random state after it."""

    made: Any
    rng: RngState


class MadeWithin:
    """Holds what the first run of a step makes, and gives it to runs of it again, in their order.

    ``note_rng`` notes the random state.
    """

    def __init__(self, trainer: Any, note_rng: Callable[[], RngState]) -> None:
        self._trainer = trainer
        self._note_rng = note_rng
        self.holding: list[Held] | None = None
        """Where what is made now is held."""
        self._given: Iterator[Held] | None = None
        self.generates = False
        """Whether the trainer has methods that generate inside of its step."""
        self.is_scoring = False
        """Whether a function of the script was asked, and has not answered."""

    def install(self, patches: Patches) -> None:
        """Put the patches in place where the trainer makes its texts inside of its step."""
        if compat.makes_batches(self._trainer):
            return
        for name in (*_TEXTS, *_SCORES):
            original = getattr(self._trainer, name, None)
            if original is not None:
                self.generates |= name in _TEXTS
                stand_in = functools.partial(self._on_call, original, name in _SCORES)
                patches.set(self._trainer, name, stand_in)

    @contextmanager
    def given(self, made: list[Held]) -> Iterator[None]:
        """Have calls inside return ``made``; a score that is not among it is not asked for."""
        outer, self._given = self._given, iter(made)
        try:
            yield
        finally:
            self._given = outer

    def _on_call(self, original: Any, is_score: bool, *args: Any, **kwargs: Any) -> Any:
        if self._given is not None:
            held = next(self._given, None)
            if held is not None:
                restore_rng(held.rng)
                return mapped(held.made, _copied)
            if is_score:
                raise GeneratedError
        holding, self.holding = self.holding, None  # what it calls itself is a part of it
        if holding is None:
            return original(*args, **kwargs)
        self.is_scoring = is_score
        made = original(*args, **kwargs)
        self.is_scoring = False
        holding.append(Held(mapped(made, _copied), self._note_rng()))
        self.holding = holding
        return made


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
