"""What a run's update rests on: state that an earlier run left, and how the micro-batches of a window are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nanstop.records.vocabulary import CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFacts:
    """What a run goes on from.

    ``folder``: the checkpoint's name, "" where only the optimizer tells of earlier steps. ``missing``: files that a whole
    checkpoint of this run has and this one has not. ``num_zero``: of ``num_moments`` second moments of the optimizer,
    those that are zero throughout although it has counted ``step`` steps.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    folder: str = ""
    step: int = 0
    missing: tuple[str, ...] = ()
    num_moments: int = 0
    num_zero: int = 0
    replaced: float = 0.0
    """By how much of their size the first update moved weights that the optimizer itself does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationFacts:
    """How the losses of a window are made one.

    ``counts``: supervised tokens of each micro-batch of the first window. ``by_tokens``: whether the loss is divided by the
    tokens of the whole window, None where it was not asked. ``by_micros``: whether the host divides it by the number of
    micro-batches. ``batch_norms``: modules whose statistics are those of one micro-batch.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    counts: tuple[int, ...] = ()
    by_tokens: bool | None = None
    by_micros: bool = True
    batch_norms: int = 0
    sum_format: str | None = None
    """Half precision in which a loop's own gradients are summed over the window; None where they are not."""
