"""What the devices of several ranks made of one micro-batch."""

from __future__ import annotations

from nanstop.records.record import record
from nanstop.records.vocabulary import Phase


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
