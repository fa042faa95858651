"""What an update rests on: state of an earlier run, and how micro-batches are added up."""

from __future__ import annotations

from nanstop.records.record import record
from nanstop.records.values import SourceLine


@record
class ResumeFacts:
    """What a run goes on from.

    ``folder``: the checkpoint's name, "" where only the optimizer tells of earlier steps.
    ``missing``: files that a whole checkpoint of this run has and this one has not. ``num_zero``:
    of ``num_moments`` second moments of the optimizer, those that are zero throughout although it
    has counted ``step`` steps.
    """

    folder: str = ""
    step: int = 0
    missing: tuple[str, ...] = ()
    num_moments: int = 0
    num_zero: int = 0
    replaced: float = 0.0
    """By how much of their size the first update moved weights that the optimizer lacks."""
    num_compared: int = 0
    """Parameters whose second moments were held against the gradients of the first window."""
    others: tuple[tuple[str, str], ...] = ()
    """Of those, pairs of a parameter and the one of its shape whose moments fit it far better."""
    at: SourceLine | None = None
    """The line that restored the optimizer's state, None where that was not seen."""


@record
class LoadFacts:
    """What a state dict that was loaded lacks of a model of ``num_tensors`` parameters, and what it
    has beside: as many of the same shapes. ``at``: the line that loaded it.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    num_tensors: int = 0
    at: SourceLine | None = None


@record
class AccumulationFacts:
    """How the losses of a window are made one.

    ``counts``: supervised tokens of each micro-batch of the first window. ``by_tokens``: whether
    the loss is divided by the tokens of the whole window, None where it was not asked.
    ``by_micros``: whether the host divides it by the number of micro-batches.
    ``batch_norms``: modules whose statistics are those of one micro-batch.
    """

    counts: tuple[int, ...] = ()
    by_tokens: bool | None = None
    by_micros: bool = True
    batch_norms: int = 0
    sum_format: str | None = None
    """Half precision in which a loop's own gradients are summed over the window, or None."""
    made_at: SourceLine | None = None
    """The line that made the loss of the first micro-batch, where that was seen."""
