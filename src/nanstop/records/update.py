"""What an update rests on: state of an earlier run, and how micro-batches are added up."""

from __future__ import annotations

from nanstop.records.record import record
from nanstop.records.values import SourceLine
from nanstop.records.vocabulary import Phase


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
    num_single: int = 0
    """Updates of one micro-batch each, whose loss was divided by the ``num_asked`` that accelerate
    was told to sum up."""
    num_asked: int = 0
    backward_at: SourceLine | None = None
    """The line that asked accelerate for these backwards."""


@record
class ReplicaFacts:
    """Copies of a model that several ranks keep alike, and that differ.

    ``weight``: the first that does, of ``num_differ`` among ``num_compared``; ``ranks``: those
    whose copy is not that of most, or of the first one. ``step``: in which that was seen;
    ``last_equal``: in which all were last seen equal, None where they never were.
    ``num_updates``: how many each rank has come to in between, ``num_local`` at most of gradients
    that were not exchanged, ``num_late`` of such as a backward had added to after the exchange.
    ``is_past_wrapper``: whether what keeps the copies alike is not called at all, in the line
    ``written_at``. ``option``: of the optimizer, that has other ``options`` on each rank;
    ``state``: of it, that differed when the weights did not.
    """

    weight: str
    ranks: tuple[int, ...]
    step: int
    last_equal: int | None = None
    num_differ: int = 1
    num_compared: int = 1
    is_exchanged: bool = True
    """Whether the gradient of this weight is one that the ranks exchange."""
    arrived_equal: bool | None = None
    """Whether its gradient was the same on all ranks when the backward was over; None: there is
    none, or that was not seen."""
    consumed_equal: bool | None = None
    """Whether it was when an update took it."""
    is_that_update: bool = False
    """Whether that is the very update that parted the copies, and not a later one."""
    looked_at: int | None = None
    """The step of that update."""
    num_updates: tuple[int, ...] = ()
    num_local: int = 0
    num_late: int = 0
    is_past_wrapper: bool = False
    option: str = ""
    options: tuple[float, ...] = ()
    state: str = ""
    written_at: tuple[SourceLine, ...] = ()
    """Lines that have written to gradients between that backward and the update."""
    largest: float | None = None
    """The largest difference of two values of the weight in step ``measured``, at ``index``, where
    the first of ``ranks`` and another have ``values``; None where it was not measured."""
    index: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    measured: int | None = None


@record
class DeviceFacts:
    """One micro-batch run on the device of each rank, from the same weights.

    ``devices``: their names, by rank. ``num_compared``: operations that read the same bits on all
    of them. ``op``: the first of those whose results are not the same bits and of which one device
    stands out, "" where there is none; ``module`` and ``phase``: its place. ``ranks``: those whose
    device gave the odd result.

    ``errors``: by rank, how far its result is from the same operation in float64 on the host, in
    units of the format's spacing at the largest value; None where that could not be computed.
    ``unsteady``: the odd device gave two results for the same bits, and every other one result.
    """

    devices: tuple[str, ...]
    step: int
    num_compared: int
    op: str = ""
    module: str = ""
    phase: Phase = "forward"
    ranks: tuple[int, ...] = ()
    errors: tuple[float | None, ...] = ()
    unsteady: bool = False
