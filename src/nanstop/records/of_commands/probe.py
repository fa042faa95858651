"""What a look at real batches tells: ranges, gradients, updates, the distance to float32."""

from __future__ import annotations

from typing import Literal

from nanstop.records.facts import RangeRow, UpdateRow
from nanstop.records.record import record
from nanstop.records.values import StepId


@record
class GradientRow:
    """Of one parameter's gradient in the run's own formats: what float32 has and it has not.

    ``num_nonzero``: elements that are not zero in float32; ``num_flushed``: those of them that are
    exactly zero in the run. ``absmax``: of the float32 gradient, without the loss scale.
    """

    parameter: str
    dtype: str
    absmax: float
    num_nonzero: int
    num_flushed: int


@record
class LogitGap:
    """Distance of the output head in the run's formats to the same head in float32, over every
    token: of log-probabilities, the mean over the vocabulary, weighted by float32's probabilities.
    """

    logprob_max: float
    logprob_mean: float


@record
class CoarseRow:
    """An op whose numbers its format cannot tell apart. ``error``: of counts, or in radians."""

    module: str
    op: str
    dtype: str
    absmax: float
    error: float
    line: str = ""


@record
class DriftRow:
    """An op that loses digits: relative distance to float32 of what it reads and makes."""

    module: str
    op: str
    dtype: str
    before: float
    after: float


@record
class CancelledRow:
    """A difference that is made of roundings: one of them changes the ``loss`` by ``change``."""

    module: str
    op: str
    loss: float
    change: float
    line: str = ""


@record
class LostSumRow:
    """A sum of ``num_terms``, one after the other, that lacks this ``share`` of what was added."""

    module: str
    op: str
    dtype: str
    num_terms: int
    share: float
    line: str = ""


@record
class StateRow:
    """Second moments of a parameter after the update: how many are 0 and should not be."""

    parameter: str
    dtype: str
    num_vanished: int
    num_total: int


@record
class ObjectiveRow:
    """What an objective read that is no logits, or no log-probabilities, whatever the weights are.

    ``op``: the operation that read it, of ``width`` classes. ``given``: rows that sum to 1, values
    between 0 and 1, scores without a normalisation, one class alone, labels that are the last token
    that each row reads, or one after the next, every pair of ``width`` outputs and targets, the
    policy itself in the place of its reference, ``width`` values less their own mean, padding of
    ``width`` places in that of texts, ``width`` rows and a copy of each, ``width`` labels of
    padding, gradients that were asked for without a graph, logarithms of probabilities along
    another dimension, a target ``width`` beyond 0 and 1, targets of 0 in the place of -1, ``width``
    labels that are the blank of an alignment, labels that each row has read, outputs that are
    kept from ``width`` targets, targets of 0 and 1 that are looked through for -1, or rows of
    ``width`` scores that are pieces of several.
    ``line``: FILE:LINE; ``made_at``: of the lines that made what was read what it is; of copies,
    the names of what holds them in the batch.
    """

    op: str
    module: str
    given: Literal[
        "probabilities",
        "between_0_and_1",
        "scores",
        "one_class",
        "own_token",
        "later_token",
        "every_pair",
        "itself",
        "own_mean",
        "padding",
        "own_copy",
        "padded_labels",
        "unheard",
        "across",
        "beyond",
        "unsigned",
        "blanks",
        "ahead",
        "out_of_reach",
        "never_below",
        "mixed",
    ]
    width: int
    line: str = ""
    made_at: tuple[str, ...] = ()


@record
class RatioRow:
    """An exponential of the difference of two models' log-probabilities. ``largest``: of one
    element.

    ``is_of_one``: both sides are of one model, of the same weights and tokens; ``largest`` is how
    far apart they are then, in nats a token on average, and ``read_elsewhere`` are tables that one
    side has read at other places.
    """

    op: str
    module: str
    largest: float
    line: str = ""
    is_of_one: bool = False
    read_elsewhere: tuple[str, ...] = ()


@record
class BackwardRow:
    """An ``autograd.Function`` whose backward gives the same whatever it is given, and not what its
    forward has.

    ``num``: values of its result. ``apart``: how far the gradients that it gave are from those of
    its forward by differences, as a share of the larger ones. ``line``: FILE:LINE of its backward.
    """

    name: str
    num: int
    apart: float
    line: str = ""


@record
class Probe:
    """One window of a run, in its own formats and in float32, undone.

    ``ranges``: of float32 values, read against the format that the run has for them, worst headroom
    first; backward ones as the run scales its loss. ``problems``: what could not be measured, and
    why.
    """

    at: StepId
    since: int | None = None
    """Step in which this was first met, where it takes two windows to tell."""
    num_micro: int
    loss: float | None = None
    reference_loss: float | None = None
    loss_scale: float | None = None
    lr: float | None = None
    ranges: tuple[RangeRow, ...] = ()
    gradients: tuple[GradientRow, ...] = ()
    are_all_zero: bool = False
    """Whether every gradient of the run itself was exactly zero when the update was near."""
    updates: tuple[UpdateRow, ...] = ()
    states: tuple[StateRow, ...] = ()
    broken: tuple[str, ...] = ()
    """Parameters that the probed update makes non-finite."""
    logits: LogitGap | None = None
    coarse: tuple[CoarseRow, ...] = ()
    drift: tuple[DriftRow, ...] = ()
    num_rows_pooled_at_padding: int = 0
    pooled_at: str = ""
    """FILE:LINE of what reads them, where that is known."""
    ratios: tuple[RatioRow, ...] = ()
    objective: tuple[ObjectiveRow, ...] = ()
    cancelled: tuple[CancelledRow, ...] = ()
    lost_sums: tuple[LostSumRow, ...] = ()
    backwards: tuple[BackwardRow, ...] = ()
    stale: tuple[float, float] | None = None
    """Losses with the copies of weights that autocast keeps, and with weights cast anew."""
    problems: tuple[str, ...] = ()
    seconds: float = 0.0
